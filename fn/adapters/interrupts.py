"""Ctrl-C while a step is written: the step is written to its end, and then it is raised.

Python raises KeyboardInterrupt between any two lines. While a step waits for other ranks that is welcome, and leaves
everything as it was; between the params of one group and those of the next it would leave half a step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Step:
    """A step of the main thread. handler: of SIGINT, once that is held back. caught: what it was to be called with."""

    handler: Any = None
    caught: tuple[Any, ...] | None = None


_steps: list[_Step] = []  # those that the main thread is in, one inside of the other


@contextmanager
def whole_step() -> Iterator[None]:
    """Raise at the end of this context what SIGINT would have raised after `hold`; a decorator, too."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    step = _Step()
    _steps.append(step)
    try:
        yield
    finally:
        _steps.remove(step)
        if step.handler is not None:
            signal.signal(signal.SIGINT, step.handler)
            if step.caught is not None:
                step.handler(*step.caught)


def hold() -> None:
    """Hold SIGINT back until the step, if this is inside of one, has ended: from here on it is written."""
    if threading.current_thread() is not threading.main_thread() or not _steps or _steps[-1].handler is not None:
        return
    handler, step = signal.getsignal(signal.SIGINT), _steps[-1]
    if callable(handler):  # else nothing is raised

        def catch(*args: Any) -> None:
            step.caught = args

        step.handler = handler
        signal.signal(signal.SIGINT, catch)
