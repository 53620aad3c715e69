"""Ranks whose kernels differ are refused: they would round differently, and some would send other things."""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS

import fn

pytest.importorskip("numba", reason="the extra `cpu` is not installed")


KINDS = ("adamw", "onebit_adam", "zero_one_adam", "loco_adamw", "sharded_onebit_adam", "muon, int8")
OF_EACH_KIND = [optimizer for optimizer in OPTIMIZERS if optimizer.name in KINDS]


def train(optimizer) -> torch.Tensor:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 4097))
    schedule = optimizer.schedule if len(optimizer.phases) > 1 else None
    opt = fn.Optimizer([p], partial(optimizer.make, axis="data"), schedule=schedule, lr=optimizer.lr)
    for t in range(24):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * t + dist.get_rank()))
        opt.step()
    return p.detach()


def with_other_kernels(alike: bool) -> list[float | str]:
    """Train each optimizer where rank 1 has no Numba; return how far the params are apart at most, or the error."""
    if alike or dist.get_rank():
        ranks.without("numba")
    found: list[float | str] = []
    for optimizer in OF_EACH_KIND:
        with fn.bind({"data": dist.group.WORLD}):
            try:
                mine = train(optimizer)
                found.append(float((fn.all_gather(mine, "data") - mine).abs().max()))
            except fn.RanksDisagree as error:
                found.append(str(error))
    return found


def test_ranks_with_other_kernels_are_refused():
    text = "ranks disagree: the list of kernels (`python -m fn table`) is numpy, torch (cpu) on rank 1 and numba, numpy"
    for found in ranks.run(2, with_other_kernels, False):
        assert all(str(error).startswith(text) for error in found)


def test_ranks_with_the_same_kernels_do_not_drift():
    for found in ranks.run(2, with_other_kernels, True):
        assert all(apart == 0.0 or not x.replicated for x, apart in zip(OF_EACH_KIND, found, strict=True))
