"""Signals inside of a step: their handlers are called once it has ended, its exchange included.

Python calls handlers of signals between any two lines. One that raises between the params of one group and those of
the next would leave half a step. One that communicates, as a handler that saves a checkpoint does, would mix its
messages with those of the step. So handlers wait for the end of the step.

Some signals are there to break a wait: Ctrl-C as Python handles it, alarms, the end of a DataLoader's worker, and a
signal that comes for the second time. They break a step that waits for other ranks, which leaves everything as it was;
they are held back only while it is written. A round is written twice: its local step, and behind that its exchange,
which waits for the others in between and may then be broken off. There SIGTERM does so, too: see `stoppable`.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

SIGNALS = tuple(signal.Signals)

# What `signal.getsignal` wraps. The wrapper makes an enum of every answer: over all signals 60 us in each step, not 1.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal

BREAKING = frozenset(n for n in SIGNALS if n.name in ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGCHLD"))
"""Signals that a process has asked for itself: of its timers, and of its children."""


class _Step:
    """A step, with those inside of it.

    handlers: of signals that are held back. caught: what they are called with; None where they have been called.
    breaking: the signals that break a wait when they come for the first time, beside Ctrl-C. is_broken: whether a
        handler has raised inside of the step.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.caught: dict[int, Any] = {}
        self.breaking = BREAKING
        self.is_written = False
        self.is_broken = False

    def hold_back(self) -> None:
        """Catch the signals that Python has a handler for: nothing else can raise or communicate."""
        self.handlers.update({n: h for n in SIGNALS if callable(h := _handler_of(n))})
        for number in self.handlers:
            signal.signal(number, self.catch)

    def catch(self, number: int, frame: Any) -> None:
        if self.is_written or not (number in self.caught or self._breaks(number)):
            self.caught[number] = number, frame
        else:
            self.caught[number] = None
            try:
                self.handlers[number](number, frame)
            except BaseException:
                self.is_broken = True
                raise

    def _breaks(self, number: int) -> bool:
        return number in self.breaking or self.handlers[number] is signal.default_int_handler

    def break_off(self) -> None:
        """Call the handlers of signals that break a wait and came while something was written."""
        with ExitStack() as last:  # all of them, whatever they raise
            for number in self.handlers:
                if self.caught.get(number) and self._breaks(number):
                    last.callback(self._deliver, number)

    def release(self) -> None:
        """Put the handlers back, and call those whose signals were caught: all of them, whatever they raise."""
        with ExitStack() as last:  # what comes last here is called first
            for number in reversed(self.handlers):
                last.callback(self._deliver, number)
            for number in self.handlers:
                last.callback(self._put_back, number)

    def _put_back(self, number: int) -> None:
        set_inside = signal.signal(number, self.handlers[number])
        if set_inside != self.catch:  # somebody has set another one inside of the step
            signal.signal(number, set_inside)

    def _deliver(self, number: int) -> None:
        if args := self.caught.get(number):
            self.caught[number] = None
            self.handlers[number](*args)


class _Here(threading.local):
    """The outermost step that this thread is inside of."""

    step: _Step | None = None


_here = _Here()


def inside_step() -> bool:
    """Return whether this thread is inside of an optimizer's step, whose messages other collectives would meet."""
    return _here.step is not None


@contextmanager
def defer_signals() -> Iterator[None]:
    """Call the handlers of signals that come inside of this context at its end; a decorator, too.

    In the main thread, which is the one that Python calls them in. Inside of another such context, at the end of that;
    but what breaks a wait, and came while the inner one was written, breaks the outer one, if nothing is written in it.
    """
    outer = _here.step
    step = outer or _Step()
    was_written = step.is_written
    try:
        _here.step = step
        if outer is None and threading.current_thread() is threading.main_thread():
            step.hold_back()
        yield
    finally:
        step.is_written = was_written or outer is None  # the end of a step, too, is not to be broken
        _here.step = outer
        if outer is None:
            step.release()
        elif not step.is_written:
            step.break_off()


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM break a wait inside of this context: that of a round's exchange, whose local step is whole.

    Ranks come to an exchange as far apart as their local steps took them. A process that is to end does not wait for
    that, whatever its handler does; one that communicates is to be called after the step, so use another signal for it.
    """
    step = _here.step
    if step is None:
        yield
        return
    before, step.breaking = step.breaking, step.breaking | {signal.SIGTERM}
    try:
        if not step.is_written:
            step.break_off()
        yield
    finally:
        step.breaking = before


@contextmanager
def if_broken(hang_up: Callable[[], None]) -> Iterator[None]:
    """Call a function where the handler of a signal raises inside of this context, as Ctrl-C does."""
    try:
        yield
    except BaseException:
        if _here.step is not None and _here.step.is_broken:
            hang_up()
        raise


def begin_writing() -> None:
    """Hold back every signal until the step, if this is inside of one, has ended: from here on it is written."""
    if _here.step is not None:
        _here.step.is_written = True


TORN = (
    "while parameters and state were written, so that they may be half of one step and half of the next; load both "
    "from a checkpoint, with fn.adapters.checkpoint.load or load_state_dict of the model and of the optimizer"
)
"""What is said behind an exception that nobody can undo."""


@contextmanager
def writing(training: Any) -> Iterator[None]:
    """Hold signals back while parameters and state are written; if that raises, they are refused from then on.

    What can be refused is to be refused before.

    Args: training: becomes `torn` then. Raises: RuntimeError for any exception inside, which it has as its cause.
    """
    if _here.step is not None:
        _here.step.is_written = True
    try:
        yield
    except BaseException as error:
        training.torn = True
        raise RuntimeError(f"fn.Optimizer: {type(error).__name__} {TORN}") from error
