"""Rounds with a guard behind `fn.Optimizer`: a rank that breaks is left out; tokens count beside norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from own_pieces import guarded_diloco

import fn
from fn import Round, tree
from fn.adapters.optim.core import stage_exchange
from fn.adapters.torchft.islands import weight_of

two = ranks.Cases(2)


def build(**guard: Any) -> tuple[fn.Optimizer, torch.nn.Parameter]:
    param = torch.nn.Parameter(torch.zeros(4))
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0, "weight_decay": 0.0}
    make = partial(guarded_diloco, axis="data", guard=guard, **outer)
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer([param], make, schedule=fn.every(2), lr=0.1), param


def train(opt: fn.Optimizer, param: torch.nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        param.grad = torch.full_like(param, 1.0 + dist.get_rank())
        opt.step()


@two
def broken() -> dict[float, Any]:
    """Let a param of rank 1 become a bad number, in one round and in all."""
    found = {}
    for bad in (float("inf"), 1e30):
        opt, param = build()
        train(opt, param, 2)
        before = param.detach().clone()
        for _ in range(6):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    param.data[2] = bad  # as a defect of the hardware writes, which torch does not count
            train(opt, param, 2)
        rows = [torch.empty_like(param) for _ in range(2)]
        dist.all_gather(rows, param.detach())
        (first,), (number,) = (tree.fields(opt.states, name) for name in ("first", "number"))
        agreed = torch.equal(*rows), bool(rows[0].isfinite().all()), not torch.equal(before, rows[0])
        found[bad] = *agreed, int(first), int(number), opt.skipped
    return found


@pytest.mark.parametrize("bad", [float("inf"), 1e30])
def test_a_rank_that_sends_rubbish_is_left_out_and_the_others_go_on(bad):
    for found in two.answer("broken"):
        agree, finite, moved, first, number, skipped = found[bad]
        assert agree
        assert finite
        assert moved
        assert skipped == 0
        assert (first, number) == (1, 1)


@two
def by_tokens() -> list[list[float]]:
    """Weigh two differences by tokens, plainly, beside their norms, and where one of them is rubbish."""
    found = []
    for guard, other in (({}, -3.0), ({"temperature": 2.0}, -3.0), ({}, float("nan"))):
        opt, param = build(**guard)
        rank = dist.get_rank()
        with torch.no_grad(), opt.binding:
            param.fill_(-1.0 if rank == 0 else other)
            stage_exchange(opt, Round(0, 0), weight_of([1.0, 3.0], rank)).commit()
        (anchor,) = tree.fields(opt.states, "anchor")
        found.append(anchor[0].tolist())
    return found


def test_differences_count_by_tokens_and_norms():
    weights = torch.exp(-torch.tensor([2.0, 6.0]) / 2.0) * torch.tensor([1.0, 3.0])
    by_both = float((weights * torch.tensor([-1.0, -3.0])).sum() / weights.sum())
    for plainly, with_norms, alone in two.answer("by_tokens"):
        assert plainly == pytest.approx([-2.5] * 4)
        assert with_norms == pytest.approx([by_both] * 4)
        assert alone == pytest.approx([-1.0] * 4)
