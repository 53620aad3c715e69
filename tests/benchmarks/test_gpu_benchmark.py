"""`benchmarks/gpu.py` itself, on the CPU: every part runs, and speed is not judged."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

PARTS = ("alike", "overlap", "step", "sweep", "deep", "kernels", "methods", "cold", "curve")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


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
