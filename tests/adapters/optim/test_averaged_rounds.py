"""DDP in front of rounds: within an island it averages what an island shares; over islands it is refused."""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fn
from fn.adapters import ddp

two, four = ranks.Cases(2), ranks.Cases(4)


def trained(inside: bool = False, local: bool = False, make=fn.diloco, **options) -> tuple[str, bool, int]:
    """Train with DDP, over all or within an island of two; return what was refused, whether params moved, steps."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("island", "place"))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3), process_group=mesh["place"].get_group() if inside else None)
    if local:
        ddp.keep_local(model)
    bound = mesh["island"] if world == 4 else {"island": dist.group.WORLD}
    with fn.bind(bound):
        opt = fn.Optimizer(model.parameters(), partial(make, axis="island"), schedule=fn.every(2), **options)
    refused, noise = "", torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        opt.zero_grad()
        model(torch.randn(5, 4, generator=noise)).square().sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            opt.step()
        except ValueError as error:
            refused = str(error)
            break
    return refused, not all(map(torch.equal, before, model.parameters())), opt.steps


@two
def over_all():
    return [trained(make=make) for make in (fn.diloco, fn.local_sgd, fn.muloco, fn.sparse_loco)]


@two
def kept_local():
    return trained(local=True)


@two
def on_purpose():
    return trained(refuse_averaged=False)


@four
def within_an_island():
    return trained(inside=True)


@four
def over_the_islands():
    return trained()


def test_an_average_over_ranks_that_train_alone_is_refused_in_the_first_exchange():
    for refused, moved, steps in [each for answer in two.answer("over_all") for each in answer]:
        assert "are the same on ranks 0 and 1 of 'island'" in refused
        assert "fn.adapters.ddp.keep_local(model)" in refused
        assert "refuse_averaged=False" in refused
        assert moved
        assert steps == 2  # the local step counts


@pytest.mark.parametrize("how", ["kept_local", "on_purpose"])
def test_gradients_of_ones_own_are_taken_and_averaged_ones_on_purpose(how):
    assert two.answer(how) == [("", True, 4)] * 2


def test_an_average_within_an_island_is_taken_and_one_over_islands_refused():
    assert four.answer("within_an_island") == [("", True, 4)] * 4
    for refused, _, steps in four.answer("over_the_islands"):
        assert "are the same on ranks 0 and 1 of 'island'" in refused
        assert steps == 2  # the local step counts
