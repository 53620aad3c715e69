"""Where a mean travels while the training goes on: a thread of a CPU, or a stream of an accelerator."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fn.collectives.agreement import gather_values
from fn.collectives.axis import ALONE, Axis, Binding, current_binding
from fn.collectives.carriers import group_of
from fn.collectives.comm_thread import CommunicationThread, bind_twin
from fn.collectives.profiling import Watchers, watched_by
from fn.collectives.transports.failure_detection import raising_peer_lost
from fn.collectives.transports.registry import has_own_thread, registered
from fn.errors import expected
from fn.kernels.table import agreed_row, is_agreed

Job = Callable[[], Any]


class Background:
    """What one optimizer's jobs run on, made when it is first needed."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._thread: CommunicationThread | None = None
        self._first: Callable[[], dist.ProcessGroup | None] = lambda: None  # the first group of those it is for

    def begin(self, binding: Binding, device: torch.device, job: Job) -> Job:
        """Begin a job that communicates; return what waits for it and returns its result. All ranks must call it.

        On a CPU a thread runs it, over process groups of its own, so that its messages cannot be mixed up with those of
        the training. On an accelerator this thread queues it on a stream of its own: exchanges of two threads could
        start in another order on another rank. Over transports that are no process groups it runs here and now.

        Args: binding: of the training; what is bound now may be others.
        """
        if device.type != "cpu":
            return self._on_stream(device, job)
        if any(has_own_thread(axis.transport) for axis in current_binding().axes.values()):
            self._thread = self._thread or CommunicationThread(Binding({}), device)
            bound_now, agreed = current_binding(), is_agreed()

            def run() -> Any:
                with bound_now, agreed_row(agreed):  # of the thread that begins it
                    return job()

            return self._thread.submit(run).result
        bound = {name: axis for name, axis in binding.axes.items() if axis.size > 1}
        if not bound or any(axis.transport == ALONE or axis.transport in registered for axis in bound.values()):
            result = job()
            return lambda: result
        first = group_of(next(iter(bound.values())).transport)
        if self._thread is None or self._first() is not first:  # torch gives the names of destroyed groups to new ones
            self._thread, self._first = _thread_of(binding, bound, first), weakref.ref(first)
        future, process = self._thread.submit(job), os.getpid()

        def wait() -> Any:
            if os.getpid() != process:  # a child that was forked has no such thread, and would wait for good
                wanted = "to be read in the process that sends the mean on its way"
                raise RuntimeError(expected("states", wanted, "a child of it", "call opt.state_dict() before the fork"))
            with raising_peer_lost({name: axis.transport for name, axis in bound.items()}):
                return future.result()

        return wait

    def _on_stream(self, device: torch.device, job: Job) -> Job:
        self._stream = stream = self._stream or torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            result = job()

        # `kept` holds what the job reads until the main stream has waited; its memory could be used again meanwhile.
        def wait(kept: Job = job) -> Any:
            torch.accelerator.current_stream(device).wait_stream(stream)
            return result

        return wait


_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, tuple[CommunicationThread, dict[str, Axis]]]]
_threads = weakref.WeakKeyDictionary()
"""First process group of a binding -> the binding's axes -> its thread and twins, until torch destroys the group."""


def _thread_of(binding: Binding, bound: dict[str, Axis], first: dist.ProcessGroup) -> CommunicationThread:
    """Return the thread of a binding, for an optimizer that sends its first mean, as it does on all ranks.

    All optimizers of a binding share it. One per optimizer could not be given back when that is collected, which
    happens at other times on other ranks; and torch keeps every process group. Their jobs run one after the other, in
    the order in which they were submitted, which is the same on all ranks.

    Args: bound: its axes of several ranks. first: the process group of the first of them.
    """
    threads = _threads.setdefault(first, {})
    key = frozenset((name, axis.transport) for name, axis in binding.axes.items())
    thread, twins = threads.get(key, (None, dict[str, Axis]()))
    # A rank that has made the group of one axis anew has no thread of this binding, or another one, where others have
    # theirs still: then all make one. What the last axis shows is told on the others in a second round.
    with binding, watched_by(Watchers()):  # a ledger is not to count what is no part of a step
        for name in [*bound] * min(len(bound), 2):
            told = gather_values([twins[name].transport if twins else None, thread is None], name)
            if any(is_missing or twin != told[0][0] for twin, is_missing in told):
                thread = None
    if thread is None:
        twins = {name: bind_twin(name, group_of(axis.transport)).axes[name] for name, axis in bound.items()}
        thread = CommunicationThread(Binding({**binding.axes, **twins}), torch.device("cpu"))
        threads[key] = thread, twins
    return thread
