"""A parameter without a gradient: zero on that rank, and left alone where the optimizer has one rank only."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import run

import fn


def missing() -> tuple[Any, ...]:
    """Take two steps in which rank 1 has no gradient for the second of two parameters."""
    params = {name: torch.nn.Parameter(torch.ones(3)) for name in ("first", "second")}
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params.items(), partial(fn.adamw, axis="data"), lr=0.1)
    params["first"].grad = torch.ones(3)
    params["second"].grad = torch.ones(3) if dist.get_rank() == 0 else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            opt.step()
    (first, second), (mu,) = params.values(), fn.roles.find(opt.states, "first_moment")
    texts = [str(w.message) for w in said if "had no gradient" in str(w.message)]
    return first.tolist(), second.tolist(), fn.tree.leaves(mu)[1].tolist(), fn.tree.leaves(mu)[0].tolist(), texts


def test_among_ranks_it_counts_as_zero_and_one_warning_names_it_with_the_cure():
    here, there = run(2, missing)
    assert here[:4] == there[:4]
    _, second, half, whole, _ = here
    assert [2 * x for x in half] == whole  # the mean of one gradient and of zero
    assert second[0] < 1
    assert here[-1] == []
    (text,) = there[-1]
    assert "second" in text
    assert "requires_grad_(False) on all ranks" in text
