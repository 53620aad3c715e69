"""FSDP2 inside islands, local steps across them: the numbers of whole models, one for each island."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fn

STEPS, MESH = 9, ("island", "shard")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator)).square().mean()


def across_islands() -> dict[str, Any]:
    """Train as islands of two ranks, and as two whole models with averaged gradients; return how far they are apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=MESH)
    make, schedule = partial(fn.diloco, axis="island"), fn.every(4, delay=1, start=2)
    model, twin, found = net(), net(), {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    with fn.bind(mesh["island"]):
        opt = fn.Optimizer(model.parameters(), make, schedule=schedule, lr=0.02)
        tx = make(lr=0.02)
        params = [p.detach() for p in twin.parameters()]
        state = tx.init(params)
        for step in range(STEPS):
            loss(model, step).backward()
            opt.step()
            opt.zero_grad()
            twin.zero_grad()
            loss(twin, step).backward()
            grads = [p.grad.clone() for p in twin.parameters()]
            for g in grads:
                dist.all_reduce(g, group=mesh["shard"].get_group())
            updates, state = tx.update(schedule(step))([g / 2 for g in grads], state, params)
            params = fn.apply_updates(params, updates)
            with torch.no_grad():
                for p, new in zip(twin.parameters(), params, strict=True):
                    p.copy_(new)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    found["far"] = max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)
    found["cleared"] = all(p.grad is None for p in model.parameters())
    found["elements"] = sum(p.to_local().numel() for p in opt.param_groups[0]["params"])
    found["refused"] = refusals(mesh, model)
    return found


def refusals(mesh: Any, model: nn.Module) -> list[str]:
    said = []
    for axes, make in [
        ({"data": mesh["shard"].get_group()}, fn.diloco),
        ({"data": mesh["island"].get_group()}, fn.onebit_lamb),
    ]:
        with fn.bind(axes):
            try:
                fn.Optimizer(model.parameters(), partial(make, axis="data"))
            except (ValueError, fn.RanksDisagree) as error:
                said.append(str(error))
    return said


@pytest.mark.slow
def test_islands_of_fsdp2_train_as_whole_models_do():
    answers = run(4, across_islands)
    count = sum(p.numel() for p in net().parameters())
    for found in answers:
        assert found["far"] <= 2e-6
        assert found["cleared"]
        same_axis, lamb = found["refused"]
        assert "params: expected parameter 0, a DTensor, on mesh axes apart from 'data'" in same_axis
        assert "make's result: expected links that go element by element" in lamb
    assert sum(found["elements"] for found in answers[:2]) == count


def rows_without_a_gradient() -> float:
    """Average over islands in each step; tokens of the last rows, the piece of one rank, come late."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=MESH)
    torch.manual_seed(0)
    model = nn.Embedding(8, 3)
    params, grads = [model.weight.detach().clone()], []
    fully_shard(model, mesh=mesh["shard"])
    with fn.bind(mesh["island"]):
        opt = fn.Optimizer(model.parameters(), partial(fn.adamw, axis="island"), lr=0.02)
    tx, updates = fn.adamw(0.02), None
    state = tx.init(params)
    for tokens in ([0, 1], [2, 3], [4, 7], [0, 5], [6, 7]):
        (model(torch.tensor(tokens)).sum() * (1 + dist.get_rank())).backward()
        grads = [torch.zeros(8, 3).index_add(0, torch.tensor(tokens), torch.full((2, 3), 2.5))]  # the mean of 1 to 4
        opt.step()
        opt.zero_grad()
        updates, state = tx.update(fn.Phase.WARMUP)(grads, state, params)
        params = fn.apply_updates(params, updates)
    return float((model.weight.full_tensor() - params[0]).abs().max())


def test_pieces_of_a_tensor_are_of_one_age_wherever_its_first_gradient_is() -> None:
    assert max(run(4, rows_without_a_gradient)) <= 2e-6


def refused_then_whole() -> int:
    """Add a group of DTensors that is refused, and then one of whole tensors; return how many stand."""
    sharded, whole = net(), net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    opt = fn.Optimizer(whole[0].parameters(), fn.lamb)
    with pytest.raises(ValueError, match="make's result: expected links that go element by element"):
        opt.add_param_group({"params": list(sharded.parameters())})
    opt.add_param_group({"params": list(whole[2].parameters())})
    return len(opt.param_groups)


def test_a_group_of_dtensors_that_was_refused_leaves_nothing_behind():
    assert run(1, refused_then_whole) == [2]
