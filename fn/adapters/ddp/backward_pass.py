"""Messages behind a backward pass, bucket by bucket, for overlapped steps and averaged gradients.

DDP reports gradients in buckets that it rearranges after the first pass. What travels together here is fixed instead,
so that errors belong to parameters and outlive any rearrangement. In the order of a pass:

1. `DdpHook` or `GradientHooks` is told of a gradient by DDP or by autograd. The first one begins a `BackwardPass`.
2. A bucket leaves when its last gradient has arrived and all buckets before it have left, so all ranks send in one
   order.
3. Its job goes to one of the `Threads`. If a job fails, no later one is begun, because the peers may be gone.
4. The buckets that are not complete leave last, with zeros for what is missing: averaged gradients at the end of the
   pass, and overlapped steps in `step`, when all gradients are there that are to come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from fn.collectives.axis import Binding
from fn.collectives.comm_thread import CommunicationThread
from fn.collectives.ledger import ledger
from fn.collectives.transports.failure_detection import falling_silent, raising_peer_lost
from fn.errors import PeerLost, expected
from fn.kernels.layout import is_dense

Bucket = Sequence[Tensor]
"""Parameters that travel together."""


def leaving_order(buckets: Sequence[Bucket], params: Iterable[Tensor]) -> list[int]:
    """Return the buckets in the order in which a backward pass completes them.

    A backward pass goes through a model from its end, so a bucket is complete when its first parameter, in the order
    of the model's parameters, has its gradient.
    """
    position = {id(p): i for i, p in enumerate(params)}
    # A bucket with a parameter that is none of the model's leaves last, for no backward pass completes it.
    first = [min((position.get(id(p), -1) for p in bucket), default=-1) for bucket in buckets]
    return sorted(range(len(buckets)), key=lambda i: (-first[i], i))


class Threads:
    """Threads that send behind the backward passes of one model, each over process groups of its own.

    While the codes of one bucket are on the wire, another thread encodes the next one.

    Args: bindings: the same axis for each thread, on process groups that nothing else uses.
    """

    def __init__(self, bindings: Sequence[Binding], device: torch.device):
        self._threads = [CommunicationThread(binding, device) for binding in bindings]
        self._transports = {name: axis.transport for name, axis in bindings[0].axes.items()}
        self._of_all = {axis.transport for binding in bindings for axis in binding.axes.values()}

    def __len__(self) -> int:
        return len(self._threads)

    def submit(self, turn: int, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job. Args: turn: its number in the pass, which tells its thread: the same one on all ranks."""
        return self._threads[turn % len(self._threads)].submit(job)

    def raising_peer_lost(self) -> Any:
        """Return a context for jobs; on a loss this rank falls silent on all threads, where others may wait for it."""
        return raising_peer_lost(self._transports, self._of_all)

    def falling_silent(self) -> Any:
        """Return a context in which this rank falls silent on all threads where it fails alone."""
        return falling_silent(self._of_all)

    def catch_up(self) -> None:
        """Let this thread's stream wait for what the jobs have queued on theirs."""
        for thread in self._threads:
            thread.catch_up()

    def close(self) -> None:
        """End the threads, and give back their process groups. All ranks must call it alike."""
        while self._threads:
            self._threads.pop().close()


class BackwardPass:
    """The messages of one backward pass: those that were sent, and those that are still to come.

    Args: order: in which the buckets leave, the same on all ranks. job_of: (bucket, its gradients) -> the job that
        sends them, made when the bucket leaves.
    """

    def __init__(
        self, threads: Threads, buckets: Sequence[Bucket], order: Sequence[int],
        job_of: Callable[[int, list[Tensor]], Callable[[], Any]],
    ):  # fmt: skip
        self._threads, self._buckets, self._job_of, self._to_leave = threads, buckets, job_of, [*order]
        self._places = {id(p): (i, j) for i, bucket in enumerate(buckets) for j, p in enumerate(bucket)}
        self._arrived: list[dict[int, Tensor]] = [{} for _ in buckets]
        self._awaited = [sum(p.requires_grad for p in bucket) for bucket in buckets]
        self._jobs: dict[int, Future[Any]] = {}  # by bucket
        self._bytes: dict[int, int] = {}
        self._error: BaseException | None = None

    def arrive(self, params: Iterable[Tensor], grads: Iterable[Tensor]) -> None:
        """Take gradients, and send the buckets that can leave now. Parameters of no bucket are passed over."""
        for p, g in zip(params, grads, strict=True):
            if (place := self._places.get(id(p))) is not None:
                i, j = place
                # A gradient that comes again, from a pass inside of this one, replaces the first, and counts once.
                self._awaited[i] -= j not in self._arrived[i]
                self._arrived[i][j] = g
        # From the front only: else two ranks might send different buckets at a time, and mix up their numbers.
        while self._to_leave and self._awaited[self._to_leave[0]] == 0:
            self._send(self._to_leave.pop(0))

    def held_back(self) -> list[Tensor]:
        """Return the parameters of the buckets that have not left."""
        return [p for i in self._to_leave for p in self._buckets[i]]

    def end(self) -> None:
        """Send the buckets that have not left, zeros for what is missing; those with parameters outside of the pass."""
        while self._to_leave:
            self._send(self._to_leave.pop(0))

    def _send(self, bucket: int) -> None:
        arrived = self._arrived[bucket]
        grads = [arrived[j] if j in arrived else p.new_zeros(p.shape) for j, p in enumerate(self._buckets[bucket])]
        job = partial(self._run, bucket, self._job_of(bucket, grads))
        # By the number in the pass, which is the same on all ranks, and so is the thread, and its process group.
        self._jobs[bucket] = self._threads.submit(len(self._jobs), job)

    def _run(self, bucket: int, job: Callable[[], Any]) -> Any:
        if self._error is not None:  # of another bucket: the peers may be gone
            raise self._error
        try:
            with ledger() as sent, self._threads.raising_peer_lost():
                result = job()
            self._bytes[bucket] = sent.total
        except BaseException as error:
            # Noted for the jobs behind it, which then send nothing, and raised by the future of this one.
            self._error = error
            raise
        return result

    def when_sent(self, then: Callable[[], None]) -> Future[None]:
        """Call a function, on one of the threads, when all that was submitted has been sent, or has failed."""

        def run() -> None:
            self.wait()
            then()

        return self._threads.submit(len(self._jobs), run)

    def wait(self) -> None:
        """Wait for what was submitted, whatever becomes of it."""
        # A copy, for `when_sent` waits on another thread than the one that submits.
        for job in [*self._jobs.values()]:
            job.exception()

    def results(self) -> list[Any]:
        """Wait for the jobs; return what they returned, by bucket. Raises what one of them raised."""
        return [self._jobs[bucket].result() for bucket in sorted(self._jobs)]

    @property
    def bytes(self) -> int:
        """Return how many bytes this rank has sent."""
        return sum(self._bytes.values())


class Sender(Protocol):
    """The sender behind a model: `overlapped.Overlap` or `gradient_averaging.GradientAverage`."""

    is_paused: bool
    """Whether backward passes only add to the gradients for now."""

    def begin(self) -> BackwardPass | None:
        """Begin a backward pass; return None if nothing is to be sent behind it."""

    def on_last(self) -> None:
        """Hear that DDP has reported its last gradient; what is submitted by then, `backward` waits for."""

    def on_sent(self) -> None:
        """Hear, on one of the threads, that all was sent or has failed; what this raises, `backward` raises."""

    def on_end(self) -> None:
        """Hear that the backward pass is over, and that nobody but the user changes gradients any more."""


class BucketGradients:
    """The gradients of a bucket of DDP's as views that have their parameters' shapes, and their elements in place.

    DDP lays a gradient out as its parameter lies where that is dense, in channels_last for one, and reads what a hook
    returns in that order. `GradBucket.gradients` says row-major, whatever DDP did.
    """

    def __init__(self) -> None:
        self._strides: dict[int, tuple[int, ...]] = {}  # of parameters, by identity, with which DDP was seen to copy

    def __call__(self, bucket: Any) -> list[Tensor]:
        """Return the gradients of a bucket. Raises: ValueError for a parameter that was laid out anew under DDP."""
        rows = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return [self._checked(p, _laid_out(p, row_major)) for p, row_major in rows]

    def _checked(self, p: Tensor, g: Tensor) -> Tensor:
        # DDP has copied p.grad by the strides that p had when DDP was made, and copies back by those of now: elements
        # would change places. To compare reads the gradient, and waits for a device: once for each layout of p.
        if p.dim() < 2 or p.grad is None or p.grad is g or self._strides.get(id(p)) == p.stride():
            return g
        if not torch.equal(g, p.grad) and not torch.equal(g.nan_to_num(), p.grad.nan_to_num()):
            wanted = "parameters with the strides with which DistributedDataParallel was made"
            got = f"a parameter of shape {tuple(p.shape)} that was given the strides {p.stride()} later"
            cure = "call .to(memory_format=...) before it, or wrap anew: DistributedDataParallel(model.module)"
            raise ValueError(expected("model", wanted, got, cure))
        self._strides[id(p)] = p.stride()
        return g


def _laid_out(p: Tensor, row_major: Tensor) -> Tensor:
    """Return a part of a bucket, given as a row-major view, as DDP has filled it with the gradient of p."""
    if p.grad is not None and p.grad.data_ptr() == row_major.data_ptr():
        return p.grad  # `gradient_as_bucket_view`
    if p.is_contiguous() or not is_dense([(s, n) for s, n in zip(p.stride(), p.shape, strict=True) if n != 1]):
        return row_major
    return row_major.as_strided(p.shape, p.stride())


class DdpHook:
    """DDP's communication hook: its buckets stay as they are, and backward waits until all has been sent."""

    def __init__(self, sender: Sender):
        self._sender = sender
        self._gradients_of = BucketGradients()
        self._pass: BackwardPass | None = None
        self._open: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def __call__(self, bucket: Any) -> Any:
        """Take a bucket of DDP's; return its future."""
        buffer, grads = bucket.buffer(), self._gradients_of(bucket)
        # With the device, so that DDP's stream waits for what the jobs have queued on theirs.
        done: Any = torch.futures.Future(devices=[d for d in [buffer.device] if d.type != "cpu"])
        if bucket.index() == 0:
            self._open, self._pass = [], self._sender.begin()  # the one before may have broken off
        if self._pass is None:
            done.set_result(buffer)
            if bucket.is_last():
                self._at_end(None, [])
            return done
        self._open.append((done, buffer))
        self._pass.arrive(bucket.parameters(), grads)
        if bucket.is_last():  # the gradients may be changed, and others may communicate, once all have left
            ended, still_open = self._pass, self._open
            self._pass, self._open = None, []  # or the gradients would live until the next pass
            self._sender.on_last()
            sent = ended.when_sent(partial(self._complete, still_open))
            self._at_end(sent, [future for future, _ in still_open])
        return done

    def _complete(self, still_open: list[tuple[torch.futures.Future[Tensor], Tensor]]) -> None:
        try:
            self._sender.on_sent()
        finally:  # DDP goes on, also where a job has failed
            for future, buffer in still_open:
                future.set_result(buffer)

    def _at_end(self, sent: Future[None] | None, buckets: Sequence[torch.futures.Future[Tensor]]) -> None:
        """Raise what a future holds at the end of the running backward pass, and tell the sender of this end.

        Of an exception in a bucket's future DDP makes a RuntimeError. A callback of autograd may raise any type. DDP
        has to end its pass first, or it takes no other one. It queues its end after the last bucket: behind what is
        queued here, before what that queues in turn. Not so after the loss of a rank: DDP's own messages, those about
        unused parameters, fail as well, in its end, which would hide what was lost; and there is no other pass. Nor
        where a bucket was left open, for which DDP would wait for ever.

        Args: sent: done when the buckets are, or when something failed. buckets: what DDP was given.
        """
        is_in_pass = torch._C._current_graph_task_id() != -1
        queue = Variable._execution_engine.queue_callback

        def before_ddp_ends() -> None:
            if sent is not None:
                is_lost = isinstance(sent.exception(), PeerLost)  # waits
                if not is_in_pass or is_lost or not all(future.done() for future in buckets):
                    sent.result()
                    return
            queue(behind_ddp)

        def behind_ddp() -> None:
            if sent is not None:
                sent.result()
            self._sender.on_end()

        # No node runs while a static graph sends the buckets of its first pass, or a rank that has joined sends zeros.
        if torch._C._current_autograd_node() is not None:
            queue(before_ddp_ends)
        elif sent is not None:
            before_ddp_ends()


def _no_pass() -> None:
    """Return None, in the place of a reference to a pass."""


class GradientHooks:
    """Hooks on the parameters of a plain module; gradients stay where they are, and nothing is copied.

    A backward pass ends when autograd says so. Checkpoints with `use_reentrant=True` run passes inside of the pass; all
    communicate, and only what the last one sent counts: use False.
    """

    def __init__(self, params: Sequence[Tensor], sender: Sender):
        # A tensor's hooks are no garbage for Python: they would keep the sender for good, with its threads. So would a
        # pass that broke off, which holds its sender.
        self._sender = weakref.ref(sender)
        self._pass: Callable[[], BackwardPass | None] = _no_pass
        self._task: int | None = None
        for p in params:
            p.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, p: Tensor) -> None:
        sender = self._sender()
        if sender is None or sender.is_paused:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:  # the one before may have broken off
            begun = sender.begin()
            self._task, self._pass = task, _no_pass if begun is None else weakref.ref(begun)
            Variable._execution_engine.queue_callback(lambda: self._on_end(sender))
        running = self._pass()
        if running is not None and (grad := p.grad) is not None:
            running.arrive([p], [grad])

    def _on_end(self, sender: Sender) -> None:
        self._task, self._pass = None, _no_pass
        sender.on_end()
