"""`benchmarks/atlas.py`: every named optimizer has a row, splits share nothing, and the committed runs are complete."""

from __future__ import annotations

import pytest
from registry import OPTIMIZERS, OTHERS

import fn
from benchmarks.atlas import runs
from benchmarks.atlas.methods import METHODS
from benchmarks.atlas.summary import missing_runs, summary
from benchmarks.atlas.tasks import TASKS


def test_every_named_optimizer_has_a_row() -> None:
    assert {named.name.split(",")[0] for named in (*OPTIMIZERS, *OTHERS)} <= {name.split(",")[0] for name in METHODS}


def test_every_run_ends_with_all_ranks_alike() -> None:
    """Else the mean that is scored would be one more exchange, which nobody counts."""
    for steps in (*(task.steps for task in TASKS.values()), runs.QUICK_STEPS):
        for name, method in METHODS.items():
            assert method.schedule(steps)(steps - 1) not in (fn.Phase.LOCAL, fn.Round()) or method.ends_apart, name


@pytest.mark.parametrize("task", TASKS)
def test_the_committed_runs_are_complete(task: str) -> None:
    rows, setting = runs.read(runs.FULL), TASKS[task]
    shown = summary(rows, task, setting.workers, setting.steps)
    assert [row["method"] for row in shown] == [name for name in METHODS if task in METHODS[name].tasks]
    assert all(row["seeds"] == len(setting.seeds) for row in shown)
    assert missing_runs(rows, task) == 0
