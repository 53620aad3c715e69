"""Steps to AdamW's loss: what the planner reads is what whole runs say."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.atlas import same_loss
from benchmarks.atlas.same_loss import LENGTHS, STEPS, interval, package, ratios, steps_of_adamw
from benchmarks.report import RESULTS
from fn.planner.recommend import PICKS

CURVE = [(200, 3.0), (280, 2.8), (400, 2.9), (560, 2.4), (800, 2.0)]


@pytest.mark.parametrize(
    ("loss", "steps"),
    [(3.0, 200), (2.8, 280), (2.4, 560), (2.6, math.sqrt(280 * 560)), (1.9, math.inf), (3.1, 0.0)],
)
def test_a_loss_gives_steps_and_a_longer_run_that_ended_higher_gives_none(loss: float, steps: float) -> None:
    assert steps_of_adamw(loss, CURVE) == pytest.approx(steps)


def rows(losses: dict[str, float], seed: int, steps: int = STEPS) -> list[dict[str, object]]:
    """Return AdamW's runs of a seed, and one of each method."""
    curve = [{"method": "adamw", "seed": seed, "steps": n, "loss": loss} for n, loss in CURVE]
    return curve + [{"method": name, "seed": seed, "steps": steps, "loss": loss} for name, loss in losses.items()]


def test_a_ratio_is_of_a_seed_whose_runs_are_all_there() -> None:
    found = [*rows({"sign_muon": 2.4}, 21, 280), *rows({"sign_muon": 2.4}, 22, 280)[1:]]
    assert ratios(found, "sign_muon") == [pytest.approx(280 / 560)]


def test_a_ratio_beyond_the_runs_of_adamw_is_refused() -> None:
    """A bound is no measurement: compare a shorter or a longer run of the method."""
    with pytest.raises(ValueError, match=r"sign_muon, seed 21: expected a loss between 2\.0 and 3\.0, but got 1\.5"):
        ratios(rows({"sign_muon": 1.5}, 21), "sign_muon")


def test_the_interval_is_of_logarithms() -> None:
    mean, low, high = interval([0.5, 2.0])
    assert mean == pytest.approx(1.0)
    assert low == pytest.approx(1 / high)
    assert high == pytest.approx(math.exp(12.706 * math.log(4) / 2), rel=1e-3)


def test_the_planner_reads_what_the_committed_runs_say() -> None:
    runs = json.loads((RESULTS / "same_loss.json").read_text())["rows"]
    read = json.loads(same_loss.PACKAGE.read_text())
    assert read == json.loads(json.dumps(package(runs)))
    assert len(read["seeds"]) >= 3
    assert {pick.name for pick in PICKS} <= set(read["methods"])
    assert all("with changes" not in row["commit"] for row in runs)
    for seed in read["seeds"]:
        assert {row["steps"] for row in runs if (row["method"], row["seed"]) == ("adamw", seed)} == {*LENGTHS}
