"""`benchmarks.own_time`: it runs, and the planner's table has what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import python

from fn.planner.methods import rows

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks/results/own_time.json").read_text())["calls"]


@pytest.mark.parametrize("name", MEASURED)
def test_the_table_has_what_was_measured(name):
    row = next(row for row in rows() if row.name.startswith(name))
    for measured, known in zip(MEASURED[name], row.calls, strict=True):
        assert known == pytest.approx(max(0.0, measured), rel=0.05, abs=2.0)


@pytest.mark.reliability
def test_it_runs(tmp_path):
    path = tmp_path / "own_time.json"
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.own_time --rounds 1 --json"
    ended = python(*launch.split(), str(path), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(path.read_text())["calls"].keys() == MEASURED.keys()
