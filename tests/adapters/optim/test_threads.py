"""Threads that share a process group: their steps are taken one after the other, or refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import fn
from fn import tree
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding

NUMBERS = itertools.count()


class Wire:
    """Two ranks, of which the other one says whatever this one says; its messages may have to wait."""

    def __init__(self, size: int = 2):
        self.busy, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        psum = lambda x: self.carry(x).mul_(size)  # noqa: E731
        way = transports.Transport(all_to_all=self.carry, all_gather=self.gather, psum=psum)
        self.name = transports.register(f"wire {next(NUMBERS)}", way)
        self.binding = Binding({"data": Axis(size, torch.tensor(0), self.name)})

    def carry(self, x: torch.Tensor) -> torch.Tensor:
        self.busy.set()
        assert self.go_on.wait(60)
        return x.clone()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.carry(x)] * 2)


def build(binding: Any) -> tuple[torch.nn.Parameter, fn.Optimizer]:
    p = torch.nn.Parameter(torch.ones(40))
    make = partial(fn.onebit_adam, axis="data")
    with binding:
        return p, fn.Optimizer([p], make, schedule=fn.freeze_after(2), lr=0.01, refuse_averaged=False)


def step(p: torch.nn.Parameter, opt: fn.Optimizer) -> None:
    p.grad = torch.randn(40)
    opt.step()


def while_another_steps(wire: Wire, f: Callable[[], Any]) -> fn.Optimizer:
    """Call f while a thread called "other" is inside of the step of an optimizer over a wire; return that one."""
    p, opt = build(wire.binding)
    wire.busy.clear()
    wire.go_on.clear()
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        job = pool.submit(step, p, opt)
        try:
            assert wire.busy.wait(60)
            f()
        finally:
            wire.go_on.set()
        job.result()
    return opt


def test_a_step_over_a_group_on_which_another_thread_steps_is_refused_and_changes_nothing():
    wire = Wire()
    p, opt = build(wire.binding)
    step(p, opt)
    before = [x.detach().clone() for x in tree.leaves((p, opt.states))]

    def meanwhile() -> None:
        found = r"^step: .*axis 'data'.* but got .*'MainThread'.*'other_0'.*; .*take turns.*fn\.bind\({'data': torch"
        with pytest.raises(RuntimeError, match=found):
            step(p, opt)

    other = while_another_steps(wire, meanwhile)
    assert (other.steps, opt.steps) == (1, 1)
    assert all(map(torch.equal, before, tree.leaves((p, opt.states))))
    step(p, opt)  # now it is its turn
    assert opt.steps == 2


def test_a_step_that_fails_gives_its_turn_back():
    wire = Wire()
    p, opt = build(wire.binding)
    p.grad = torch.randn(40).to_sparse()
    with pytest.raises((TypeError, fn.RanksDisagree)):
        opt.step()
    while_another_steps(wire, lambda: None)
    step(p, opt)


def test_threads_with_groups_of_their_own_do_not_wait_for_each_other():
    p, opt = build(Wire().binding)
    while_another_steps(Wire(), lambda: step(p, opt))
    assert opt.steps == 1


def test_optimizers_of_one_rank_have_no_group_to_share():
    wire, inside, go_on = Wire(1), threading.Event(), threading.Event()
    p, opt = build(wire.binding)
    q, other = build(wire.binding)

    def wait_inside(phase: fn.Phase) -> tuple[None, None]:
        inside.set()
        assert go_on.wait(60)
        return None, None

    other.ahead = wait_inside
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(step, q, other)
        try:
            assert inside.wait(60)
            step(p, opt)
        finally:
            go_on.set()
        job.result()
    assert (opt.steps, other.steps) == (1, 1)
