"""Checkpoints in a round: bit for bit on the same ranks; on others the anchor and what was undelivered."""

from __future__ import annotations

from functools import partial
from typing import Any

import chains
import pytest
import torch
import torch.distributed as dist
from ranks import run

import fn
from fn import tree
from fn.adapters import checkpoint

SAVED, STEPS = 10, 14  # steps: a mean is on its way at step 10, and errors wait
MAKE = partial(chains.diloco, axis="data", codec=fn.int8(), fragments=2, alpha=0.5)
METHODS: dict[str, tuple[Any, Any]] = {
    "late": (MAKE, fn.every(6, fragments=2, delay=2, start=2)),
    "as late as may be": (MAKE, fn.every(6, fragments=2, delay=5, start=2)),
}


def optimizer(method: str) -> fn.Optimizer:
    make, schedule = METHODS[method]
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (37, 12, 5)]
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(params, make, schedule=schedule, lr=0.02)


def take(opt: fn.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for p in opt.param_groups[0]["params"]:
        p.grad = p.detach() + torch.randn(p.shape, generator=generator)
    opt.step()


def shared(opt: fn.Optimizer) -> list[torch.Tensor]:
    """Return what all ranks hold alike: the anchor, the means that are on their way, the outer momentum."""
    fields = ("anchor", "pending", "more", "outer")
    return [x.clone() for name in fields for x in tree.leaves(tree.fields(opt.states, name))]


def undelivered(opt: fn.Optimizer) -> torch.Tensor:
    """Return the sum over parameters of the mean of the workers' errors, and of the servers'."""
    halves = [tree.leaves(tree.fields(opt.states, half)) for half in ("worker", "server")]
    worker, server = (torch.stack([x.double().sum() for x in leaves]).sum() for leaves in halves)
    both = torch.stack([worker / dist.get_world_size(), server])
    dist.all_reduce(both)
    return both.sum()


def first_run(folder: str, method: str) -> dict[str, Any]:
    opt = optimizer(method)
    for step in range(STEPS):
        if step == SAVED:
            checkpoint.save(folder, opt)
            held, rest = shared(opt), undelivered(opt)
        take(opt, step)
    return {"held": held, "rest": rest, "end": [p.detach() for p in opt.param_groups[0]["params"]]}


def second_run(folder: str, method: str) -> dict[str, Any]:
    opt = optimizer(method)
    checkpoint.load(folder, opt)
    held, rest = shared(opt), undelivered(opt)
    for step in range(SAVED, STEPS):
        take(opt, step)
    alike = [x.clone() for x in tree.leaves(tree.fields(opt.states, "anchor"))]
    return {"held": held, "rest": rest, "anchor": alike, "end": [p.detach() for p in opt.param_groups[0]["params"]]}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_in_a_round_goes_on(tmp_path, method):
    before = run(2, first_run, str(tmp_path), method)
    same = run(2, second_run, str(tmp_path), method)
    for old, new in zip(before, same, strict=True):
        assert all(map(torch.equal, old["held"], new["held"]))
        assert all(map(torch.equal, old["end"], new["end"]))
    others = run(3, second_run, str(tmp_path), method)
    for new in others:
        assert all(map(torch.equal, before[0]["held"], new["held"]))
        assert abs(float(new["rest"] - before[0]["rest"])) <= 1e-5 * max(1.0, abs(float(before[0]["rest"])))
        assert all(map(torch.equal, new["anchor"], others[0]["anchor"]))
        assert all(bool(p.isfinite().all()) for p in new["end"])
