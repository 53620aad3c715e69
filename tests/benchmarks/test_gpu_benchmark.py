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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

FAULTY = """
import os, sys, time
from gpu_rows import Row, at_most, outcome

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


@pytest.mark.parametrize(
    "part", ["kernels", *(pytest.param(part, marks=pytest.mark.reliability) for part in ("step", "overlap", "deep"))]
)
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
    assert len(found["rows"]) >= 3
    for row in found["rows"]:
        assert f"| {part} | {row['name']} |" in ended.stdout
        assert row["ok"] is not False
        assert row["ok"] is None or row["wanted"] == "right"


def test_a_check_that_raises_dies_or_hangs_is_a_row_and_the_others_run(tmp_path, monkeypatch):
    (tmp_path / "gpu_faulty.py").write_text(FAULTY)
    for folder in (BENCHMARKS, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "SECONDS_OF_A_CHECK", 5.0)
    rows = {row["name"]: row for row in gpu.run_part("faulty", gpu.Options(device="cpu"))}
    assert [name for name, row in rows.items() if row["ok"] is False] == ["fails", "dies", "hangs", "slow"]
    assert rows["good"]["ok"] is True
    assert rows["last"]["value"] == 1.0
    assert rows["fails"]["note"].endswith("RuntimeError: made up")
    assert "ended with 7" in rows["dies"]["note"]
    assert "took too long" in rows["hangs"]["note"]
    assert "**NO**" in gpu.table(rows.values())
