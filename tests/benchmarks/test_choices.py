"""What docstrings say of the learning rate is what was measured."""

from __future__ import annotations

import json
import math

import pytest

import fn
from benchmarks import first_hour, report
from benchmarks.atlas import choices, runs
from benchmarks.atlas.methods import METHODS

CONTRIB = [name for name, method in METHODS.items() if name in dir(fn.contrib) and method.tasks]


@pytest.mark.parametrize("name", CONTRIB)
def test_a_docstring_in_contrib_has_the_factor_of_the_atlas(name: str) -> None:
    said, rate = first_hour.advice(getattr(fn.contrib, name).__doc__)
    assert "AdamW" in said
    assert math.isclose(rate(1.0), choices.start(runs.read(runs.FULL), name))


@pytest.mark.parametrize("method", first_hour.METHODS)
def test_the_first_hour_ran_with_the_rates_of_signatures_and_docstrings(method: str) -> None:
    """A rate that is changed makes its rows those of another method: take them out, and run again.

    On the atlas's tasks methods are run as questions come up, on some seeds.
    """
    rows = json.loads((report.RESULTS / "first_hour.json").read_text())["rows"]
    for task, batch in [(task, batch) for task, setting in first_hour.TASKS.items() for batch in setting.batches]:
        base, _ = first_hour.tuned_rate(rows, task, batch)
        assert base is not None
        own = [row for row in rows if (row["task"], row["method"], row["batch"]) == (task, method, batch)]
        shown = {(row["lr"], row["seed"]) for row in own if row["seed"] != first_hour.TUNED_ON}
        rates = {first_hour.default_rate(method), first_hour.recommended_rate(method, base)}
        seeds = range(1, 6) if task in ("names", "moved digits") else {seed for _, seed in shown}
        assert shown == {(lr, seed) for lr in rates for seed in seeds}
