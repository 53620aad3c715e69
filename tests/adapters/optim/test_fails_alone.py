"""A rank fails alone in a step, by an error or Ctrl-C: no other one waits, and nobody goes on from half of a step."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run

import fn
from fn.kernels.reference import REFERENCES

METHODS = {
    "a step": (fn.adamw, None),
    "the exchange of a round": (fn.diloco, fn.every(1)),
}


def optimizer(name: str) -> tuple[torch.nn.Parameter, fn.Optimizer]:
    make, schedule = METHODS[name]
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.full((5,), 0.5)
    return p, fn.Optimizer([p], partial(make, axis="data"), schedule=schedule, lr=0.1, refuse_averaged=False)


def interrupted(name: str) -> tuple[Any, ...]:
    """Interrupt rank 0 while it waits for rank 1, which comes later; return what each was told, and what is left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with fn.bind({"data": dist.group.WORLD}):
        p, opt = optimizer(name)
    opt.step()
    before, told = p.detach().clone(), []
    if dist.get_rank() == 0:
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    else:
        time.sleep(1.5)
    for _ in range(2):
        try:
            opt.step()
        except (KeyboardInterrupt, fn.PeerLost) as error:
            told.append(type(error).__name__)
    return told, torch.equal(p, before), opt.steps


@pytest.mark.parametrize("name", METHODS)
def test_ctrl_c_while_a_rank_waits_raises_at_once_and_the_others_hear_of_it(name):
    first, other = run(2, interrupted, name)
    assert first[0] == ["KeyboardInterrupt", "PeerLost"]
    assert other[0][0] == "PeerLost"
    moved_by_local_step = name != "a step"
    for _, unmoved, steps in (first, other):
        assert unmoved != moved_by_local_step
        assert (steps > 1) == moved_by_local_step


def unable(what: str) -> tuple[Any, ...]:
    """Give rank 0 what it cannot step; return what each was told, and what is left."""
    with fn.bind({"data": dist.group.WORLD}):
        p, opt = optimizer("a step")
    opt.step()
    before = p.detach().clone()
    if dist.get_rank() == 0 and what == "a sparse gradient":
        p.grad = torch.ones(5).to_sparse()
    elif dist.get_rank() == 0 and what == "a group of its own":
        opt.param_groups.append({"params": [torch.nn.Parameter(torch.ones(2))]})
    elif dist.get_rank() == 0:
        opt.param_groups[0]["lr"] = -0.5
    try:
        opt.step()
    except (TypeError, ValueError, fn.PeerLost) as error:
        return type(error).__name__, str(error), torch.equal(p, before), opt.steps
    return ()


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("a sparse gradient", "TypeError", "sparse"),
        ("a bad hyper-parameter", "ValueError", "but got -0.5"),
        ("a group of its own", "ValueError", "add_param_group"),
    ],
)
def test_what_one_rank_cannot_step_it_says_and_the_others_hear_that_it_is_lost(what, kind, text):
    first, other = run(2, unable, what)
    assert first[0] == kind
    assert text in first[1]
    assert other[0] == "PeerLost"
    for found in (first, other):
        assert found[2:] == (True, 1)


def test_ctrl_c_while_a_step_is_written_makes_the_next_call_raise_with_the_cure():
    armed = False

    def adamw_(*args: Any) -> None:
        if armed:
            signal.raise_signal(signal.SIGINT)
        REFERENCES["adamw_"](*args)

    _, opt = optimizer("a step")
    row = fn.kernels.Accelerator("cpu", {"adamw_": adamw_}, provider="interrupted")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    fn.kernels.register(row)
    try:
        opt.step()  # the first one also proves the kernel
        saved = {path: x.clone() for path, x in opt.state_dict().items()}
        armed = True
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    finally:
        fn.kernels.unregister(row)
        signal.signal(signal.SIGINT, before)
    for call in (opt.step, opt.state_dict):
        with pytest.raises(RuntimeError, match="load both from a checkpoint"):
            call()
    opt.load_state_dict(saved)
    opt.step()
    assert opt.steps == 2
