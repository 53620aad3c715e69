"""Ctrl-C or SIGTERM inside of a step: half a step is never left behind."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import fn
from fn.adapters import donate, interrupts, step_order
from fn.adapters.step_order import update_of
from fn.kernels import ops


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt, which a shell has its background jobs ignore, and SIGTERM, as schedulers' wrappers do."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: sys.exit(143)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def build(make: Any = fn.adamw) -> tuple[fn.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(4)]
    opt = fn.Optimizer([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], make, lr=1e-2)
    for p in params:
        p.grad = torch.randn_like(p)
    return opt, params


def numbers(opt: fn.Optimizer, params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(p.detach().clone() for p in params), *(x.clone() for x in fn.tree.leaves(opt.states)),
            torch.tensor(opt.steps)]  # fmt: skip


def chained(lr: torch.Tensor) -> fn.Transform:
    return fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))  # no kernel takes its whole step


PLACES = {
    "between two groups of a kernel's step": (fn.adamw, ops, "direct", 1),
    "between a new state and the params": (chained, donate, "write_back", 1),
    "between the params of two groups": (chained, step_order, "move", 1),
}


RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


@pytest.mark.parametrize("number", RAISED)
@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_while_a_step_is_written_comes_after_it(monkeypatch, where, number):
    make, module, name, count = PLACES[where]
    expected, (opt, params) = build(make), build(make)
    expected[0].step()
    inner, calls = getattr(module, name), []

    def interrupted(*args: Any) -> Any:
        found = inner(*args)
        if args[0] != "largest_magnitude":  # which looks at gradients, and writes nothing
            calls.append(name)
            if len(calls) == count:
                signal.raise_signal(number)
        return found

    monkeypatch.setattr(module, name, interrupted)
    before = signal.getsignal(number)
    with pytest.raises(RAISED[number]):
        opt.step()
    assert len(calls) >= count
    assert signal.getsignal(number) is before
    assert all(map(torch.equal, numbers(opt, params), numbers(*expected)))
    monkeypatch.undo()
    opt.step()
    expected[0].step()
    assert all(map(torch.equal, numbers(opt, params), numbers(*expected)))


def test_an_interrupt_before_a_step_is_written_comes_at_once_and_changes_nothing():
    def rude(lr: torch.Tensor) -> fn.Transform:
        def update(updates: Any, state: Any, params: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it was held back")

        return fn.lift(lambda params: torch.zeros(1), update)

    opt, params = build(rude)
    before = numbers(opt, params)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert all(map(torch.equal, numbers(opt, params), before))


def test_handlers_of_ones_own_are_called_once_and_signals_that_are_ignored_stay_so():
    heard: list[int] = []
    for handler in (lambda *args: heard.append(args[0]), signal.SIG_IGN):
        old = signal.signal(signal.SIGINT, handler)
        try:
            with interrupts.whole_step():
                interrupts.begin_writing()
                interrupts.begin_writing()
                signal.raise_signal(signal.SIGINT)
                assert heard == ([] if callable(handler) and not heard else [signal.SIGINT])
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, old)
    assert heard == [signal.SIGINT]


def test_of_two_signals_in_a_step_both_handlers_are_called_although_they_raise():
    heard = []

    def rude(number: int, frame: Any) -> None:
        heard.append(number)
        raise RAISED[number]

    @interrupts.whole_step()
    def step() -> None:
        interrupts.begin_writing()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert heard == []

    for number in RAISED:
        signal.signal(number, rude)
    with pytest.raises(SystemExit):
        step()
    assert heard == [signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(number) for number in RAISED] == [rude, rude]


def test_a_step_of_another_thread_leaves_signals_alone():
    opt, _ = build()
    before, seen = signal.getsignal(signal.SIGINT), []
    made = update_of(opt, opt.phase)
    watched = lambda *args: (made.donated(*args), seen.append(signal.getsignal(signal.SIGINT)))[0]  # noqa: E731
    opt._updates[opt.phase] = made._replace(donated=watched, in_place=None)
    thread = threading.Thread(target=opt.step)
    thread.start()
    thread.join()
    assert seen == [before]
    assert opt.steps == 1


def test_nothing_is_held_back_outside_of_a_step():
    before = signal.getsignal(signal.SIGINT)
    interrupts.begin_writing()
    assert signal.getsignal(signal.SIGINT) is before
    update = partial(fn.donate(fn.scale_by_adam().warmup_update), [torch.ones(3)])
    update(fn.scale_by_adam().init([torch.ones(3)]), [torch.ones(3)])
    assert signal.getsignal(signal.SIGINT) is before
