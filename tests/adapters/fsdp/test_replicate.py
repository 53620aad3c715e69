"""torch's `replicate`, which is made of FSDP2's parts: what no public hook sees, what is refused, and what trains."""

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
from fn.adapters.fsdp import compress

pytest.importorskip("torch.distributed._composable.replicate_with_fsdp", reason="torch has no such replicate")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator)).square().mean()


def mean_gradients() -> list[torch.Tensor]:
    model = net()
    loss(model).backward()
    grads = [p.grad for p in model.parameters()]
    for g in grads:
        dist.all_reduce(g)
    return [g / dist.get_world_size() for g in grads]


def replicated() -> dict[str, Any]:
    from torch.distributed._composable.replicate_with_fsdp import replicate  # where torch has it

    found: dict[str, Any] = {}
    model, seen = net(), list[torch.Tensor]()
    replicate(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replica",)))
    try:
        compress(model)
    except TypeError as error:
        found["refused"] = str(error)
    model.set_all_reduce_hook(lambda x: seen.append(x.clone()))
    loss(model).backward()
    wanted = torch.cat([g.flatten() for g in mean_gradients()])
    found["the hook sees the mean"] = bool(torch.allclose(torch.cat([x.flatten() for x in seen]), wanted))
    model.zero_grad()
    seen.clear()
    model.set_requires_all_reduce(False)
    loss(model).backward()
    found["nor without a mean"] = len(seen), model[0].weight.grad
    model, twin = net(), net()
    replicate(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replica",)))
    opt = fn.Optimizer(model.parameters(), fn.muon, labels=fn.labels_of(model), lr=0.05, max_norm=1.0)
    with fn.bind({"data": dist.group.WORLD}):
        make = partial(fn.muon, axis="data", owned=False)
        theirs = fn.Optimizer(twin.parameters(), make, labels=fn.labels_of(twin), lr=0.05, max_norm=1.0)
    for step in range(3):
        for m, o in ((model, opt), (twin, theirs)):
            loss(m, step).backward()
            o.step()
            o.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    found["apart"] = max(float((p.to_local() - q).detach().abs().max()) for p, q in pairs)
    return found


def test_no_public_hook_sees_a_gradient_before_it_is_averaged() -> None:
    """So gradients in codes are refused; an optimizer takes what is averaged, and also Muon, for params are whole."""
    for found in run(2, replicated):
        assert found["the hook sees the mean"]
        assert found["nor without a mean"] == (0, None)
        assert "torch's replicate has replicated, which averages gradients before any public hook" in found["refused"]
        assert "fully_shard(module, mesh=mesh['shard']) on a mesh of (W, 1)" in found["refused"]
        assert found["apart"] <= 2e-6


def instead() -> tuple[float, float, list[torch.Tensor], int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
    model = net()
    fully_shard(model, mesh=mesh["shard"])
    compressed = compress(model, fn.int8(), fn.classic(), replicas=mesh["replica"])
    loss(model).backward()
    found, wanted = [p.grad.to_local() for p in model.parameters()], mean_gradients()
    far = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    return far, max(float(g.abs().max()) for g in wanted), found, compressed.sent.total


def test_what_is_said_to_do_instead_averages_in_codes() -> None:
    first, second = run(2, instead)
    far, largest, grads, sent = first
    assert 0 < far < 0.02 * largest
    assert all(map(torch.equal, grads, second[2]))
    assert 0 < sent < 4 * sum(p.numel() for p in net().parameters())
