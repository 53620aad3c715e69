"""The plain DDP recipe, and the README's diff of a plain DDP script, on two gloo ranks."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run

import fn

ROOT = Path(__file__).parent.parent
TRAINERS = ROOT / "examples" / "trainers"


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


def plain_ddp(folder: str) -> list[Any]:
    for out, arguments in (("once", []), ("two", ["--stop-after", "5"]), ("two", ["--resume"])):
        os.makedirs(f"{folder}/{out}", exist_ok=True)
        dist.barrier()
        execute(TRAINERS / "plain_ddp.py", "--out", f"{folder}/{out}", *arguments)
    return [torch.load(f"{folder}/{out}/end-{dist.get_rank()}.pt") for out in ("once", "two")]


def test_plain_ddp_trains_through_both_phases_and_resumes_bit_for_bit(tmp_path):
    """With a scheduler and accumulation; the restart is in the compressed phase."""
    ends = [end for rank in run(2, plain_ddp, str(tmp_path)) for end in rank]
    for end in ends:
        assert (end["steps"], end["lr"]) == (8, pytest.approx(1e-3))
        assert all(map(torch.equal, end["params"], ends[0]["params"]))
    sys.path.insert(0, str(TRAINERS))
    start = importlib.import_module("data").network()
    assert not torch.equal(start[0].weight, ends[0]["params"][0])


def diff() -> list[str]:
    """Return the lines of the README's diff."""
    (found,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return found.splitlines()


def script(without: str) -> str:
    """Return the script before ("+") or after ("-") the change."""
    return "\n".join(line[1:] for line in diff() if line[:1] != without)


def before_and_after(folder: str) -> list[Any]:
    found = []
    for name, without in (("before", "+"), ("after", "-")):
        path = Path(folder) / f"{name}{dist.get_rank()}.py"
        path.write_text(script(without))
        with fn.ledger() as sent:
            names = execute(path)
        found.append((type(names["opt"]).__module__, [x.tolist() for x in names["losses"]], sent.total))
        found.append([p.detach().flatten().tolist() for p in names["model"].parameters()])
    return found


def test_three_lines_take_the_place_of_one_in_a_plain_ddp_script(tmp_path):
    """And in the warm-up they are AdamW's steps, weight decay and bias correction included."""
    assert [sum(line.startswith(sign) for line in diff()) for sign in "-+"] == [1, 3]
    first, second = run(2, before_and_after, str(tmp_path))
    for (before, losses, none), _, (after, ours, sent), _ in (first, second):
        assert (before, after) == ("torch.optim.adamw", "fn.adapters.torch_optim")
        assert none == 0 < sent
        assert ours[:101] == pytest.approx(losses[:101], rel=1e-3, abs=1e-6)
        assert losses[-1] < losses[0] / 4
        assert ours[-1] < ours[0] / 4
    assert first[1] == second[1]
    assert first[3] == second[3]
