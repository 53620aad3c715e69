"""Where a mean travels while the training goes on: a thread of a CPU, or a stream of an accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fn.collectives.axis import ALONE, Axis, Binding, current_binding
from fn.collectives.carriers import group_of
from fn.collectives.comm_thread import CommunicationThread, bind_twin
from fn.collectives.transports.failure_detection import raising_peer_lost
from fn.collectives.transports.registry import has_own_thread, registered
from fn.errors import expected

Job = Callable[[], Any]


class Background:
    """What one optimizer's jobs run on, made when it is first needed."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._thread: CommunicationThread | None = None

    def begin(self, binding: Binding, axes: Iterable[str], device: torch.device, job: Job) -> Job:
        """Begin a job that communicates; return what waits for it and returns its result. All ranks must call it.

        On a CPU a thread runs it, over process groups of its own, so that its messages cannot be mixed up with those of
        the training. On an accelerator this thread queues it on a stream of its own: exchanges of two threads could
        start in another order on another rank. Over transports that are no process groups it runs here and now.

        Args: binding: of the training; what is bound now may be others. axes: those of it over which jobs communicate.
        """
        if device.type != "cpu":
            return self._on_stream(device, job)
        if any(has_own_thread(axis.transport) for axis in current_binding().axes.values()):
            self._thread = self._thread or CommunicationThread(Binding({}), device)
            bound_now = current_binding()

            def run() -> Any:
                with bound_now:
                    return job()

            return self._thread.submit(run).result
        used = {name: binding.axes[name] for name in sorted({*axes} & {*binding.axes})}
        bound = {name: axis for name, axis in used.items() if axis.size > 1}
        if not bound or any(axis.transport == ALONE or axis.transport in registered for axis in bound.values()):
            result = job()
            return lambda: result
        future, process = _thread_of(binding, used, bound).submit(job), os.getpid()

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


_threads: WeakKeyDictionary[dist.ProcessGroup, dict[Any, CommunicationThread]] = WeakKeyDictionary()
"""First process group of some axes -> these axes -> their thread, until torch destroys the group."""


def _thread_of(binding: Binding, used: Mapping[str, Axis], bound: Mapping[str, Axis]) -> CommunicationThread:
    """Return the thread of some axes, made in the first call, which all ranks must make.

    All optimizers of these axes share it. One per optimizer could not be given back when that is collected, which
    happens at other times on other ranks; and torch keeps every process group. Their jobs run one after the other, in
    the order in which they were submitted, which is the same on all ranks.

    Args: binding: of the training. used: the axes of the jobs. bound: those of them that have several ranks.
    """
    threads = _threads.setdefault(group_of(next(iter(bound.values())).transport), {})
    # All ranks must find one, or make one. So this looks at nothing that one of them may have alone: at no axis that is
    # bound beside those of the jobs, and at no group of its own, only at whether there is such an axis.
    key = frozenset((name, axis.transport if name in bound else "") for name, axis in used.items())
    if key not in threads:
        twins = {name: bind_twin(name, group_of(axis.transport)).axes[name] for name, axis in bound.items()}
        threads[key] = CommunicationThread(Binding({**binding.axes, **twins}), torch.device("cpu"))
    return threads[key]
