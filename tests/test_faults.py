"""A restart under torchrun. Kills: `test_transactions`; ranks that do not match: `test_ranks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from scripts import restarted
from scripts.faults import FAULTS, GOES_ON

ROOT = Path(__file__).parent.parent


def torchrun(folder: Path, fault: str) -> tuple[list[torch.Tensor], str]:
    """Train under torchrun with a fault of rank 1 and restarts; return the final weights, and what was printed."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *launch, "--monitor-interval", "0.2", "tests/scripts/restarted.py", str(folder), fault]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=ranks.LIMIT, cwd=ROOT, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(folder / "weights.pt"), run.stdout


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Return the weights of an undisturbed run."""
    return ranks.run(2, restarted.train, tmp_path_factory.mktemp("calm"))[0]


@pytest.mark.reliability
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_with_a_fault_ends_with_the_weights_of_an_undisturbed_run(calm, tmp_path, fault):
    found, text = torchrun(tmp_path / "disturbed", fault)
    assert ("resumed from step 8" in text) == (fault not in GOES_ON)
    assert all(map(torch.equal, calm, found))
