"""Exchanges of local steps that fail: the local step before them is kept, and the training goes on.

With a made-up failure before each exchange in turn, and with a rank that is killed.
"""

from __future__ import annotations

import copy
import os
import signal

import pytest
import ranks
import torch
import torch.distributed as dist
from test_contract_of_rounds import (
    APART,
    FIRST,
    METHODS,
    WITHOUT_ANCHOR,
    agree,
    build,
    params_of,
    set_gradients,
    take,
)
from test_transactions import Interrupt, bits, fail, same

import fn
from fn import Phase, Round

two = ranks.Cases(2)


AT_ONCE = [name for name in METHODS if name != "streaming"]
each_at_once = pytest.mark.parametrize("name", AT_ONCE)


def after_local_steps(opt: fn.Optimizer, *steps: int) -> list[torch.Tensor]:
    """Return params and state as steps without an exchange would leave them."""
    twin = copy.deepcopy(opt)
    twin.schedule = lambda step: Round()
    take(twin, *steps)
    return bits((params_of(twin), twin.states))


@two
def failing() -> dict[str, list[str]]:
    """Fail before each exchange of a step in turn; return what is wrong."""
    found = {}
    for name in AT_ONCE:
        opt, wrong, step, at = take(build(name), *range(FIRST + 1)), [], FIRST + 1, 0
        while True:
            if METHODS[name][1](step).phase is Phase.LOCAL:
                take(opt, step)
                step += 1
                continue
            wanted = after_local_steps(opt, step)
            set_gradients(opt, step)
            try:
                with Interrupt(at, fail):
                    opt.step()
                break
            except fn.PeerLost:
                wrong += [] if same(bits((params_of(opt), opt.states)), wanted) else [f"exchange {at} moved something"]
                wrong += [] if opt.steps == step + 1 else [f"{opt.steps} steps"]
            step, at = step + 1, at + 1
        found[name] = wrong if at and agree(name, opt) else [*wrong, f"ranks differ behind {at} failures"]
    return found


@each_at_once
def test_an_exchange_that_fails_leaves_the_local_step_and_the_next_one_succeeds(name):
    for found in two.answer("failing"):
        assert found[name] == []


def killed(name: str, delay: int) -> tuple[str, tuple[int, ...], bool, int]:
    """Kill rank 1 before its exchange begins. With a delay, others train on and hear of it at the take-over."""
    begins = 7 - delay
    opt = take(build(name, schedule=fn.every(4, delay=delay)), *range(begins))
    wanted = after_local_steps(opt, *range(begins, 8))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        take(opt, *range(begins, 8))
    except fn.PeerLost as error:
        ranks.stay()
        return "PeerLost", error.lost, same(bits((params_of(opt), opt.states)), wanted), opt.steps
    return "nothing", (), False, opt.steps


@pytest.mark.parametrize(
    ("name", "delay"),
    [
        pytest.param(name, delay, marks=[] if name == "diloco in signs" else [pytest.mark.reliability])
        for name in AT_ONCE
        for delay in (0, 2)
        if not (delay and name in (*WITHOUT_ANCHOR, *APART))  # whose averages have no delay, or go by their turn
    ],
)
def test_a_rank_that_is_killed_is_named_and_the_others_keep_their_local_steps(name, delay):
    found = ranks.outcomes(3, killed, name, delay)
    assert found[1] == ranks.Died(-signal.SIGKILL)
    assert found[0] == found[2] == ("PeerLost", (1,), True, 8)


def killed_first(delay: int) -> tuple[str, tuple[int, ...], str, int]:
    """Kill rank 1 before the first exchange of all."""
    begins = 3 - delay
    opt = take(build("diloco", schedule=fn.every(4, delay=delay)), *range(begins))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        take(opt, begins)
        opt.state_dict()  # waits for what is on its way
    except RuntimeError as error:
        ranks.stay()
        return type(error).__name__, getattr(error, "lost", ()), str(error).rpartition("; ")[2], opt.steps
    return "nothing", (), "", opt.steps


@pytest.mark.parametrize("delay", [0, 2])
def test_a_loss_before_the_first_exchange_is_named_and_the_message_says_that_the_local_step_counts(delay):
    left = "parameters and state are as after the local step, which counts"
    found = ranks.outcomes(3, killed_first, delay)
    assert found[0] == found[2] == ("PeerLost", (1,), left, 4 - delay)
