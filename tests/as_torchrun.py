"""Scripts run as torchrun runs them, in a rank that a test has already."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist


def execute(path: Path, *arguments: str) -> dict[str, Any]:
    """Run a script as torchrun would, in this process, whose group is open already; return its names."""
    argv = [str(path), *arguments]
    already = mock.patch.multiple(dist, init_process_group=lambda *a, **k: None, destroy_process_group=lambda: None)
    rank = mock.patch.dict(os.environ, RANK=str(dist.get_rank()))
    with (
        already,
        rank,
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        return runpy.run_path(str(path), run_name="__main__")


def as_started_by_torchrun() -> None:
    """Show a trainer the environment of this rank, whose group is open already, and let accelerate forget another."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # nobody connects there
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def shared_folder() -> str:
    """Return a new folder, the same on all ranks."""
    folder = [tempfile.mkdtemp(prefix="fn-test-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return str(folder[0])


def same_on_all_ranks(x: object) -> bool:
    """Return whether all ranks come with the same."""
    of_ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, x)
    return all(other == of_ranks[0] for other in of_ranks)
