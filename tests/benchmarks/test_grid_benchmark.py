"""The grid, without its link: methods step on two ranks, ours send what is planned, and a run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ranks import python

from benchmarks.links import grid_report
from benchmarks.links.grid_methods import GPT2, HALF, NONE, WAYS, shapes, size_of

ROOT = Path(__file__).parents[2]

SMALL = ("--loopback", "--tiny", "--words", "64", "16", "--rates", "1 Gbit/s", "--four", "--compute", "0.002")
SOME = (NONE, "int4 gradients", "fp8 gradients")


def run(*arguments):
    return python("-m", "benchmarks.links.grid", *SMALL, *arguments, cwd=ROOT)


def parameters(layers, width):
    return sum(math.prod(size) for size in shapes(layers, width))


def test_the_sizes_are_those_of_the_tables():
    assert parameters(*GPT2) == 124_439_808
    assert round(parameters(*HALF) / 1e6) == 61


def test_what_four_ranks_cannot_hold_is_half_as_large():
    assert size_of(WAYS["DiLoCo, int8"], 4) == HALF
    assert size_of(WAYS["DiLoCo, int8"], 2) == size_of(WAYS["1-bit Adam"], 4) == GPT2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    ended = run("--json", str(out / "x.json"), "--png", str(out / "x.png"), "--only", *SOME)
    assert ended.returncode == 0, ended.stderr
    (out / "printed").write_text(ended.stdout)
    return out


@pytest.mark.reliability
def test_a_method_has_a_row_and_sends_what_is_planned(folder):
    result = json.loads((folder / "x.json").read_text())
    cells = list(grid_report.cells(result))
    assert {cell.step.method for cell in cells} == set(SOME) - {NONE}
    for cell in cells:
        if not cell.step.method.startswith("DDP"):  # whose messages are not in the ledger
            assert cell.step.ledger == pytest.approx(cell.planned, rel=1e-9), cell.step.method
        assert cell.predicted > 0
        assert f"| {cell.step.method} |" in (folder / "printed").read_text()
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.reliability
def test_what_is_measured_is_not_measured_again(folder):
    before = (folder / "x.json").read_text()
    ended = run("--json", str(folder / "x.json"), "--only", *SOME)
    assert ended.returncode == 0, ended.stderr
    assert (folder / "x.json").read_text() == before


@pytest.mark.reliability
def test_other_settings_need_another_file(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"points": {"x": {}}, "compute": 1.0, "throttled": False, "words": {}}))
    ended = run("--json", str(file))
    assert ended.returncode == 1
    assert "--json" in ended.stderr
