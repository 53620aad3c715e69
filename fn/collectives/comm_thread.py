"""One thread that communicates while others compute, over process groups of its own.

Collectives must start in the same order on all ranks, or one rank's gradients of one layer are added to another's of
the next. Callbacks of futures do not keep an order, so everything that is sent behind a backward pass is sent by one
thread, one job after the other. `seconds_per_byte` measures the wire once, to decide whether hiding it is worth the
trouble.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fn.collectives.agreement import gather_values
from fn.collectives.axis import Binding, axis_size, bind
from fn.collectives.carriers import group_of
from fn.collectives.primitives import all_to_all, pmean
from fn.collectives.profiling import Watchers, watched_by, watchers
from fn.collectives.transports.failure_detection import abort_connections, is_loss, peer_lost
from fn.collectives.transports.named_group import new_named_group
from fn.collectives.transports.tcp import stay_on_gloo, stays_on_gloo, timeout_of
from fn.kernels.flags import temporarily

Job = Callable[[], Any]
Entry = tuple[Job, Any, Watchers, Future[Any]]
Jobs = queue.SimpleQueue[Entry | None]

PROBE = 1 << 20
"""Bytes that each rank sends in a measurement."""


class CommunicationThread:
    """Run jobs in the order in which they are submitted, without gradients, with axes bound.

    The thread ends when nobody holds this object any more, after what was submitted; at the end of the process, too.

    On an accelerator the jobs run on a stream of their own, behind what was queued when they were submitted.

    Args: binding: the axes of the jobs. device: where their tensors are.
    """

    def __init__(self, binding: Binding, device: torch.device):
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._device = device
        self._worker = _Worker(binding, self._stream)  # does not hold self, so that it ends with it
        self._worker.start()
        weakref.finalize(self, self._worker.jobs.put, None).atexit = False

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job; the ledgers and observers that are open here see what it does."""
        done: Future[Any] = Future()
        # The job reads tensors that this thread's stream may still write: it starts behind the event on its own stream.
        event = None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()
        self._worker.jobs.put((job, event, watchers(), done))
        return done

    def catch_up(self) -> None:
        """Let this thread's stream wait for what the jobs have queued on theirs."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """End the thread, after what was submitted, and keep its process groups for the next `bind_twin`.

        A group that is gone already is passed over. The next one takes a group that all ranks have given back.
        """
        self._worker.jobs.put(None)
        self._worker.join()
        for transport in self._worker.transports:
            with suppress(RuntimeError):
                twin = group_of(transport)
                if (original := _originals[twin]()) is not None:
                    _free.setdefault(original, {})[transport] = twin


class _Worker(threading.Thread):
    """The thread itself.

    A daemon, for Python waits for other threads before it calls `_end_workers`, which waits with more care.
    """

    def __init__(self, binding: Binding, stream: Any):
        super().__init__(name="fn-communication", daemon=True)
        self.jobs: Jobs = queue.SimpleQueue()
        self.transports = [axis.transport for axis in binding.axes.values()]
        self._binding, self._stream = binding, stream
        _workers.add(self)

    def run(self) -> None:
        torch.set_grad_enabled(False)  # holds for this thread only
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        # A name for the job here would keep it, and the gradients that it holds, until the next one comes.
        while _do(self.jobs.get(), self._binding, self._stream):
            pass

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, also in the operating system.

        Python's own returns before the thread has destroyed what C++ keeps for it. Such a destructor may ask for the
        interpreter while that goes down, which ends the process with SIGABRT.
        """
        super().join(timeout)
        until = time.monotonic() + LAST_WAIT
        while not self.is_alive() and os.path.exists(f"/proc/self/task/{self.native_id}") and time.monotonic() < until:
            time.sleep(0.001)


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
"""Those that may run. A forked child has none of these threads, and may not close the connections of its parent."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)

LAST_WAIT = 10.0
"""Seconds that a thread may take to end once its connections are closed."""


@atexit.register
def _end_workers() -> None:
    """End all threads before the interpreter goes down.

    Python stops a daemon that comes back from C++ afterwards by unwinding its stack. That ends the process with
    SIGABRT, and torchrun calls a job that had finished a failed one.

    What is on its way is waited for, as long as any exchange may take: peers may need it. Where the process ends by an
    exception, connections are closed instead, so that peers hear of it at once.
    """
    workers = list(_workers)
    for worker in workers:
        worker.jobs.put(None)
    try:
        if getattr(sys, "last_value", None) is None:  # set by an exception that nobody has caught
            for worker in workers:
                worker.join()
    finally:  # Ctrl-C ends the wait
        running = [worker for worker in workers if worker.is_alive()]
        for transport in {transport for worker in running for transport in worker.transports}:
            abort_connections(transport)  # a thread in C++ hears nothing else
        for worker in running:
            worker.join(LAST_WAIT)


def _do(entry: Entry | None, binding: Binding, stream: Any) -> bool:
    """Run a job; return whether there may be more."""
    if entry is None:
        return False
    job, event, submitter, done = entry
    try:
        if stream is not None:
            stream.wait_event(event)
        with binding, watched_by(submitter):
            done.set_result(job())
    except BaseException as error:
        # Whoever waits for the job gets the error. A thread that ended by it would never come to the next jobs.
        done.set_exception(error)
    return True


_originals: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""Twin -> a weak reference to the group that it was made for."""

_free: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Group -> name -> twin that nobody uses any more on this rank. Others may still use theirs, or have dropped it."""


def bind_twin(axis: str, group: dist.ProcessGroup) -> Binding:
    """Bind an axis to another process group of the same ranks; all ranks of the group must call it, and nobody else.

    What one thread sends over it cannot be mixed up with what another sends over the old one. It is one that all ranks
    have given back, or a new one under a name that the first rank draws: ranks may have made other groups, and other
    numbers of them.

    Raises: `PeerLost` if a rank ends or does not come.
    """
    backend, free = dist.get_backend(group), _free.setdefault(group, {})
    # New groups meet in the store, which waits for a lost rank till the time-out and hears no Ctrl-C meanwhile. So the
    # ranks meet before that, here. A ledger is not to count what is no part of a step.
    with bind({axis: group}), watched_by(Watchers()):
        told = gather_values([f"fn {secrets.token_hex(8)}", *reversed(free)], axis, _device_of(group))
    (drawn, *names), *others = told
    if (name := next((name for name in names if all(name in theirs for theirs in others)), None)) is not None:
        return bind({axis: free.pop(name)})
    options = {"backend": None if backend == "undefined" else backend, "timeout": timeout_of(group)}
    # The world is without a device of its own meanwhile. Where `init_process_group` was given `device_id`, torch splits
    # the communicators of groups off that of the world, and such a split waits for all ranks of the world, those of
    # other groups included, which may never come.
    with temporarily(dist.group.WORLD, "bound_device_id", None):
        try:
            twin = new_named_group(drawn, dist.get_process_group_ranks(group), group_desc=DESCRIPTION, **options)
        except RuntimeError as error:
            if not is_loss(error):
                raise
            raise peer_lost(error, "the making of a process group", axis, str(group.group_name), cause="") from error
    _originals[twin] = weakref.ref(group)
    if stays_on_gloo(group):
        stay_on_gloo([twin])
    return bind({axis: twin})


DESCRIPTION = "fn: behind the backward pass"
"""What torch's logs call a twin."""


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where a group exchanges: in the host's memory, if it can."""
    kinds = [kind.type for kind in group._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def seconds_per_byte(axis: str, device: torch.device) -> float:
    """Return how long a rank takes to send a byte to the others, the same number on all ranks of the axis.

    All ranks must call it. It is the median of three exchanges of `PROBE` bytes, averaged over the ranks; 0 on one
    rank.
    """
    world = axis_size(axis)
    if world == 1:
        return 0.0
    # (W, bytes): a rank sends all rows but its own
    rows = torch.zeros(world, PROBE // (world - 1), dtype=torch.uint8, device=device)
    times = []
    for _ in range(4):
        pmean(torch.zeros(1, dtype=torch.float32, device=device), axis)  # a barrier, or waiting would be measured
        _finish(device)
        start = time.perf_counter()
        all_to_all(rows, axis)
        _finish(device)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[1:])  # the first one opens connections
    # The mean, so that all ranks decide alike: one that hid its exchanges alone would wait for ever.
    return float(pmean(torch.tensor([median / PROBE], dtype=torch.float64, device=device), axis))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
