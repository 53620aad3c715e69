"""Ratios over the length of runs: rates are chosen on a seed that is not reported, and a seed counts whole or not."""

from __future__ import annotations

import math

import pytest

from benchmarks.atlas.longer import (
    CHOOSING,
    LENGTHS,
    OF_BASE,
    SEEDS,
    STARTS,
    WORKERS,
    missing,
    rate_for,
    ratios,
    searched,
    tuned_at,
)
from benchmarks.atlas.paired import rate_at
from benchmarks.atlas.summary import BASE, MAIN


def search_of(name: str, steps: int, best: int) -> list[dict[str, object]]:
    """Return the runs of a search whose lowest loss is at a place."""
    rates = {k: rate_at(STARTS[name], k) for k in range(-2, 3)}
    alike = {"task": MAIN, "method": name, "workers": WORKERS, "seed": CHOOSING, "steps": steps}
    return [{**alike, "lr": lr, "tuning": 2.0 + abs(k - best)} for k, lr in rates.items()]


def test_first_come_searches_then_seeds_that_choose_nothing() -> None:
    assert {run.seed for run in missing([])} == {CHOOSING}
    rows = [row for name in STARTS for steps in tuned_at(name) for row in search_of(name, steps, 0)]
    wanted = missing(rows)
    assert {run.seed for run in wanted} == {*SEEDS}
    assert len(wanted) == len(SEEDS) * (len(OF_BASE) + (len(STARTS) - 1) * len(LENGTHS))
    assert all(run.lr == STARTS[run.method] for run in wanted)


def test_a_search_goes_on_from_an_edge() -> None:
    lr, lacking = searched(search_of(BASE, 400, 2), BASE, 400)
    assert math.isnan(lr)
    assert lacking == (rate_at(STARTS[BASE], 3),)


def test_a_run_between_two_searches_takes_a_rate_between_theirs() -> None:
    rates = {400: 0.04, 1600: 0.01}
    assert [rate_for(rates, n) for n in (280, 400, 800, 1600, 3200)] == [0.04, 0.04, 0.02, 0.01, 0.01]


def test_a_ratio_is_of_seeds_with_all_runs_of_adamw() -> None:
    curve = [{"method": BASE, "seed": 1, "steps": n, "loss": 4 - math.log(n)} for n in OF_BASE]
    own = [{"method": "muon", "seed": seed, "steps": 400, "loss": 4 - math.log(800)} for seed in SEEDS]
    assert ratios([*curve, *own], "muon", 400) == [pytest.approx(0.5)]
    below = [{"method": "muon", "seed": 1, "steps": 400, "loss": -9.0}]
    assert ratios([*curve, *below], "muon", 400) == [0.0]
