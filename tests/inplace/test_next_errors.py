"""Compressed steps hold the next errors and the codes, and nothing else, until they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

ROOT = Path(__file__).parents[2]


def peak_per_parameter(name: str, parameters: int = 4_000_000) -> float:
    """Return the bytes that a step holds above parameters, gradients and state, in a process of its own."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.steps.step", "--peak", name, "--parameters", str(parameters)]
    options = {"cwd": ROOT, "env": env, "timeout": ranks.LIMIT}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    found = int(done.stdout.split()[-1])
    if found < 0:
        pytest.skip("this system does not forget the peak of a process")
    return found / parameters


@pytest.mark.reliability
def test_a_compressed_step_holds_the_next_errors_and_the_codes():
    errors = 4 + 4 / 2  # a worker's, and a server's of two ranks
    for name in ("1-bit Adam compressed, fn.Optimizer", "1-bit Adam compressed, fn.Optimizer, lazy error"):
        assert errors <= peak_per_parameter(name) < 1.1 * errors, name
