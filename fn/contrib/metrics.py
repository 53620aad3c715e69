"""Tell a callback the bytes, the losses and the times of a step: for TensorBoard, a log or an alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fn import Ledger, Optimizer, Phase
from fn.arguments import check_whole, checked
from fn.collectives.profiling import Observer
from fn.errors import expected


class StepMetrics(NamedTuple):
    """A step of this rank; None where the step has no such thing, or it cannot be seen from this thread.

    step: from 0. phase: of the step. skipped: steps and exchanges of rounds that all ranks left out since the
        beginning, this one included. dropped: local steps that this rank left out.
    bytes: that the rank had to send in `step`, as `fn.ledger` counts them. None for a step that
        `fn.adapters.ddp.overlap` took behind the backward pass, on another thread; errors and times are None then too.
    compression_error: norm(c - D(Q(c))) / norm(c) over all that this rank encoded as a worker, where c is its vector
        plus its error, Q and D are the codec's encode and decode. The second half of the exchange, in which a rank
        encodes the mean of its shard, is not in it; nor are hops that travel exactly.
    error_norm: norm of the errors that this rank keeps for the next step, of worker and server together, as the plain
        vectors that they stand for. None, as the one before, in a step that was skipped.
    encode_seconds, wire_seconds, decode_seconds: host time in the ranges "encode"; "exchange", "gather" and
        "average"; "serve", "decode" and "decode and apply" of the profiler. On an accelerator that is the time to
        launch, not to run; wire includes the waiting for slower ranks.
    """

    step: int
    phase: Phase
    bytes: int | None
    skipped: int
    dropped: int
    compression_error: float | None
    error_norm: float | None
    encode_seconds: float | None
    wire_seconds: float | None
    decode_seconds: float | None


class Watch:
    """The handle that `watch` returns: `remove()` ends it."""

    def __init__(self, optimizer: Optimizer, callback: Callable[[StepMetrics], Any], every: int):
        self._optimizer, self._callback, self._every = optimizer, callback, every
        self._open: tuple[Observer, Ledger, Phase, int] | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Call back no more."""
        for hook in self._hooks:
            hook.remove()
        self._close()

    def _before(self, *args: Any) -> None:
        self._close()  # a step that raised left it open
        optimizer = self._optimizer
        if optimizer.steps % self._every == 0:
            self._open = Observer().start(), Ledger().__enter__(), optimizer.phase, optimizer.skipped

    def _after(self, *args: Any) -> None:
        if self._open is None:
            return
        seen, sent, phase, skipped = self._open
        self._close()
        optimizer = self._optimizer
        moved = optimizer.skipped == skipped
        wire = seen.time_in("exchange", "gather", "average")
        # A step that is overlapped with the backward pass was measured on another thread, by nobody: None, not zeros.
        elsewhere = optimizer.ahead is not None and phase is not Phase.LOCAL and wire is None
        metrics = StepMetrics(
            step=optimizer.steps - 1,
            phase=phase,
            bytes=None if elsewhere else sent.total,
            skipped=optimizer.skipped,
            dropped=optimizer.dropped,
            compression_error=seen.compression_error() if moved else None,
            error_norm=seen.error_norm() if moved else None,
            encode_seconds=seen.time_in("encode"),
            wire_seconds=wire,
            decode_seconds=None if elsewhere else seen.time_in("serve", "decode", "decode and apply"),
        )
        self._callback(metrics)

    def _close(self) -> None:
        if self._open is not None:
            seen, sent, *_ = self._open
            self._open = None
            seen.stop()
            sent.__exit__(None, None, None)


@checked("callback")
def watch(optimizer: Optimizer, callback: Callable[[StepMetrics], Any], every: int = 1) -> Watch:
    """Call back after every `every`-th step with what it sent, lost and took on this rank.

    No message is sent for it, and ranks need not do it alike. A step that is watched decodes its own codes and takes
    norms: some passes over the vectors, and memory for as many; the numbers of the training are bit for bit the same.
    What the callback raises, `step` raises, after the step was taken.

        >>> import fn, functools, torch
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> make = functools.partial(fn.onebit_adam, axis="data")
        >>> opt = fn.Optimizer([p], make, schedule=fn.freeze_after(2), lr=0.1)
        >>> handle = watch(opt, lambda m: print(m.step, m.phase.value, m.bytes, m.skipped), every=2)
        >>> for _ in range(4):
        ...     p.grad = torch.ones(3)
        ...     opt.step()
        0 warmup 0 0
        2 compressed 0 0
        >>> handle.remove()

    Args: callback: takes a `StepMetrics`. every: steps, at least 1; 0, every, 2 every, ... are watched.
    Returns: a handle with `remove()`.
    Raises: ValueError if every is less than 1; TypeError for an optimizer of torch.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(expected("optimizer", "an fn.Optimizer", type(optimizer).__name__))
    check_whole("every", every, 1)
    return Watch(optimizer, callback, every)
