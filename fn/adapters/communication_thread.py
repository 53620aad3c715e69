"""One thread that communicates while others compute, over process groups of its own.

Collectives must start in the same order on all ranks. Callbacks of futures do not keep an order, so everything that
is sent behind a backward pass is sent by one thread, one job after the other.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from fn.collectives.axis import Binding, bind
from fn.collectives.ledger import Ledger, counting, open_ledgers
from fn.collectives.rendezvous import timeout_of

Job = Callable[[], Any]
Entry = tuple[Job, Any, tuple[Ledger, ...], Future[Any]]
Jobs = queue.SimpleQueue[Entry | None]


class CommunicationThread:
    """Run jobs in the order in which they are submitted, without gradients, with axes bound.

    The thread ends when nobody holds this object any more, after what was submitted.

    On an accelerator the jobs run on a stream of their own, behind what was queued when they were submitted.

    Args: binding: the axes of the jobs. device: where their tensors are.
    """

    def __init__(self, binding: Binding, device: torch.device):
        self._jobs: Jobs = queue.SimpleQueue()
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._device = device
        # A daemon: a peer that hangs does not keep this process alive.
        what = self._jobs, binding, self._stream  # not self, so that the thread ends with it
        threading.Thread(target=_run, args=what, name="fn-communication", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job; the ledgers that are open here count what it sends."""
        done: Future[Any] = Future()
        event = None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()
        self._jobs.put((job, event, open_ledgers(), done))
        return done

    def catch_up(self) -> None:
        """Let this thread's stream wait for what the jobs have queued on theirs."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _run(jobs: Jobs, binding: Binding, stream: Any) -> None:
    torch.set_grad_enabled(False)  # holds for this thread only
    if stream is not None:
        torch.accelerator.set_stream(stream)
    while _do(jobs.get(), binding, stream):  # no name for the job: it would live until the next one
        pass


def _do(entry: Entry | None, binding: Binding, stream: Any) -> bool:
    """Run a job; return whether there may be more."""
    if entry is None:
        return False
    job, event, ledgers, done = entry
    try:
        if stream is not None:
            stream.wait_event(event)
        with binding, counting(ledgers):
            done.set_result(job())
    except BaseException as error:
        done.set_exception(error)
    return True


def bind_twin(axis: str, group: dist.ProcessGroup) -> Binding:
    """Bind an axis to a new process group of the same ranks; all ranks of the group must call it.

    What one thread sends over it cannot be mixed up with what another sends over the old one.
    """
    backend = dist.get_backend(group)
    twin = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=None if backend == "undefined" else backend,
        timeout=timeout_of(group),
        use_local_synchronization=True,
        group_desc="fn: behind the backward pass",
    )
    return bind({axis: twin})
