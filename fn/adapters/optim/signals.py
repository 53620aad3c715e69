"""Signals inside of a step: their handlers are called once it has ended, its exchange included.

Python calls handlers of signals between any two lines. One that raises between the params of one group and those of
the next would leave half a step. One that communicates, as a handler that saves a checkpoint does, would mix its
messages with those of the step. So handlers wait for the end of the step.

Some signals are there to break a wait: Ctrl-C as Python handles it, alarms, the end of a DataLoader's worker, and a
signal that comes for the second time. They break a step that waits for other ranks, which leaves everything as it was;
they are held back only while it is written.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

SIGNALS = tuple(signal.Signals)

BREAKING = frozenset(n for n in SIGNALS if n.name in ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGCHLD"))
"""Signals that a process has asked for itself: of its timers, and of its children."""


class _Step:
    """A step, with those inside of it. handlers: of signals that are held back. caught: what they are called with."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.caught: dict[int, Any] = {}
        self.is_written = False

    def hold_back(self) -> None:
        """Catch the signals that Python has a handler for: nothing else can raise or communicate."""
        self.handlers.update({n: h for n in SIGNALS if callable(h := signal.getsignal(n))})
        for number in self.handlers:
            signal.signal(number, self.catch)

    def catch(self, number: int, frame: Any) -> None:
        handler = self.handlers[number]
        breaks = number in BREAKING or number in self.caught or handler is signal.default_int_handler
        if self.is_written or not breaks:
            self.caught[number] = number, frame
        else:
            self.caught[number] = None  # called already
            handler(number, frame)

    def release(self) -> None:
        """Put the handlers back, and call those whose signals were caught: all of them, whatever they raise."""
        with ExitStack() as last:  # what comes last here is called first
            for number in reversed(self.handlers):
                last.callback(self._deliver, number)
            for number in self.handlers:
                last.callback(self._put_back, number)

    def _put_back(self, number: int) -> None:
        found = signal.signal(number, self.handlers[number])
        if found != self.catch:  # somebody has set another one inside of the step
            signal.signal(number, found)

    def _deliver(self, number: int) -> None:
        if args := self.caught.get(number):
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

    In the main thread, which is the one that Python calls them in. Inside of another such context, at the end of that.
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


def begin_writing() -> None:
    """Hold back every signal until the step, if this is inside of one, has ended: from here on it is written."""
    if _here.step is not None:
        _here.step.is_written = True
