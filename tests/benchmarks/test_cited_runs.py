"""Committed runs of the atlas say what docstrings and the planner cite them for."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import first_hour
from benchmarks.atlas import local_rates, max_step, rounds, runs, same_loss
from benchmarks.atlas.paired import difference
from benchmarks.atlas.summary import by_seed
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.report import RESULTS
from fn.planner.recommend import PICKS

MAX_STEP = json.loads((RESULTS / "max_step.json").read_text())


def test_the_papers_outer_step_is_for_long_runs() -> None:
    """
    Differs: fn.local_optimizers.diloco: Without `rounds` the outer rate is 1.0 and the momentum 0.3; on the atlas's
        language model the paper's 0.7 and 0.9 ended 0.09 to 0.37 nats higher in 11 of 12 kinds of runs of 8 to 100
        rounds, and as high in the 12th; in three of 300 and 1000 rounds, on one or two seeds, 0.04 to 0.29 higher.
    """
    rows, gaps = runs.read(RESULTS / "rounds.json"), []
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
    rows = runs.read(RESULTS / "rounds.json")
    for cell, momentum in ((rounds.Cell("diloco", 300, 8, 4), 2 / 3), (rounds.Cell("diloco", 1000, 8, 4), 0.6)):
        chosen, more = rounds.OF_DILOCO(cell.rounds), (rounds.OF_DILOCO.rate(momentum), momentum)
        by_seed = rounds.losses(rows, cell, chosen, "loss")
        assert by_seed
        for seed, loss in rounds.losses(rows, cell, (round(more[0], 9), more[1]), "loss").items():
            assert by_seed[seed] < loss


def test_default_rates_of_local_steps_train_a_small_model() -> None:
    """
    Differs: fn.local_optimizers.diloco: The default rate of local steps is 0.01, for small models; the paper's is
        0.0004.
    """
    assert first_hour.default_rate("diloco") == 0.01
    rows = runs.read(RESULTS / "first_hour.json")
    (adamw, *ours) = (
        by_seed(runs_of(rows, task="names", batch=32, method=name, lr=first_hour.default_rate(name)), "loss")
        for name in ("adamw", *local_rates.START) if "," not in name
    )  # fmt: skip
    for own in ours:
        gaps = [own[seed] - adamw[seed] for seed in range(1, 6)]
        assert max(gaps) < 0
        assert sum(gaps) / 5 < -0.1


@pytest.mark.parametrize("method", [f"{name}, max_step={limits[0]}" for name, limits in max_step.LIMITS.items()])
def test_with_the_default_of_max_step_no_run_ends_above_twice_adamws_loss_with_its_seed(method: str) -> None:
    exact = {(r["task"], r["lr"], r["seed"]): r["loss"] for r in MAX_STEP if r["method"] == "adamw"}
    own = [(r["loss"], exact[r["task"], r["lr"], r["seed"]]) for r in MAX_STEP if r["method"] == method]
    assert len(own) == 13
    assert all(loss is not None and loss < 2 * adamw for loss, adamw in own)


def test_all_runs_of_max_step_are_there() -> None:
    done = {tuple(row[key] for key in max_step.Run._fields) for row in MAX_STEP}
    assert {tuple(run) for run in max_step.runs()} == done


def test_the_planner_reads_what_the_committed_runs_say() -> None:
    rows = json.loads((RESULTS / "same_loss.json").read_text())["rows"]
    read = json.loads(same_loss.PACKAGE.read_text())
    assert read == json.loads(json.dumps(same_loss.package(rows)))
    assert len(read["seeds"]) >= 3
    assert {pick.name for pick in PICKS} <= set(read["methods"])
    assert all("with changes" not in row["commit"] for row in rows)
    for seed in read["seeds"]:
        assert {row["steps"] for row in rows if (row["method"], row["seed"]) == ("adamw", seed)} == {*same_loss.LENGTHS}
