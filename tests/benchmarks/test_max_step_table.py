"""`benchmarks/results/max_step.json`: all runs are there, and they say what they are cited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.atlas import max_step

ROOT = Path(__file__).parents[2]

ROWS = json.loads((ROOT / "benchmarks" / "results" / "max_step.json").read_text())


@pytest.mark.parametrize("method", [f"{name}, max_step={limits[0]}" for name, limits in max_step.LIMITS.items()])
def test_with_the_default_no_run_ends_above_twice_adamws_loss_with_its_seed(method: str) -> None:
    exact = {(r["task"], r["lr"], r["seed"]): r["loss"] for r in ROWS if r["method"] == "adamw"}
    own = [(r["loss"], exact[r["task"], r["lr"], r["seed"]]) for r in ROWS if r["method"] == method]
    assert len(own) == 13
    assert all(loss is not None and loss < 2 * adamw for loss, adamw in own)


def test_all_runs_are_there() -> None:
    done = {tuple(row[key] for key in max_step.Run._fields) for row in ROWS}
    assert {tuple(run) for run in max_step.runs()} == done
