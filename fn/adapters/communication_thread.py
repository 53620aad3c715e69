"""One thread that communicates while others compute, over process groups of its own.

Collectives must start in the same order on all ranks. Callbacks of futures do not keep an order, so everything that
is sent behind a backward pass is sent by one thread, one job after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from fn.collectives.axis import Binding, bind
from fn.collectives.ledger import Ledger, counting, open_ledgers
from fn.collectives.rendezvous import timeout_of

Job = Callable[[], Any]


class CommunicationThread:
    """Run jobs in the order in which they are submitted, without gradients, with axes bound.

    On an accelerator the jobs run on a stream of their own, behind what was queued when they were submitted.

    Args: binding: the axes of the jobs. device: where their tensors are.
    """

    def __init__(self, binding: Binding, device: torch.device):
        self._binding = binding
        self._jobs: queue.SimpleQueue[tuple[Job, Any, tuple[Ledger, ...], Future[Any]]] = queue.SimpleQueue()
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._device = device
        # A daemon: a peer that hangs does not keep this process alive.
        threading.Thread(target=self._run, name="fn-communication", daemon=True).start()

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

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # holds for this thread only
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        while True:
            self._do(*self._jobs.get())

    def _do(self, job: Job, event: Any, ledgers: tuple[Ledger, ...], done: Future[Any]) -> None:
        try:
            if self._stream is not None:
                self._stream.wait_event(event)
            with self._binding, counting(ledgers):
                done.set_result(job())
        except BaseException as error:
            done.set_exception(error)


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
