"""Ranks whose kernels differ may train together, are warned, and never read each other's messages wrongly."""

from __future__ import annotations

import warnings
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


def with_other_kernels(alike: bool) -> list[tuple[str, object, bool]]:
    """Train each optimizer where rank 1 has no Numba; return what was warned of, how far the params are apart at
    most, or the error, and whether averaging them brings the ranks together.
    """
    if alike or dist.get_rank():
        ranks.without("numba")
    found = []
    for optimizer in OF_EACH_KIND:
        with fn.bind({"data": dist.group.WORLD}), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mine = train(optimizer)
                apart: object = float((fn.all_gather(mine, "data") - mine).abs().max())
            except fn.RanksDisagree as error:
                apart = str(error)
                mine = torch.ones(3)
            together = fn.all_gather(fn.pmean(mine, "data"), "data")
        text = " ".join(str(w.message) for w in caught)
        found.append((text, apart, torch.equal(together[0], together[1])))
    return found


def test_ranks_with_other_kernels_are_warned_once_and_drift_by_rounding_only():
    first, second = ranks.run(2, with_other_kernels, False)
    text, apart = "kernels: those of rank 1 of axis 'data' are numpy, torch (cpu), those of rank 0 numba,", []
    assert [text in said for said, *_ in first] == [True, *[False] * (len(OF_EACH_KIND) - 1)]
    assert not any("kernels:" in said for said, *_ in second)
    for optimizer, (_, found, together) in zip(OF_EACH_KIND, first, strict=True):
        if optimizer.name in ("loco_adamw", "sharded_onebit_adam"):  # the same kernel takes their steps
            assert "ranks disagree: kernel 'adamw_into_'" in str(found)
            assert "missing for 'cpu' on rank 1 and there on rank 0" in str(found)
        else:
            assert together
            apart += [found] if optimizer.replicated else []
    assert 0 < max(apart) < 1e-4


def test_ranks_with_the_same_kernels_are_not_warned_and_do_not_drift():
    for found in ranks.run(2, with_other_kernels, True):
        for optimizer, (text, apart, _) in zip(OF_EACH_KIND, found, strict=True):
            assert "kernels:" not in text
            assert apart == 0.0 or not optimizer.replicated
