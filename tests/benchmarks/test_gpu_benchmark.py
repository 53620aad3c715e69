"""`benchmarks/gpu.py` itself, on the CPU: every part runs, and speed is not judged."""

from __future__ import annotations

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
