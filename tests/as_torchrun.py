"""Scripts run as torchrun runs them, in a rank that a test has already."""

from __future__ import annotations

import os
import runpy
import sys
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
