"""`scale.py`, `local_rates.py` and `downstream.py` of the atlas: rates are chosen on a seed that no table shows."""

from __future__ import annotations

from typing import Any

from benchmarks import first_hour
from benchmarks.atlas import downstream, local_rates, runs, scale
from benchmarks.atlas.summary import by_seed
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.measure import ROOT


def row(run: Any, loss: float, **more: Any) -> dict[str, Any]:
    return {**run._asdict(), "tuning": loss, "loss": loss, **more}


def test_percents_are_above_data_parallelism_of_the_same_seed_at_the_rate_that_was_chosen() -> None:
    rows: list[dict[str, Any]] = []
    while (group := scale.missing(rows, 16)) and {run.method for run in group} == {"diloco"}:
        assert all(run.seed == scale.CHOOSING for run in group) or len(rows) >= 3
        rows += [row(run, 2.0 + abs(run.lr - 3e-3) + 0.01 * run.seed * run.workers, width=16) for run in group]
    assert (group[0].method, group[0].seed) == ("muloco", scale.CHOOSING)
    rows += [row(scale.run_of("diloco", name, 16, 1, 3e-3), loss, width=16)
             for name, loss in (("data parallel", 2.0), ("M = 8", 2.2))]  # fmt: skip
    assert "| ours | 0.014336 M | AdamW | 2.000 |  |  |  | +10.0 % |" in scale.table(rows)
    rows += [row(scale.run_of("diloco", name, 16, 2, 3e-3), loss, width=16)
             for name, loss in (("data parallel", 2.0), ("M = 8", 2.2))]  # fmt: skip
    assert "| +10.0 ± 0.0 % |" in scale.table(rows)
    assert "| 2,400 M | AdamW | 2.326 | -0.4 % | -0.1 % | +0.3 % | +1.1 % |" in scale.table(rows)  # the planner's table


def test_a_default_is_compared_with_the_rate_that_was_chosen_on_another_seed() -> None:
    rows: list[dict[str, Any]] = []
    while (group := local_rates.missing(rows, "names", "diloco")) and group[0].seed == local_rates.CHOOSING:
        rows += [row(run, abs(run.lr - 3e-3), task="names") for run in group]
    assert {run.seed for run in group} == set(local_rates.SEEDS)
    rows += [row(run, 1.0 + (run.lr != 3e-3), task="names") for run in group]
    default = group[-1].lr
    assert f"| diloco | {default:g} | 1.000 at 0.003 | {'chosen' if default == 3e-3 else '+1.000 ± 0.000'} |" in (
        local_rates.table(rows)
    )


def test_bases_are_compared_with_adamw_of_equal_tokens() -> None:
    alike = {"steps": 992, "code": 2.0, "before": 3.0, "code after": 2.5}
    rows = [
        {"base": base, "seed": seed, "loss": 1.5 + k * seed, **alike}
        for k, base in enumerate(downstream.BASES) for seed in (1, 2)
    ]  # fmt: skip
    assert "| adamw, equal tokens | 992 | 2.000 | 3.000 | 1.500 | 2.500 |" in downstream.table(rows)
    assert "| +1.500 ± 6.353 |" in downstream.table(rows)


def test_default_rates_of_local_steps_train_a_small_model() -> None:
    """
    Differs: fn.local_optimizers.diloco: The default rate of local steps is 0.01, for small models; the paper's is
        0.0004.
    """
    assert first_hour.default_rate("diloco") == 0.01
    rows = runs.read(ROOT / "benchmarks" / "results" / "first_hour.json")
    (adamw, *ours) = (
        by_seed(runs_of(rows, task="names", batch=32, method=name, lr=first_hour.default_rate(name)), "loss")
        for name in ("adamw", *local_rates.START) if "," not in name
    )  # fmt: skip
    for own in ours:
        gaps = [own[seed] - adamw[seed] for seed in range(1, 6)]
        assert max(gaps) < 0
        assert sum(gaps) / 5 < -0.1
