"""`benchmarks/report.py`: every table of the pages is what the command writes from the JSON; every script runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

from benchmarks import report
from benchmarks.measure import commit, machine

ROOT = Path(__file__).parents[2]

LONG = ("step", "sharded", "sites", "muon", "train_lm", "train_fsdp")
QUICK = [
    pytest.param(name, marks=pytest.mark.reliability) if name in LONG else name
    for name in report.MEASUREMENTS
    if name not in ("slow_link", "against")
]
"""What runs below: `test_slow_link.py` has its own runs, and a clone need not have the older commit."""


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_pages_are_what_the_command_writes(page: Path) -> None:
    text = page.read_text()
    assert report.renewed(text) == text


def test_every_table_stands_on_the_pages_once() -> None:
    named = [name for page in report.PAGES for _, name, _ in report.BLOCK.findall(page.read_text())]
    assert sorted(named) == sorted(name for name, _ in report.tables())


def test_no_table_of_figures_stands_beside_those_that_are_written() -> None:
    own, _ = report.PAGES[0].read_text().split("## On a GPU")
    heads = [line for line in report.BLOCK.sub("", own).splitlines() if set(line) <= set("|-: ") and line]
    assert heads == []


@pytest.mark.parametrize("name", report.MEASUREMENTS)
def test_above_a_table_stand_its_command_machine_and_commit(name: str) -> None:
    found, text = report.result(name), report.measured(name)
    if found is None:
        assert text.startswith(report.NOT_YET)
        return
    about = found["about"]
    command = report.MEASUREMENTS[name].command
    assert text.startswith(f"    python {command} --json benchmarks/results/{name}.json\n")
    assert about["commit"] in text
    assert "with changes" not in about["commit"]
    assert about["cpu"] in text


@pytest.mark.reliability
@pytest.mark.parametrize("name", QUICK)
def test_a_script_runs_and_its_json_makes_its_table(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/report.py", "--measure", "--quick", str(tmp_path), "--only", name]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == 0, ended.stderr + (ROOT / "out" / f"{name}.log").read_text()
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert {**found["about"], **machine(), "commit": commit()} == found["about"]
    head, line, *rows = report.MEASUREMENTS[name].table(found).splitlines()
    assert rows
    assert {row.count(" |") for row in (head, line, *rows)} == {head.count(" |")}
