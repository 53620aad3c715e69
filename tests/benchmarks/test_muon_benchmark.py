"""`benchmarks/steps/muon.py`: what its contenders send, without a clock."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from benchmarks.steps import muon


def sent_and_moved(layers: int, width: int) -> tuple[dict[str, int], dict[str, list[torch.Tensor]]]:
    """Return what this rank sends in a step of each, and the params after three steps of the exact ones."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with fn.bind(init_device_mesh("cpu", (world,), mesh_dim_names=("data",))):
        sent = muon.sent_by(muon.contenders(layers, width, rank))
        exact = {
            muon.REPLICATED: lambda params: muon.ours(params, fn.Phase.WARMUP, owned=False),
            muon.OWNED: lambda params: muon.ours(params, fn.Phase.WARMUP),
            muon.PEER: muon.peer,
        }
        moved = {}
        for name, make in exact.items():
            params = muon.parameters(layers, width, rank)
            grads = [p.grad for p in params]
            step = make(params)
            for _ in range(3):
                for p, g in zip(params, grads, strict=True):
                    p.grad = g
                step()
            moved[name] = [p.detach() for p in params]
    return sent, moved


@pytest.mark.parametrize("world", [2, 4])
def test_owned_steps_send_what_they_promise_and_all_take_the_same_step(world: int) -> None:
    """Exactly no more than an all-reduce, in 8 bits both ways less than 0.3 of it, in the mean over the ranks."""
    of_ranks = ranks.run(world, sent_and_moved, 2, 64)
    sent = {name: sum(book[name] for book, _ in of_ranks) / world for name in of_ranks[0][0]}
    elements = sum(torch.Size(shape).numel() for shape in muon.shapes(2, 64))
    assert sent[muon.REPLICATED] == pytest.approx(2 * (world - 1) / world * elements * 4, abs=4)
    assert sent[muon.OWNED] <= sent[muon.REPLICATED] + 4
    assert sent[muon.CODED] <= 0.3 * sent[muon.REPLICATED]
    assert muon.bytes_of_peer(2, 64, world) > 1.4 * sent[muon.REPLICATED]
    for _, moved in of_ranks:
        for name in (muon.OWNED, muon.PEER):
            for p, base in zip(moved[name], moved[muon.REPLICATED], strict=True):
                torch.testing.assert_close(p, base, rtol=1e-4, atol=1e-5)
