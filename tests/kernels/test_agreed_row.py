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

SCRIPT = Path(__file__).parents[1] / "scripts" / "agreed_rounds.py"
CAPABILITY = torch.backends.cpu.get_cpu_capability().lower()
MACHINES = (("default", 1), (CAPABILITY, 2))
"""Sets of instructions of torch on a CPU, and numbers of threads."""


def run(*arguments: str, capability: str = CAPABILITY, threads: int = 1) -> str:
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads)}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=ranks.LIMIT
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
    (first, own), (second, other) = (json.loads(job.result()) for job in jobs)
    assert len(first) > 10
    assert first == second
    assert own["diloco, int8"] != other["diloco, int8"]  # or this would prove nothing


def test_each_operation_of_a_rule_is_rounded_once_there():
    start, end = torch.tensor([0.1, 3.0, -7.3]), torch.tensor([1.7, 2.0, 0.3])
    with agreed_row():
        (lerped,), (summed,) = (lists.elementwise(rule, ([start], [end]), 0.3) for rule in (rules.lerp, rules.plus))
        providers = table().providers["cpu"]
    assert {providers[op] for op in ("sign_decode_mean", "dequantize_mean", "elementwise_")} == {"reference"}
    assert torch.equal(lerped, start + 0.3 * (end - start))
    assert torch.equal(summed, start + 0.3 * end)
