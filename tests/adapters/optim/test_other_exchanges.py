"""Exchanges of rounds that are not the same one on all ranks: another fragment, or of another step."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from test_transactions import bits, same

import fn
from fn import Round, tree
from fn.kernels import flags

two = ranks.Cases(2)

CODECS = {"gloo": fn.identity, "connections of our own": fn.sign}
CASES = [(codec, delay) for codec in CODECS for delay in (0, 1)]


def build(codec: str, delay: int) -> tuple[fn.Optimizer, list[Any]]:
    """Return an optimizer with an exchange in every second step, of two fragments of one size in turn."""
    params = [torch.nn.Parameter(torch.full((64,), float(i))) for i in range(2)]
    make = partial(fn.diloco, axis="data", codec=CODECS[codec](), fragments=2)
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(params, make, schedule=fn.every(4, fragments=2, delay=delay), lr=0.1), params


def take(opt: fn.Optimizer, params: list[Any], count: int) -> None:
    for _ in range(count):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 + i + dist.get_rank())
        opt.step()


def anchors_agree(opt: fn.Optimizer) -> bool:
    (anchor,) = tree.fields(opt.states, "anchor")
    mine = torch.cat([x.flatten() for x in anchor])
    rows = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(rows, mine)
    return torch.equal(*rows)


def taken_until_refused(opt: fn.Optimizer, params: list[Any], count: int) -> tuple[Any, ...]:
    """Take steps until one raises; return the error, and whether what it leaves is what local steps alone make."""
    twin, copies = copy.deepcopy((opt, params))
    twin.schedule = lambda step: Round()
    take(twin, copies, count)
    try:
        take(opt, params, count)
    except fn.RanksDisagree as error:
        left = same(bits(([p.detach() for p in params], opt.states)), bits(([p.detach() for p in copies], twin.states)))
        return error.rank, error.field, str(error), left
    return -1, "", "", False


@two
def a_fragment_ahead() -> dict[Any, Any]:
    found = {}
    for case in CASES:
        opt, params = build(*case)
        take(opt, params, 4)
        schedule = opt.schedule
        if dist.get_rank() == 1:
            opt.schedule = lambda step, schedule=schedule: schedule(step + 2)
        refused = taken_until_refused(opt, params, 2)
        opt.schedule = schedule
        take(opt, params, 6)
        found[case] = *refused, anchors_agree(opt)
    return found


@two
def an_exchange_left_out() -> dict[Any, Any]:
    """Let rank 1 leave out exchanges, as Ctrl-C just before they begin has it do, and meet rank 0 in later ones."""
    found = {}
    for case in CASES:
        opt, params = build(*case)
        take(opt, params, 4)
        schedule = opt.schedule
        if dist.get_rank() == 1:
            opt.schedule = lambda step: Round()
            take(opt, params, 4)
            opt.schedule = schedule
        refused = taken_until_refused(opt, params, 2)
        opt.state_dict()
        found[case] = *refused, anchors_agree(opt)
    return found


@two
def a_whole_exchange_left_out() -> tuple[Any, ...]:
    """Compare behind the mean, as on an accelerator, of which nobody waits for a flag."""
    params = [torch.nn.Parameter(torch.full((64,), float(i))) for i in range(2)]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, partial(fn.diloco, axis="data"), schedule=fn.every(2), lr=0.1)
    with mock.patch.object(flags, "is_on_host", return_value=False):
        take(opt, params, 4)
        before = anchors_agree(opt)
        schedule = opt.schedule
        if dist.get_rank() == 1:
            opt.schedule = lambda step: Round()
            take(opt, params, 2)
            opt.schedule = schedule
        refused = taken_until_refused(opt, params, 2)
        return *refused, before, anchors_agree(opt)


def test_ranks_that_compare_behind_the_mean_leave_an_exchange_out_alike():
    for rank, field, text, left, before, agree in two.answer("a_whole_exchange_left_out"):
        assert (rank, field) == (1, "step")
        assert text.endswith("parameters and state are as after the local step, which counts")
        assert left
        assert before
        assert agree


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_runs_a_fragment_ahead_is_named_and_the_exchange_is_left_out(case):
    for found in two.answer("a_fragment_ahead"):
        rank, field, text, left, agree = found[case]
        assert (rank, field) == (1, "fragment")
        assert f"is of fragment 1 after {6 - case[1]} steps on rank 1 of 'data', and of fragment 0 after" in text
        assert left
        assert agree


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_left_out_an_exchange_is_named_in_the_next_one(case):
    for found in two.answer("an_exchange_left_out"):
        rank, field, text, left, agree = found[case]
        assert (rank, field) == (1, "step")
        assert text.endswith("parameters and state are as after the local step, which counts")
        assert left
        assert agree
