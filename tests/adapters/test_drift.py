"""A single bit that flips on one rank is found within the check's period, and named."""

from __future__ import annotations

import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from test_transactions import bits, build, same, set_gradients

import fn
from fn import Phase, tree
from fn.adapters.drift import check_drift
from fn.collectives.agreement import checksum

EVERY, FLIPPED_AFTER = 3, 4
PLACES = {
    "parameter": ("onebit_adam", lambda params, opt: params[0], "params[0].0"),
    "second moment": ("onebit_adam", lambda params, opt: tree.leaves(tree.fields(opt.states, "nu"))[-1], "nu.4"),
    "local phases": ("zero_one_adam", lambda params, opt: tree.leaves(tree.fields(opt.states, "nu"))[0], "nu.0"),
}


def flip(x: torch.Tensor, bit: int) -> None:
    words = x.detach().view(-1).view(torch.int32)
    words[words.numel() // 2] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)


def drifting(place: str, bit: int) -> tuple:
    name, where, _ = PLACES[place]
    phases = [Phase.COMPRESSED, Phase.WARMUP, Phase.COMPRESSED, Phase.LOCAL]
    schedule = fn.freeze_after(2) if name == "onebit_adam" else lambda t: phases[t % 4] if t > 1 else Phase.WARMUP
    params, opt = build(name, 1, schedule)
    check_drift(opt, EVERY)
    for t in range(12):
        set_gradients(params, t)
        if t == FLIPPED_AFTER and dist.get_rank() == 1:
            flip(where(params, opt), bit)
        before = bits((params, opt.states))
        try:
            opt.step()
        except fn.RanksDrifted as error:
            return t, error.rank, error.field, error.step, error.since, same(bits((params, opt.states)), before)
    return (None,)


def rescheduled() -> tuple[int, str]:
    """Give one rank another schedule, which gives another phase only later: there the ranks wait for each other."""
    params, opt = build("onebit_adam", 1, fn.freeze_after(7))
    check_drift(opt, EVERY)
    for t in range(12):
        set_gradients(params, t)
        if t == FLIPPED_AFTER and dist.get_rank() == 1:
            opt.schedule = fn.freeze_after(9)
        try:
            opt.step()
        except fn.RanksDrifted as error:
            return t, error.field
    return -1, ""


def written(number: str) -> tuple[int, str]:
    """Write a number into the param group of one rank, as a scheduler that steps by a loss of its own does."""
    params, opt = build("onebit_adam", 1, fn.freeze_after(2))
    check_drift(opt, EVERY)
    for t in range(12):
        set_gradients(params, t)
        if t == FLIPPED_AFTER and dist.get_rank() == 1:
            opt.param_groups[0].update({"lr": 0.5} if number == "lr" else {"betas": (0.5, 0.999)})
        try:
            opt.step()
        except fn.RanksDrifted as error:
            return t, error.field
    return -1, ""


def alone(axis: str | None) -> str:
    """Train with gradients of each rank's own, with an axis or without; return what was said."""
    p = torch.nn.Parameter(torch.ones(3))
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([p], functools.partial(fn.adamw, axis=axis))
    check_drift(opt, 1)
    try:
        for _ in range(2):
            p.grad = torch.full((3,), (-1.0) ** dist.get_rank())
            opt.step()
    except fn.RanksDrifted as error:
        return str(error)
    return "alike"


CASES = [("parameter", 0), ("parameter", 31), ("second moment", 0), ("local phases", 0)]


def all_drifting() -> list[tuple]:
    others = rescheduled(), written("lr"), written("betas"), alone(None), alone("data")
    return [*(drifting(*case) for case in CASES), *others]


@functools.cache
def answers() -> list[list[tuple]]:
    return ranks.run(3, all_drifting)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{place}-{bit}" for place, bit in CASES])
def test_a_flipped_bit_is_found_within_the_period_and_named_and_the_step_moves_nothing(case):
    for found in answers():
        t, rank, field, step, since, unchanged = found[case]
        assert t == step == 6
        assert since == 3
        assert rank == 1
        assert field.endswith(PLACES[CASES[case][0]][2])
        assert unchanged


def test_a_number_that_one_rank_only_was_given_is_named_and_not_the_parameters_that_follow_from_it():
    for found in answers():
        assert found[-4:-2] == [(6, "groups[0].lr"), (6, "groups[0], hyper-parameters other than lr,")]


def test_a_schedule_that_one_rank_only_was_given_is_named_before_the_ranks_wait_for_each_other():
    assert all(found[len(CASES)] == (6, "schedule") for found in answers())


def test_an_optimizer_that_was_given_no_axis_is_named_as_the_cause():
    for *_, without, with_axis in answers():
        assert "does not communicate over 'data', for its `make` is given no axis" in without
        assert with_axis == "alike"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_every_single_bit_changes_the_checksum(dtype):
    x = torch.randn(7).to(dtype)
    expected = checksum(x)
    data = x.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(x) != expected
            data[place] ^= 1 << bit
    assert checksum(x) == expected


def test_a_period_below_one_is_refused_and_the_handle_ends_the_checks():
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], fn.adamw)
    with pytest.raises(ValueError, match=r"every: .*got 0"):
        check_drift(opt, 0)
    handle = check_drift(opt, 1)
    handle.remove()
    assert not opt._optimizer_step_pre_hooks
