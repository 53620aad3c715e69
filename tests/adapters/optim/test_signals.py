"""Ctrl-C or SIGTERM inside of a step: half a step is never left behind."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import in_place_steps
import pytest
import torch
import torch.distributed as dist
from ranks import run

import fn
from fn.adapters import checkpoint
from fn.adapters.optim import signals as interrupts
from fn.adapters.optim import step as step_order
from fn.collectives.transports.tcp import Connections
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
    own = fn.stateless(lambda updates, params: updates)  # a link of one's own, so no kernel takes the whole step
    return fn.chain(fn.scale_by_adam(), own, fn.scale_by_learning_rate(lr))


PLACES = {
    "between two groups of a kernel's step": (fn.adamw, ops, "direct", 1),
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
            with interrupts.defer_signals():
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

    @interrupts.defer_signals()
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

    def watched(update: Any) -> Any:
        return lambda *args: (update(*args), seen.append(signal.getsignal(signal.SIGINT)))[0]

    in_place_steps.stage_purely(opt, watched)
    thread = threading.Thread(target=opt.step)
    thread.start()
    thread.join()
    assert seen == [before] * len(opt.param_groups)
    assert opt.steps == 1


def test_nothing_is_held_back_outside_of_a_step():
    before = signal.getsignal(signal.SIGINT)
    interrupts.begin_writing()
    assert signal.getsignal(signal.SIGINT) is before
    update = partial(fn.donate(fn.scale_by_adam().warmup_update), [torch.ones(3)])
    update(fn.scale_by_adam().init([torch.ones(3)]), [torch.ones(3)])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_knows_whether_it_is_inside_of_a_step():
    seen: list[bool] = []

    def look() -> None:
        seen.append(interrupts.inside_step())

    with interrupts.defer_signals(), interrupts.defer_signals():
        look()
        elsewhere = threading.Thread(target=look)
        elsewhere.start()
        elsewhere.join()
    look()

    @interrupts.defer_signals()
    def failing() -> None:
        look()
        raise ValueError

    def stepping() -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            failing()
        look()

    thread = threading.Thread(target=stepping)
    thread.start()
    thread.join()
    assert seen == [True, False, False, True, False]


# Handlers of one's own, which may communicate: they wait for the end of the step, also while it waits for others.


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def saved_in_a_step(folder: str) -> list[tuple[str, int, bool]]:
    """Save from a handler of SIGUSR1, which rank 0 gets while it waits in an exchange, and rank 1 behind it."""
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    params, found = [torch.nn.Parameter(torch.ones(5))], []

    def before(g: Any, s: Any, p: Any) -> Any:
        dist.barrier()  # both are inside of the step
        if dist.get_rank() == 1:
            os.kill(processes[0], signal.SIGUSR1)
        return g, s

    def behind(g: Any, s: Any, p: Any) -> Any:
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGUSR1)
        return g, s

    def make(lr: torch.Tensor) -> fn.Transform:
        mean = fn.compressed_average("data", fn.sign())
        exchange = fn.chain(fn.lift(lambda p: (), before), mean, fn.lift(lambda p: (), behind))
        return fn.chain(exchange, fn.scale_by_learning_rate(lr))

    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, make, schedule=fn.freeze_after(0), lr=0.1)

    def save(*_: Any) -> None:
        found.append((checkpoint.save(folder, opt).name, opt.steps, interrupts.inside_step()))

    with handled(signal.SIGUSR1, save):
        for _ in range(3):
            params[0].grad = torch.full((5,), 1.0 + dist.get_rank())
            opt.step()
    return found


def test_a_handler_that_saves_a_checkpoint_is_called_when_the_step_of_all_ranks_has_ended(tmp_path):
    first, second = run(2, saved_in_a_step, str(tmp_path))
    assert first == second
    assert [steps for _, steps, _ in first] == [1, 2, 3]
    assert not any(inside for *_, inside in first)
    assert {name for name, *_ in first[-2:]} <= {path.name for path in Path(tmp_path).iterdir()}


def recorder(heard: list[int]) -> Callable[..., None]:
    return lambda number, frame: heard.append(number)


def test_a_handler_waits_for_the_end_of_the_outermost_step_and_a_second_signal_does_not():
    heard: list[int] = []
    with handled(signal.SIGUSR1, recorder(heard)):
        with interrupts.defer_signals():
            with interrupts.defer_signals():
                signal.raise_signal(signal.SIGUSR1)
            assert heard == []
        assert heard == [signal.SIGUSR1]
        with interrupts.defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1] * 2
        assert heard == [signal.SIGUSR1] * 2  # once for both
        with interrupts.defer_signals():
            interrupts.begin_writing()
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1] * 2
        assert heard == [signal.SIGUSR1] * 3


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGCHLD])
def test_an_alarm_and_the_end_of_a_child_break_a_wait_but_not_the_writing(number):
    heard: list[int] = []
    with handled(number, recorder(heard)):
        with interrupts.defer_signals():
            signal.raise_signal(number)
            assert heard == [number]
            interrupts.begin_writing()
            signal.raise_signal(number)
            assert heard == [number]
        assert heard == [number] * 2


def test_ctrl_c_breaks_a_step_again_after_one_inside_of_it_has_been_written():
    @interrupts.defer_signals()
    def outer() -> None:
        with interrupts.defer_signals():
            interrupts.begin_writing()
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was held back")

    with pytest.raises(KeyboardInterrupt):
        outer()


def test_a_handler_that_is_set_inside_of_a_step_stays():
    heard: list[int] = []
    theirs = recorder(heard)
    with handled(signal.SIGUSR1, recorder([])):
        with interrupts.defer_signals():
            signal.signal(signal.SIGUSR1, theirs)
        assert signal.getsignal(signal.SIGUSR1) is theirs


def test_a_second_sigterm_ends_the_wait_for_a_peer_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    connections, is_over = Connections({1: here}, timeout=300.0), threading.Event()

    def insist() -> None:
        while not is_over.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    sender = threading.Thread(target=insist, daemon=True)

    @interrupts.defer_signals()
    def step() -> None:
        sender.start()
        connections.pass_rows(torch.ones(2, 5), torch.empty(2, 5))

    with handled(signal.SIGTERM, lambda *_: (is_over.set(), sys.exit(143))):
        with pytest.raises(SystemExit):
            step()
        sender.join()
    there.close()


# Rounds: their local step is written before the exchange, which waits for the others.


def broken_off(number: int, delay: int, make_codec: Any) -> tuple[str, int, bool]:
    """Signal rank 0 once, in an exchange in which rank 1 does not answer before rank 0 has left it.

    Returns: what was raised, the steps that count, and whether params are those after the local steps.
    """
    store, me = dist.group.WORLD.get_group_store(), dist.get_rank()
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())

    def before_mean(g: Any, s: Any, p: Any) -> Any:
        if me == 0 and not delay:
            store.set("waits", "")  # in the next line
        if me == 1:
            store.wait(["waits"])
            os.kill(processes[0], number)
            store.wait(["has left"])
            raise ValueError("rank 0 is not in the exchange any more")
        return g, s

    def in_local_step(g: Any, s: Any, p: Any) -> Any:
        if me == 0 and delay and opt and opt[0].steps == 3:
            store.set("waits", "")  # soon; a signal that comes before the local step is written waits for that
        return g, s

    def make(lr: torch.Tensor) -> fn.Transform:
        mean = fn.compressed_average("data", make_codec(), fn.off())
        sync = fn.chain(fn.lift(lambda p: (), before_mean), mean)
        inner = fn.chain(fn.lift(lambda p: (), in_local_step), fn.scale_by_learning_rate(lr))
        return fn.outer(inner, fn.scale_by_learning_rate(0.7), sync)

    opt: list[fn.Optimizer] = []
    param = torch.nn.Parameter(torch.ones(40))
    with fn.bind({"data": dist.group.WORLD}):
        opt.append(fn.Optimizer([param], make, schedule=fn.every(4, delay=delay), lr=0.5, refuse_averaged=False))
    raised = ""
    with handled(number, RAISING[number]):
        try:
            for _ in range(4):
                param.grad = torch.ones(40)
                opt[0].step()
        except BaseException as error:
            raised = type(error).__name__
    if me == 0:
        store.set("has left", "")
    return raised, opt[0].steps, torch.equal(param, torch.full((40,), -1.0))


RAISING = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: sys.exit(143)}


@pytest.mark.parametrize(
    ("number", "delay", "codec"),
    [
        (signal.SIGINT, 0, fn.identity),  # an all-reduce of gloo
        (signal.SIGINT, 0, fn.sign),  # connections of our own
        (signal.SIGTERM, 0, fn.identity),
        (signal.SIGTERM, 2, fn.sign),  # a mean that is on its way
    ],
)
def test_a_signal_breaks_the_exchange_of_a_round_at_once_and_its_local_step_counts(number, delay, codec):
    first, second = run(2, broken_off, number, delay, codec)
    assert first == (RAISED[number].__name__, 4, True)
    assert second == ("ValueError", 4, True)


def broken_off_before_its_mean(make_codec: Any) -> tuple[str, int]:
    """Interrupt rank 0 between the announcement of an exchange and its mean, and let it live until rank 1 has heard."""
    store, me = dist.group.WORLD.get_group_store(), dist.get_rank()

    def interrupt(g: Any, s: Any, p: Any) -> Any:
        if me == 0:
            signal.raise_signal(signal.SIGINT)
        return g, s

    def make(lr: torch.Tensor) -> fn.Transform:
        mean = fn.compressed_average("data", make_codec(), fn.off())
        sync = fn.chain(fn.lift(lambda p: (), interrupt), mean)
        return fn.outer(fn.scale_by_learning_rate(lr), fn.scale_by_learning_rate(0.7), sync)

    param = torch.nn.Parameter(torch.ones(40))
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([param], make, schedule=fn.every(2), lr=0.5, refuse_averaged=False)
    raised = ""
    with handled(signal.SIGINT, signal.default_int_handler):
        try:
            for _ in range(2):
                param.grad = torch.ones(40)
                opt.step()
        except BaseException as error:
            raised = type(error).__name__
    if me == 0:
        store.wait(["heard"], datetime.timedelta(seconds=20))
    else:
        store.set("heard", "")
    return raised, opt.steps


@pytest.mark.parametrize("codec", [fn.identity, fn.sign])  # an all-reduce of gloo; connections of our own
def test_the_others_hear_at_once_of_a_rank_that_is_interrupted_between_an_announcement_and_its_mean(codec):
    assert run(2, broken_off_before_its_mean, codec) == [("KeyboardInterrupt", 2), ("PeerLost", 2)]


def test_connections_are_closed_where_a_handler_raises_and_not_for_another_error():
    heard: list[str] = []

    @interrupts.defer_signals()
    def step(fails: Callable[[], Any], name: str) -> None:
        with interrupts.if_broken(lambda: heard.append(name)):
            fails()

    with pytest.raises(KeyboardInterrupt):
        step(lambda: signal.raise_signal(signal.SIGINT), "a signal")
    with pytest.raises(ZeroDivisionError):
        step(lambda: 1 / 0, "an error")
    step(lambda: None, "nothing")
    assert heard == ["a signal"]


def broken_off_before_the_first() -> tuple[str, int]:
    """Signal rank 0 until it raises, as it does inside of the first delayed exchange, to which rank 1 does not come."""
    store, me = dist.group.WORLD.get_group_store(), dist.get_rank()
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())

    def handler(number: int, frame: Any) -> None:
        while frame is not None:
            if frame.f_code.co_name == "psum":  # in which the ranks meet
                sys.exit(143)
            frame = frame.f_back

    param = torch.nn.Parameter(torch.ones(40))
    with fn.bind({"data": dist.group.WORLD}):
        make, schedule = partial(fn.diloco, axis="data"), fn.every(4, delay=2)
        opt = fn.Optimizer([param], make, schedule=schedule, lr=0.5, refuse_averaged=False)
    param.grad, raised = torch.ones(40), ""
    opt.step()
    with handled(signal.SIGTERM, handler):
        dist.barrier()
        try:
            if me == 0:
                opt.step()
        except SystemExit as error:
            raised = type(error).__name__
        if me == 0:
            store.set("has left", "")
        while me == 1 and not store.check(["has left"]):
            os.kill(processes[0], signal.SIGTERM)
            time.sleep(0.05)
        return raised, opt.steps


def test_sigterm_breaks_the_wait_for_the_others_before_the_first_delayed_exchange():
    first, second = run(2, broken_off_before_the_first)
    assert first == ("SystemExit", 2)
    assert second == ("", 1)


def test_ctrl_c_while_a_local_step_is_written_breaks_off_what_follows_in_its_round():
    @interrupts.defer_signals()
    def step() -> None:
        with interrupts.defer_signals():
            interrupts.begin_writing()
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was held back")

    with pytest.raises(KeyboardInterrupt):
        step()


def test_sigterm_while_a_local_step_is_taken_is_handled_before_its_exchange_and_another_signal_behind_it():
    heard: list[int] = []
    with handled(signal.SIGUSR1, recorder(heard)), handled(signal.SIGTERM, recorder(heard)):
        with interrupts.defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert heard == []
            with interrupts.stoppable():
                assert heard == [signal.SIGTERM]
                interrupts.begin_writing()
                signal.raise_signal(signal.SIGTERM)
                assert heard == [signal.SIGTERM]
        assert heard == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]
