"""`benchmarks/late.py` and the losses of a step late: what their tables say of what was measured."""

from __future__ import annotations

from benchmarks import late
from benchmarks.atlas import late as losses


def test_a_late_step_is_compared_with_the_longer_of_computation_and_message() -> None:
    seconds = {"in time": 0.9, "late": 0.44, "alone": 0.15, "local": 0.1}
    found = {f"1 Gbit/s, {part}": {"seconds": [x, x, 9.0]} for part, x in seconds.items()}
    (row,) = late.table({"adamw": {"found": found}})
    assert row["formula"] == late.WAIT + 0.1
    assert row["ratio"] == 0.44 / row["formula"]


def test_losses_are_paired_by_seed() -> None:
    def rows(method: str, *values: float) -> list[dict[str, object]]:
        return [{"task": "digits", "method": method, "seed": seed, "loss": x} for seed, x in enumerate(values)]

    table = losses.table([*rows("adamw", 0.1, 0.2, 0.3), *rows("adamw, late", 0.2, 0.3, 0.4)])
    assert table.splitlines()[2] == "| digits | adamw | 3 | 0.200 | **+0.100 ± 0.000** |  |"


def test_time_to_adamws_loss_is_steps_times_seconds_beside_ddps_step() -> None:
    seconds = {"in time": 0.9, "late": 0.33, "alone": 0.6, "local": 0.1}  # DDP: 0.1, then 0.5 of message, then 0.1
    found = {f"{rate}, {part}": {"seconds": [x]} for rate in late.RATES for part, x in seconds.items()}
    steps = {length: 3.0 - k / 10 for k, length in enumerate(losses.same_loss.LENGTHS)}
    curve = [{"task": "language model", "method": "adamw", "seed": 21, "steps": n, "loss": x} for n, x in steps.items()]

    def row(loss: float) -> str:
        own = {"task": "language model", "method": "adamw, late", "seed": 21, "steps": losses.STEPS, "loss": loss}
        return losses.times([own], curve, {"adamw": {"found": found}}).splitlines()[2]

    assert row(steps[losses.STEPS]) == "| adamw | 1 | 1.00 | 0.47 | 0.47 |"
    assert row(1.0) == "| adamw | 1 | below 0.50 | below 0.24 | below 0.24 |"


def test_every_method_is_late_on_the_seeds_that_the_atlas_does_not_show() -> None:
    runs = losses.wanted()
    assert {run.method.partition(", late")[0] for run, _ in runs} == set(losses.STARTS)
    assert {run.seed for run, _ in runs} == set(losses.SEEDS)
    for run, method in runs:
        if ", late" in run.method:
            assert method.schedule(run.steps)(run.steps - 1).end is not None
