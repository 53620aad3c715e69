"""The agreed row: machines that compute otherwise make the same anchors and outer states of the same codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch

from fn.kernels import lists, rules
from fn.kernels.table import agreed_row, table

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "agreed_rounds.py"
CAPABILITY = torch.backends.cpu.get_cpu_capability().lower()
MACHINES = (("default", 1), (CAPABILITY, 2))
"""Sets of instructions of torch on a CPU, and numbers of threads."""

OTHER = os.environ.get("FN_OTHER_PYTHON", "")
"""A Python that has another version of torch."""


def run(*arguments: str, capability: str = CAPABILITY, threads: int = 1, program: str = sys.executable) -> str:
    here = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [program, str(SCRIPT), *arguments],
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        timeout=ranks.LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(CAPABILITY == "default", reason="this processor has one set of instructions only")
def test_codes_of_rounds_lead_to_the_same_anchors_on_processors_that_compute_otherwise(tmp_path):
    run("record", log := str(tmp_path / "rounds.pt"))
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(partial(run, "replay", log, capability=capability, threads=threads))
            for capability, threads in MACHINES
        ]
    first, second = (json.loads(job.result()) for job in jobs)
    assert len(first["agreed"]) > 10
    assert first["agreed"] == second["agreed"]
    assert first["own"]["diloco, int8"] != second["own"]["diloco, int8"]  # or this would prove nothing


@pytest.mark.reliability
@pytest.mark.skipif(not OTHER, reason="FN_OTHER_PYTHON names no Python with another version of torch")
def test_codes_of_rounds_lead_to_the_same_anchors_with_another_version_of_torch(tmp_path):
    run("record", log := str(tmp_path / "rounds.pt"))
    first, second = (json.loads(run("replay", log, program=program)) for program in (sys.executable, OTHER))
    assert first["torch"] != second["torch"]
    assert len(first["agreed"]) > 10
    assert first["agreed"] == second["agreed"]


def test_each_operation_of_a_rule_is_rounded_once_there():
    start, end = torch.tensor([0.1, 3.0, -7.3]), torch.tensor([1.7, 2.0, 0.3])
    with agreed_row():
        (lerped,), (summed,) = (lists.elementwise(rule, ([start], [end]), 0.3) for rule in (rules.lerp, rules.plus))
        providers = table().providers["cpu"]
    assert {providers[op] for op in ("sign_decode_mean", "dequantize_mean", "elementwise_")} == {"reference"}
    assert torch.equal(lerped, start + 0.3 * (end - start))
    assert torch.equal(summed, start + 0.3 * end)
