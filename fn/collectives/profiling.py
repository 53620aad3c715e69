"""Named profiler ranges and observers inside a step.

While a profiler records, or an `Observer` is open, `step_range` marks the steps of the algorithm in
eager mode. Under `torch.compile`, other tracing and functorch's transforms it does nothing.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.fx.experimental.proxy_tensor import get_proxy_mode

RangeName = Literal["encode", "exchange", "serve", "gather", "decode", "average", "apply", "decode and apply"]
"""What the ranges of a step are called; a profiler shows them as "fn: encode" and so on."""


class Watchers(NamedTuple):
    """What is open: ledgers, and observers.

    They belong to the thread that opened them, and to the threads of ours that it gives jobs: `watched_by`. Those of
    the main thread see what autograd's own threads do, too, which run a backward pass on a device.
    """

    ledgers: tuple[Any, ...] = ()
    observers: tuple[Any, ...] = ()


_NOBODY = Watchers()

_watching: weakref.WeakKeyDictionary[threading.Thread, Watchers] = weakref.WeakKeyDictionary()
"""Who watches, by thread; threads that nobody watches are left out."""

writing = threading.RLock()  # a handler of signals may send, too
"""Held while one is written: several threads may work for whoever opened it."""


def watchers() -> Watchers:
    """Return who watches what is done here."""
    return _watching.get(_watched_thread(), _NOBODY) if _watching else _NOBODY


def watch(by: Watchers) -> None:
    """Set who watches this thread from now on."""
    if any(by):
        _watching[_watched_thread()] = by
    else:
        _watching.pop(_watched_thread(), None)


def _watched_thread() -> threading.Thread:
    """Return this thread, but the main one in place of a thread that Python did not start, such as autograd's."""
    thread = threading.current_thread()
    return threading.main_thread() if isinstance(thread, threading._DummyThread) else thread


@contextmanager
def watched_by(by: Watchers) -> Iterator[None]:
    """Set who watches this thread in this context, such as the watchers of the thread that a job is for."""
    before = watchers()
    watch(by)
    try:
        yield
    finally:
        watch(before)


class Observer:
    """Seconds by range, and sums of squares of what was encoded, lost and kept.

    seconds: {name: host time}. encoded, lost: of workers' compensated vectors c, and of c - D(Q(c)); codecs that send
    every bit are left out. kept: of the errors after the step. Those are None until something was measured.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.encoded: float | None = None
        self.lost: float | None = None
        self.kept: float | None = None

    def start(self) -> Observer:
        """Observe what this thread, and others for it, do from now on."""
        watching = watchers()
        watch(watching._replace(observers=(*watching.observers, self)))
        return self

    def stop(self) -> None:
        """Observe no longer."""
        watching = watchers()
        watch(watching._replace(observers=tuple(other for other in watching.observers if other is not self)))

    def time_in(self, *names: RangeName) -> float | None:
        """Return the seconds in these ranges together; None if none was entered."""
        entered = [self.seconds[name] for name in names if name in self.seconds]
        return sum(entered) if entered else None

    def compression_error(self) -> float | None:
        """Return the norm of what was lost relative to that of what was encoded; 0 where both are 0."""
        if self.lost is None or self.encoded is None:
            return None
        return math.sqrt(self.lost / self.encoded) if self.encoded else math.sqrt(self.lost)

    def error_norm(self) -> float | None:
        """Return the norm of all errors that were kept."""
        return None if self.kept is None else math.sqrt(self.kept)


_NOTHING: AbstractContextManager[None] = nullcontext()


def observed() -> bool:
    """Tell whether an observer is open and the code runs eagerly."""
    return not torch.compiler.is_compiling() and bool(watchers().observers) and not _transformed()


def observe_loss(compensated: Tensor, lost: Tensor) -> None:
    """Enter into the observers what a worker encoded, and what of it the codes do not say."""
    encoded, missed = _squares(compensated), _squares(lost)
    with writing:
        for observer in watchers().observers:
            observer.encoded = (observer.encoded or 0.0) + encoded
            observer.lost = (observer.lost or 0.0) + missed


def observe_kept(error: Tensor) -> None:
    """Enter into the observers a plain error that was kept."""
    kept = _squares(error)
    with writing:
        for observer in watchers().observers:
            observer.kept = (observer.kept or 0.0) + kept


def step_range(name: RangeName) -> AbstractContextManager[None]:
    """Return a context whose time the profiler and the observers note under a name."""
    if torch.compiler.is_compiling():  # which does not know a context that was made outside
        return nullcontext()
    if not (profiler._is_profiler_enabled or watchers().observers) or _transformed():
        return _NOTHING
    return _range(name)


@contextmanager
def _range(name: RangeName) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        with profiler.record_function(f"fn: {name}"):
            yield
    finally:
        spent = time.perf_counter() - begin
        with writing:
            for observer in watchers().observers:
                observer.seconds[name] = observer.seconds.get(name, 0.0) + spent


def _transformed() -> bool:
    """Tell whether functorch or a tracer would see what is done."""
    return torch._C._functorch.peek_interpreter_stack() is not None or get_proxy_mode() is not None


def _squares(x: Tensor) -> float:
    """Return the sum of squares: in the precision of x where that does not overflow, several times as fast."""
    flat = x.detach().reshape(-1)
    # Squares of float16 numbers overflow from 256 on, and sums of bfloat16 keep two or three digits.
    flat = flat.float() if flat.element_size() < 4 else flat
    total = float(torch.dot(flat, flat))
    return total if math.isfinite(total) else float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
