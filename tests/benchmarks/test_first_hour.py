"""The picture of the first hour: worse is to the right, whatever is counted, and what did not run is no point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_hour, first_hour_picture, report
from benchmarks.atlas.paired import Difference

SEARCHED = {0.01: 1.0, 0.00556: 2.0, 0.018: 2.0}
"""AdamW's losses by rate: the best one is 0.01."""


def row(task: str, method: str, lr: float, seed: int, value: float) -> dict[str, Any]:
    batch = first_hour.TASKS[task].batches[0]
    run = {"task": task, "method": method, "workers": 4, "seed": seed, "steps": 200, "lr": lr, "batch": batch}
    return {**run, "tuning": value, "loss": value, "accuracy": value}


def rows(task: str, values: dict[tuple[str, float], float]) -> list[dict[str, Any]]:
    """Return runs of two seeds, of which the second one has 0.5 more of everything, and AdamW's search."""
    search = [row(task, "adamw", lr, 0, loss) for lr, loss in SEARCHED.items()]
    return search + [row(task, *key, seed, x + seed / 2) for key, x in values.items() for seed in (1, 2)]


@pytest.mark.parametrize(("task", "sign"), [("names", 1), ("digits", -1)])
def test_a_method_is_as_far_to_the_right_as_it_is_worse_than_adamw_at_its_rate(task: str, sign: int) -> None:
    """Loss above AdamW's and accuracy below it; at the default rate beside AdamW's at that, else beside its best."""
    found = rows(task, {
        ("adamw", 0.001): 4.0, ("adamw", 0.01): 2.0, ("onebit_adam", 0.001): 4.25, ("onebit_adam", 0.01): 2.5,
        ("muon", 0.02): 1.0,
    })  # fmt: skip
    default, recommended = first_hour_picture.MARKS
    assert first_hour_picture.points(found, task) == [
        ("onebit_adam", default, Difference(sign * 0.25, 0.0), 2),
        ("onebit_adam", recommended, Difference(sign * 0.5, 0.0), 2),
        ("muon", default, Difference(sign * -1.0, 0.0), 2),
    ]


def test_the_picture_has_the_numbers_of_the_table(tmp_path: Path) -> None:
    found = json.loads((report.RESULTS / "first_hour.json").read_text())
    table = first_hour.table(found)
    for point in first_hour_picture.points(found["rows"], "names"):
        assert f"{point.worse:.3f}" in next(
            line for line in table.splitlines() if line.startswith(f"| {point.method} ")
        )
    first_hour_picture.draw(found["rows"], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
