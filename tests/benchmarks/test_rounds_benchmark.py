"""`benchmarks/atlas/rounds.py`: runs trained together are those of the atlas; what is reported chooses nothing."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

import torch

import fn
from benchmarks.atlas import rounds, runs
from benchmarks.atlas import train as atlas
from benchmarks.atlas.methods import Method
from benchmarks.atlas.paired import difference
from benchmarks.atlas.tasks import Score, Task
from benchmarks.measure import ROOT

CELL = rounds.Cell("diloco", 3, 2, 2)


def regression() -> Task:
    """Return a task that takes no time: four numbers from noisy products."""

    def batches(seed: int, workers: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return lambda: (x := torch.randn(workers, 3, 4, generator=generator), x.sum(-1).square())

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return (x @ params["w"] - y).square().mean()

    def params(seed: int) -> Any:
        return {"w": torch.randn(4, generator=torch.Generator().manual_seed(seed))}

    return Task(params, loss, batches, lambda params: Score(float(params["w"].sum()), float(params["w"].prod())))


def test_runs_that_are_trained_together_are_those_of_the_atlas() -> None:
    task, pairs = regression(), ((1, 0), (0.7, 0.9))
    for row in rounds.train([rounds.Run(*CELL, seed, 0.1, *pair) for seed in (1, 2) for pair in pairs], task):
        make = partial(rounds.METHODS["diloco"], outer_lr=row["outer_lr"], outer_momentum=row["outer_momentum"])
        method = Method("", make, lambda steps: fn.every(2), 0.1, "", "", alike=False)
        alone = atlas.train(atlas.Run("", "", 2, row["seed"], 6, 0.1), task, method)
        assert (row["tuning"], row["loss"]) == (alone["tuning"], alone["loss"])


def row(seed: int, pair: tuple[float, float], tuning: float | None, loss: float) -> dict[str, Any]:
    run = rounds.Run(*CELL._replace(rounds=8, h=8, workers=4), seed, rounds.LR, *pair)
    return {**run._asdict(), "tuning": tuning, "loss": loss}


def test_the_outer_step_is_chosen_on_a_seed_and_split_that_the_table_does_not_show() -> None:
    cell, best = CELL._replace(rounds=8, h=8, workers=4), rounds.SETTINGS[0]
    rows = [row(0, pair, None if pair == (0.7, 0.9) else 2.0 + (pair != best), 9.0) for pair in rounds.SETTINGS]
    shown = [row(seed, pair, 0.1, 3.0 + (pair != best)) for seed in rounds.SEEDS for pair in (best, (1.0, 0.3))]
    assert rounds.chosen(rows[:-1], cell) is None
    assert rounds.chosen([*shown, *rows], cell) == best
    line = "| diloco | 8 | 8 | 3.000 at 1 / 0 | +1.000 ± 0.000 |  |  |  |  |"
    assert line in rounds.table([*rows, *shown])
    assert all(math.isnan(x) for x in rounds.losses(rows, cell, (0.7, 0.9), "tuning").values())


def test_the_papers_outer_step_is_for_long_runs() -> None:
    """
    Differs: fn.local_optimizers.diloco: Without `rounds` the outer rate is 1.0 and the momentum 0.3; on the atlas's
        language model the paper's 0.7 and 0.9 ended 0.09 to 0.37 nats higher in 11 of 12 kinds of runs of 8 to 100
        rounds, and as high in the 12th; in three of 300 and 1000 rounds, on one or two seeds, 0.04 to 0.29 higher.
    """
    rows, gaps = runs.read(ROOT / "benchmarks" / "results" / "rounds.json"), []
    for cell in rounds.cells("diloco"):
        ours, papers = (rounds.losses(rows, cell, pair, "loss") for pair in ((1.0, 0.3), (0.7, 0.9)))
        gap = difference({seed: papers[seed] for seed in rounds.SEEDS}, ours)
        assert gap is not None
        gaps.append(gap)
    equal, *higher = sorted(gaps, key=lambda gap: gap.mean)
    assert equal.verdict == "not told apart"
    assert len(higher) == 11
    assert {gap.verdict for gap in higher} == {"higher"}
    assert f"{higher[0].mean:.2f} to {higher[-1].mean:.2f}" == "0.09 to 0.37"
    long = []
    for cell in (rounds.Cell("diloco", n, h, 4) for n, h in ((300, 8), (300, 32), (1000, 8))):
        ours, papers = (rounds.losses(rows, cell, pair, "loss") for pair in ((1.0, 0.3), (0.7, 0.9)))
        long.append(statistics.fmean(papers[seed] - ours[seed] for seed in ours))
    assert f"{min(long):.2f} to {max(long):.2f}" == "0.04 to 0.29"


def test_more_momentum_in_longer_runs_was_not_better() -> None:
    """What `rounds=` had chosen for them ended higher on each seed; so it goes on with the momentum of short runs."""
    rows = runs.read(ROOT / "benchmarks" / "results" / "rounds.json")
    for cell, momentum in ((rounds.Cell("diloco", 300, 8, 4), 2 / 3), (rounds.Cell("diloco", 1000, 8, 4), 0.6)):
        chosen, more = rounds.OF_DILOCO(cell.rounds), (rounds.OF_DILOCO.rate(momentum), momentum)
        by_seed = rounds.losses(rows, cell, chosen, "loss")
        assert by_seed
        for seed, loss in rounds.losses(rows, cell, (round(more[0], 9), more[1]), "loss").items():
            assert by_seed[seed] < loss


def test_muon_and_muloco_are_compared_at_rates_that_a_search_chose_for_each() -> None:
    rows: list[dict[str, Any]] = []
    for _ in range(9):
        groups = rounds.exact_runs(rows, 25, 8)
        if all(run.seed in rounds.SEEDS for own in groups.values() for run in own):
            break
        for run in (run for own in groups.values() for run in own if run.seed not in rounds.SEEDS):
            best = 0.0315 if run.workers == 1 else 0.0054
            rows.append({**run._asdict(), "tuning": abs(math.log(run.lr / best)), "loss": 0.0})
    rates = {name: {run.lr for run in own} for name, own in groups.items()}
    assert rates == {name: {0.0315 if name == "muon" else 0.0054} for name in rates}
    assert [*rates] == ["muon", "muloco", "muloco, int8", "muloco, int4", "muloco, 2 bits"]
    assert {run.seed for own in groups.values() for run in own} == {*rounds.SEEDS}
