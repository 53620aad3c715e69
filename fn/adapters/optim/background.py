"""What is sent while the training goes on: on a thread of a CPU, on a stream of an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fn.adapters.optim.consistency import device_among
from fn.adapters.optim.training import Training
from fn.collectives.axis import ALONE, Axis, Binding
from fn.collectives.comm_thread import CommunicationThread, bind_twin
from fn.collectives.primitives import group_of, psum
from fn.collectives.profiling import Watchers, watched_by
from fn.collectives.transports.failure_detection import raising_peer_lost
from fn.collectives.transports.registry import registered

Job = Callable[[], Any]


def in_background(training: Training, job: Job) -> Callable[[], Any]:
    """Begin a job that communicates; return what waits for it and returns its result. All ranks must call it.

    A thread of its own runs it, over process groups of its own, so that its messages cannot be mixed up with those of
    the training. On an accelerator this thread queues it on a stream of its own: exchanges of two threads could start
    in another order on another rank. Over transports that are no process groups it runs here and now.
    """
    device = device_among(training.groups)
    if device.type != "cpu":
        return _on_stream(training, device, job)
    bound = {name: axis for name, axis in training.binding.axes.items() if axis.size > 1}
    if not bound or any(axis.transport == ALONE or axis.transport in registered for axis in bound.values()):
        found = job()
        return lambda: found
    future = _thread_of(training.binding, bound).submit(job)

    def wait() -> Any:
        with raising_peer_lost(training.transports):
            return future.result()

    return wait


_threads: WeakKeyDictionary[dist.ProcessGroup, dict[Any, CommunicationThread]] = WeakKeyDictionary()
"""First process group of a binding -> the binding's axes -> its thread, until torch destroys the group."""


def _thread_of(binding: Binding, bound: dict[str, Axis]) -> CommunicationThread:
    """Return the thread of a binding, made in the first call, which all ranks must make.

    All optimizers of a binding share it. One per optimizer could not be given back when that is collected, which
    happens at other times on other ranks; and torch keeps every process group. Their jobs run one after the other, in
    the order in which they were submitted, which is the same on all ranks.
    """
    threads = _threads.setdefault(group_of(next(iter(bound.values())).transport), {})
    key = frozenset((name, axis.transport) for name, axis in binding.axes.items())
    if key not in threads:
        # New groups meet in the store, which waits for a lost rank till the time-out and hears no Ctrl-C meanwhile. So
        # the ranks meet before that, in a sum: a barrier of gloo does not hear it either.
        with watched_by(Watchers()):
            for name in bound:
                psum(torch.zeros(1, dtype=torch.int64, device="cpu"), name)
        twins = {name: bind_twin(name, group_of(axis.transport)).axes[name] for name, axis in bound.items()}
        threads[key] = CommunicationThread(Binding({**binding.axes, **twins}), torch.device("cpu"))
    return threads[key]


def _on_stream(training: Training, device: torch.device, job: Job) -> Callable[[], Any]:
    if training.background is None:
        training.background = torch.Stream(device=device)
    stream: torch.Stream = training.background
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        found = job()

    # `kept` holds what the job reads until the main stream has waited; else its memory could be used again meanwhile.
    def wait(kept: Job = job) -> Any:
        torch.accelerator.current_stream(device).wait_stream(stream)
        return found

    return wait
