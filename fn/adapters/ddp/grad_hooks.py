"""Which gradients of a backward pass have arrived: told by DDP's buckets, or by hooks of the parameters themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fn.adapters.ddp.overlapped import Overlap


class DdpBuckets:
    """DDP's communication hook: leave the buckets as they are. Backward waits until all has been sent."""

    def __init__(self, running: Overlap):
        self._running = running
        self._waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def __call__(self, bucket: Any) -> Any:
        """Take a bucket; return its future."""
        buffer = bucket.buffer()
        done: Any = torch.futures.Future(devices=[d for d in [buffer.device] if d.type != "cpu"])
        if bucket.index() == 0:
            self._waiting = []  # of a pass that broke off
            self._running.begin()
        if bucket.is_last() and torch._C._current_autograd_node() is not None:
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._running.remember))  # behind the end of DDP's pass, see `backward_end`
        if not self._running.is_taking:
            done.set_result(buffer)
            return done
        self._waiting.append((done, buffer))
        self._running.arrive(bucket.parameters(), bucket.gradients())
        if bucket.is_last():  # the gradients may be changed, and others may communicate, once all have left
            waiting, self._waiting = self._waiting, []
            self._running.end()
            self._running.when_sent(lambda: _set_all(waiting))
        return done


def _set_all(waiting: list[tuple[torch.futures.Future[Tensor], Tensor]]) -> None:
    for future, buffer in waiting:
        future.set_result(buffer)


class GradientHooks:
    """Hooks on the parameters of a plain module; gradients stay where they are, and nothing is copied.

    A backward pass ends when autograd says so. Then the gradients of earlier passes count for the parameters that had
    no part in this one. Checkpoints with `use_reentrant=True` run passes inside of the pass; all communicate, and only
    what the last one sent counts: use False.
    """

    def __init__(self, params: Sequence[Tensor], running: Overlap):
        self._found = weakref.ref(running)  # a tensor's hooks are no garbage for Python: they would keep it for good
        self._pass: int | None = None
        for p in params:
            p.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, p: Tensor) -> None:
        running = self._found()
        if running is None or running.is_paused:
            return
        now = torch._C._current_graph_task_id()
        if now != self._pass:  # the one before may have broken off
            self._pass = now
            running.begin()
            Variable._execution_engine.queue_callback(lambda: self._on_end(running))
        if running.is_taking and (grad := p.grad) is not None:
            running.arrive([p], [grad])

    def _on_end(self, running: Overlap) -> None:
        self._pass = None
        if running.is_taking:
            earlier = [(p, grad) for p in running.missing() if (grad := p.grad) is not None]
            running.arrive([p for p, _ in earlier], [grad for _, grad in earlier])
            running.end()
        running.remember()
