"""The grid, without its link: methods step on two ranks, and ours send what is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import python

from benchmarks.links import grid_report
from benchmarks.links.grid_methods import NONE

ROOT = Path(__file__).parents[2]

SMALL = ("--loopback", "--tiny", "--words", "64", "16", "--rates", "1 Gbit/s", "--four", "--compute", "0.002")
SOME = (NONE, "int4 gradients", "fp8 gradients")


@pytest.mark.reliability
def test_a_method_has_a_row_and_sends_what_is_planned(tmp_path):
    out = ("--json", str(tmp_path / "x.json"), "--png", str(tmp_path / "x.png"))
    ended = python("-m", "benchmarks.links.grid", *SMALL, *out, "--only", *SOME, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "x.json").read_text())
    cells = list(grid_report.cells(result))
    assert {cell.step.method for cell in cells} == set(SOME) - {NONE}
    for cell in cells:
        if not cell.step.method.startswith("DDP"):  # whose messages are not in the ledger
            assert cell.step.ledger == pytest.approx(cell.planned, rel=1e-9), cell.step.method
        assert cell.predicted > 0
        assert f"| {cell.step.method} |" in ended.stdout
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
