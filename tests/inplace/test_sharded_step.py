"""Sharded Adams in place are the pure chains: the same numbers, bytes and skips, nothing written before all agree."""

from __future__ import annotations

from functools import partial
from typing import Any

import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import tree
from fn.collectives.transports import tcp

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

SHAPES = [(37, 5), (7,), (), (0,), (4097,), (8, 16)]
CASES: list[tuple[Any, torch.dtype, dict[str, Any]]] = [
    (fn.loco_adamw, torch.float32, {}),
    (fn.loco_adamw, torch.float32, {"layout": "per_tensor", "weight_decay": 0.1}),
    (fn.loco_adamw, torch.float32, {"layout": "fused", "feedback": fn.classic(store="int8")}),
    (fn.loco_adamw, torch.float32, {"gather": fn.int8(), "master": True}),
    (fn.loco_adamw, torch.bfloat16, {}),
    (fn.loco_adamw, torch.float16, {"layout": "per_tensor", "gather": fn.int8()}),
    (fn.sharded_onebit_adam, torch.float32, {}),
    (fn.sharded_onebit_adam, torch.float32, {"layout": "per_tensor", "weight_decay": 0.1, "max_step": 0.01}),
    (fn.sharded_onebit_adam, torch.float32, {"layout": "fused", "max_step": None, "feedback": fn.classic(lazy=True)}),
    (fn.sharded_onebit_adam, torch.bfloat16, {"gather": fn.int8()}),
]


def gradient(step: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step == 4 and rank == 0:
        grads[4][4000] = float("nan")
    return [g.to(dtype) for g in grads]


def cases(world: int) -> list[tuple[Any, torch.dtype, dict[str, Any]]]:
    """Return those that ranks take; where they are few they take one of each dtype and of each optimizer."""
    return CASES if world > 2 else CASES[3:7]


def against_the_pure_chain(own_connections: bool) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    if not own_connections:
        tcp._opened[mesh.get_group("data")] = None
    found = []
    for named, dtype, hyper in cases(dist.get_world_size()):
        schedule, make = fn.freeze_after(3), partial(named, axis="data", **hyper)
        params = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES]
        with fn.bind(mesh):
            opt, tx = fn.Optimizer(params, make, schedule=schedule, lr=1e-2), make(lr=1e-2)
            plain = [p.detach().clone() for p in params]
            state = tx.init(plain)
        staged, differences, skipped, bytes_sent = 0, [], [], []
        for step in range(8):
            grads = gradient(step, dist.get_rank(), dtype)
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            with fn.ledger() as sent, in_place_steps.listed() as steps:
                opt.step()
            staged += all(steps)
            with fn.bind(mesh), fn.ledger() as sent_too:
                updates, state = tx.update(schedule(step))(grads, state, plain)
                plain = fn.apply_updates(plain, updates)
            pairs = zip(tree.leaves([params, opt.states[0]]), tree.leaves([plain, state]), strict=True)
            apart = [(a.detach().double() - b.double()).abs() for a, b in pairs if a.numel()]
            differences.append(max(float(d.max()) for d in apart))
            skipped.append(opt.skipped)
            bytes_sent.append((sent.sent, sent_too.sent))
        found.append((staged, differences, skipped, bytes_sent))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "own_connections"), [(1, True), (2, True), (3, False)])
def test_a_sharded_step_in_place_is_the_pure_step(world, own_connections):
    for outcome in ranks.run(world, against_the_pure_chain, own_connections):
        for (_, dtype, hyper), (staged, differences, skipped, sent) in zip(cases(world), outcome, strict=True):
            assert staged == 8, hyper
            assert skipped == [0, 0, 0, 0, 1, 1, 1, 1], hyper
            exact = dtype == torch.float32 and "gather" not in hyper  # else rounding flips last digits
            assert max(differences) < (3e-6 if exact else 1e-2), (hyper, differences)
            for mine, pure in sent[1:3] + sent[6:]:
                assert mine == pure, hyper
