"""Models that went through `torch.compile` after DDP, as accelerate and transformers hand them out."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_cases import Net, build, train, wrapped
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp

STEPS = range(6)
case = ranks.Cases(2)


def compiled() -> Any:
    return torch.compile(DistributedDataParallel(Net()), backend="eager")


def kept(model: Any) -> fn.Optimizer:
    opt = build(model)
    fn.adapters.ddp.keep_local(model)
    return opt


def overlapped(model: Any, least: float = 0.0) -> fn.Optimizer:
    opt = build(model)
    fn.adapters.ddp.overlap(model, opt, least_wire_seconds=least)
    return opt


def overlapped_once(model: Any) -> fn.Optimizer:
    return overlapped(model, 1e9)


WAYS = {way.__name__: way for way in (kept, overlapped, overlapped_once)}


@case
def each_way() -> dict[str, tuple[list, list]]:
    found = {}
    for name, way in WAYS.items():
        ends = []
        for make in (lambda: DistributedDataParallel(Net()), compiled):
            model = make()
            train(model, way(model), STEPS)
            ends.append([p.detach().clone() for p in model.parameters()])
        found[name] = tuple(ends)
    return found


@case
def inside_of_another() -> str:
    model = torch.nn.Sequential(wrapped())
    with fn.bind({"data": dist.group.WORLD}):
        opt = build(model)
    try:
        fn.adapters.ddp.overlap(model, opt)
    except TypeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("name", WAYS)
def test_a_compiled_model_trains_as_the_model_that_was_compiled(name):
    """`overlap` took it for a model without DDP, which then averaged, too: the second step was refused as changed."""
    for found in case.answer("each_way"):
        plain, through_compile = found[name]
        assert all(map(torch.equal, plain, through_compile))


def test_a_model_that_holds_ddp_as_a_part_is_refused():
    """Hooks of its parameters would see local gradients, and the step those that DDP had averaged."""
    assert DistributedDataParallel.__name__ in case.answer("inside_of_another")[0]
    assert "but got Sequential, which holds one" in case.answer("inside_of_another")[0]
