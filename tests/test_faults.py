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

ROOT = Path(__file__).parent.parent


def torchrun(folder: Path) -> tuple[list[torch.Tensor], str]:
    """Train under torchrun with a kill and restarts; return the final weights, and what was printed."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *launch, "--monitor-interval", "0.2", "tests/scripts/restarted.py", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=ranks.LIMIT, cwd=ROOT, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(folder / "weights.pt"), run.stdout


@pytest.mark.reliability
def test_a_rank_killed_under_torchrun_resumes_and_ends_with_the_weights_of_an_undisturbed_run(tmp_path):
    calm, _ = ranks.run(2, restarted.train, tmp_path / "calm")
    found, text = torchrun(tmp_path / "killed")
    assert "resumed from step 8" in text
    assert all(map(torch.equal, calm, found))
