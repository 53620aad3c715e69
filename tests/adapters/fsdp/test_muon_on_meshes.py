"""Optimizers of whole matrices on meshes of several axes: the params of one process, whatever piece a rank has."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fn

STEPS = 5
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
SHAPES = [(7, 6), (5, 9), (8, 8), (6, 7), (3, 5), (4, 10), (9, 5), (11, 6), (5,), (6,), (7,)]
"""Matrices, the last of which is an embedding, and vectors; their sides are not divided by a mesh."""

PLACEMENTS: dict[str, list[tuple[Any, Any]]] = {
    "FSDP2 x TP": [(_StridedShard(0, split_factor=2), ROWS), (ROWS, COLUMNS), (ROWS, ROWS), (COLUMNS, ROWS),
                   (ROWS, WHOLE), (WHOLE, COLUMNS), (WHOLE, WHOLE), (ROWS, ROWS),
                   (ROWS, WHOLE), (_StridedShard(0, split_factor=2), ROWS), (WHOLE, WHOLE)],
    "HSDP": [(WHOLE, ROWS)] * len(SHAPES),
    "TP alone": [(WHOLE, COLUMNS), (WHOLE, ROWS)] * 4 + [(WHOLE, WHOLE)] * 3,
}  # fmt: skip
"""Of each tensor, over two axes."""

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (fn.muon, {}),
    "normuon": (fn.normuon, {}),
    "muon with lion": (partial(fn.muon, other="lion"), {}),
}


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def labels() -> list[str]:
    return ["hidden"] * 7 + ["other"] * 4


def placed(x: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """Return a DTensor, an interleaved one as FSDP2 makes it: cut by the second axis, then by the first."""
    first, second = placements
    if not isinstance(first, _StridedShard):
        return distribute_tensor(x, mesh, placements)
    piece = distribute_tensor(x, mesh["tp"], (second,)).to_local()
    piece = distribute_tensor(piece, mesh["fsdp"], (Shard(first.dim),)).to_local()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def trained(make: Any, place: Any, **more: Any) -> fn.Optimizer:
    """Train by given gradients. Args: place: makes a DTensor of each."""
    params = [torch.nn.Parameter(place(i, x)) for i, x in enumerate(tensors(0))]
    opt = fn.Optimizer(params, partial(make, labels=labels()), lr=0.05, **more)
    for step in range(STEPS):
        for i, (p, g) in enumerate(zip(params, tensors(step + 1), strict=True)):
            p.grad = place(i, g)
        opt.step()
    return opt


def whole(opt: fn.Optimizer) -> list[Tensor]:
    params = opt.param_groups[0]["params"]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in params]


def on_meshes() -> dict[Any, float]:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    found = {}
    for name, (make, more) in METHODS.items():
        alone = whole(trained(make, lambda i, x: x, **more))
        for where, placements in PLACEMENTS.items():
            opt = trained(make, lambda i, x, of=placements: placed(x, mesh, of[i]), **more)
            pairs = zip(whole(opt), alone, strict=True)
            found[where, name] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def test_steps_on_a_mesh_are_those_of_one_process() -> None:
    for found in run(4, on_meshes):
        assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-6))
