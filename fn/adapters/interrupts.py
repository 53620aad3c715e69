"""Ctrl-C or SIGTERM while a step is written: the step is written to its end, and then their handlers are called.

Python calls handlers of signals between any two lines, and they may raise: KeyboardInterrupt, the SystemExit of a job
that is to end, the RuntimeError of a DataLoader whose worker died. While a step waits for other ranks that is welcome,
and leaves everything as it was; between the params of one group and those of the next it would leave half a step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

SIGNALS = tuple(signal.Signals)


class _Step(NamedTuple):
    """A step of the main thread. handlers: of signals that are held back. caught: what they were to be called with."""

    handlers: dict[int, Any]
    caught: dict[int, tuple[Any, ...]]

    def catch(self, *args: Any) -> None:
        self.caught[args[0]] = args

    def deliver(self, number: int) -> None:
        if args := self.caught.get(number):
            self.handlers[number](*args)


_steps: list[_Step] = []  # those that the main thread is in, one inside of the other


@contextmanager
def whole_step() -> Iterator[None]:
    """Call at the end of this context the handlers of signals that came after `begin_writing`; a decorator, too."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    step = _Step({}, {})
    _steps.append(step)
    try:
        yield
    finally:
        _steps.remove(step)
        with ExitStack() as last:  # all of it, whatever a handler raises; what comes last here is called first
            for number in reversed(step.handlers):
                last.callback(step.deliver, number)
            for number, handler in step.handlers.items():
                last.callback(signal.signal, number, handler)


def begin_writing() -> None:
    """Hold signals back until the step, if this is inside of one, has ended: from here on it is written.

    Those that Python has a handler for: nothing else can raise.
    """
    if threading.current_thread() is not threading.main_thread() or not _steps or _steps[-1].handlers:
        return
    step = _steps[-1]
    step.handlers.update({n: h for n in SIGNALS if callable(h := signal.getsignal(n))})
    for number in step.handlers:
        signal.signal(number, step.catch)
