"""`benchmarks/gpu.py` itself, on the CPU: every part runs, speed is not judged, and a fault does not stop the rest."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

from benchmarks.gpu import parts as gpu

PARTS = ("alike", "overlap", "step", "sweep", "deep", "kernels", "methods", "cold", "curve")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

FAULTY = """
import os, sys, time
from benchmarks.gpu.rows import Row, at_most, outcome

def fails(): raise RuntimeError("made up")
def dies(): os._exit(7)
def hangs(): time.sleep(60)

def checks(options):
    return {
        "good": lambda: [outcome("good", None)], "fails": fails, "dies": dies, "hangs": hangs,
        "slow": lambda: [at_most(options._replace(device="cuda"), "slow", 2.0, 1.0, "x")],
        "last": lambda: [Row("last", 1.0)],
    }
"""


@pytest.mark.reliability
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_the_cpu_and_judges_no_speed_there(part, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), part, "--device", "cpu", "--quick"]
    ended = subprocess.run(
        [*command, "--json", str(tmp_path / "x.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["about"]["device"] == "cpu"
    assert len(found["rows"]) >= 2
    for row in found["rows"]:
        assert f"| {part} | {row['name']} |" in ended.stdout
        assert row["ok"] is not False
        assert row["ok"] is None or row["wanted"] == "right"


@pytest.mark.reliability
def test_a_check_that_raises_dies_or_hangs_is_a_row_and_the_others_run(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "SECONDS_OF_A_CHECK", 5.0)
    assert gpu.PARTS == PARTS
    kept: list[int] = []
    found = gpu.run_part("faulty", gpu.Options(device="cpu"), lambda rows: kept.append(len(rows)))
    rows = {row["name"]: row for row in found}
    assert kept == [1, 2, 3, 4, 5, 6]  # what is known is kept before the next check begins
    assert [name for name, row in rows.items() if row["ok"] is False] == ["fails", "dies", "hangs", "slow"]
    assert rows["good"]["ok"] is True
    assert rows["last"]["value"] == 1.0
    assert rows["fails"]["note"].endswith("RuntimeError: made up")
    assert "ended with 7" in rows["dies"]["note"]
    assert "took too long" in rows["hangs"]["note"]
    assert "**NO**" in gpu.table(rows.values())


def test_the_fastest_launch_takes_the_line_of_the_one_before(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    sweep = importlib.import_module("benchmarks.gpu.sweep")
    launches = importlib.import_module("fn.kernels.gpu.triton.launches")
    text = sweep.TABLE.read_text()
    for name in sweep.CALLS:
        assert sweep.written(text, name, sweep.shown(launches.LAUNCHES[name])) == text
    other = launches.Launch(2048, registers=48)
    scope: dict[str, object] = {"__name__": "launches"}
    exec(sweep.written(text, "onebit_kernel", sweep.shown(other)), scope)
    found = scope["LAUNCHES"]
    assert found == {**launches.LAUNCHES, "onebit_kernel": other}
