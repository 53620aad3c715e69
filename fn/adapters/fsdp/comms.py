"""The objects that FSDP2 calls: a reduce-scatter and an all-gather of quantized values, and a mean over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from fn import tree
from fn.collectives import messages
from fn.collectives.agreement import check_numbers, describe_numbers, device_of
from fn.collectives.axis import Binding, bind
from fn.collectives.codecs.codec import Codec, Segments, mean_of_rows, segmented
from fn.collectives.compressed import all_gather_shards, encode
from fn.collectives.feedback import Feedback, off
from fn.collectives.hierarchy import initial_errors
from fn.collectives.ledger import Ledger
from fn.errors import expected
from fn.transforms.average import compressed_average
from fn.transforms.skip_nonfinite import all_finite

Tree = Any


class Rows(NamedTuple):
    """FSDP2's rows, and ours, in which every tensor is padded to what a codec's kernels need."""

    given: tuple[int, ...]
    segments: Segments

    def widen(self, x: Tensor) -> Tensor:
        """Return a vector of FSDP2's rows as a vector of ours; itself if they are the same."""
        if self.given == self.segments.widths:
            return x
        # (W * n,) -> (W, n) -> S of (W, width), each padded to our width -> (W, row_length) -> (W * row_length,)
        pieces = x.view(-1, sum(self.given)).split(self.given, dim=1)
        widths = zip(pieces, self.segments.widths, strict=True)
        return torch.cat([F.pad(piece, (0, width - piece.shape[1])) for piece, width in widths], dim=1).view(-1)

    def narrow(self, x: Tensor) -> Tensor:
        """Take back `widen`."""
        if self.given == self.segments.widths:
            return x
        # (W * row_length,) -> (W, row_length) -> S of (W, width), each cut to the given width -> (W, n) -> (W * n,)
        pieces = x.view(-1, self.segments.row_length).split(self.segments.widths, dim=1)
        return torch.cat([piece[:, :n] for piece, n in zip(pieces, self.given, strict=True)], dim=1).view(-1)


def rows_of(segments: Segments, align: int) -> Rows:
    """Return FSDP2's rows, with widths that are multiples of `align` on the wire."""
    widths = tuple(-(-width // align) * align for width in segments.widths)
    return Rows(segments.widths, Segments(widths, segments.valid))


class _Allocates:
    """FSDP2 asks its communication objects for memory: plain tensors."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedReduceScatter(_Allocates, ReduceScatter):
    """`reduce_scatter_mean` as FSDP2 calls it; `error` is the residual error, what was not delivered yet.

    A vector with a NaN or an Inf on any rank gives NaN on all ranks and leaves every rank's error as it was;
    `skipped` (0-d int64) counts these.
    """

    def __init__(
        self, name: str, axis: str, group: dist.ProcessGroup, segments: Segments, codec: Codec, feedback: Feedback,
        like: Tensor, sent: Ledger,
    ):  # fmt: skip
        self.name, self.axis, self.sent = name, axis, sent
        self.dtype = like.dtype
        self.feedback = feedback
        self.rows = rows_of(segments, codec.align)
        own_row = self.rows.segments.row(torch.tensor(group.rank(), dtype=torch.int64, device="cpu"))
        # Their counts are on the device already, where every message needs them.
        both = [Segments(s.widths, s.valid.to(like.device)) for s in (self.rows.segments, own_row)]
        self.codec, self.own_codec = (segmented(codec, segments) for segments in both)
        # (1,) -> (W * row_length,), without memory: errors are made in the shape of what will travel.
        x = like.expand(group.size() * self.rows.segments.row_length)
        with bind({axis: group}):
            self.error, _ = initial_errors(x, axis, codec, feedback, segments=self.rows.segments)
        self.skipped = torch.zeros((), dtype=torch.int64, device=like.device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce (W * n,) to this rank's (n,).

        Raises: RuntimeError if the gradients are not those that the errors were made for; NotImplementedError for
            another reduction than a sum or a mean. Nothing is sent then.
        """
        factor = _factor(op, group.size())
        elements = group.size() * sum(self.rows.given)
        if input_tensor.shape[0] != elements or input_tensor.dtype != self.dtype:
            raise RuntimeError(
                f"fsdp: {self.name} reduces {input_tensor.shape[0]} elements of {input_tensor.dtype}, but was "
                f"compressed with {elements} of {self.dtype}; a parameter without a gradient takes part after "
                "module.set_reduce_scatter_unused_params(True), where torch has it, and a change of requires_grad or "
                "of dtypes needs remove() and compress(module) again"
            )
        _lend(self.error)
        with bind({self.axis: group}), self.sent:
            # (W * n,) -> (W, row_length) -> (row_length,)
            mean = self._mean(self.rows.widen(input_tensor).view(group.size(), -1))
        output_tensor.copy_(self.rows.narrow(mean if factor == 1 else mean * factor))

    def _mean(self, x: Tensor) -> Tensor:
        payload, error = encode(self.codec, self.feedback, x, self.error)
        if not tree.leaves(self.error):  # nothing that a NaN could spoil
            return mean_of_rows(self.own_codec, messages.exchange(payload, self.axis))
        # A NaN or an Inf shows in the scales. Whether there is one travels along, for all ranks have to keep their old
        # errors: what they send in this message nobody uses, and it would else count as delivered.
        ok = all_finite([p for p in tree.leaves(payload) if p.is_floating_point()])
        # () -> (W, 1): the flag travels in the row of each receiver.
        payload, oks = messages.exchange((payload, ok.to(torch.uint8).expand(x.shape[0], 1)), self.axis)
        ok = oks.bool().all()
        self.error = keep(ok, error, self.error)
        self.skipped += ~ok
        return torch.where(ok, mean_of_rows(self.own_codec, payload), float("nan"))


class CompressedAllGather(_Allocates, AllGather):
    """`all_gather_shards` as FSDP2 calls it: parameters in codes, without feedback.

    Every rank, also the one that holds a shard exactly, computes with what was decoded. Another group than that of
    the shards, to which `reshard_after_forward` may have given the parameters, gathers exactly.
    """

    def __init__(self, axis: str, group: dist.ProcessGroup, segments: Segments, codec: Codec, sent: Ledger):
        self.axis, self.group, self.codec, self.sent = axis, group, codec, sent
        self.rows = rows_of(segments, codec.align)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather (n,) of every rank to (W * n,)."""
        if group is not self.group:  # after reshard_after_forward=2, say: parts of a node's ranks
            work: dist.Work | None = DefaultAllGather()(output_tensor, input_tensor, group, async_op)
            return work
        with bind({self.axis: group}), self.sent:
            shard, segments = self.rows.widen(input_tensor), self.rows.segments
            # (row_length,) -> (W * row_length,)
            whole, _ = all_gather_shards(shard, (), self.axis, self.codec, off(), segments=segments)
        output_tensor.copy_(self.rows.narrow(whole))
        return None


class ReplicaMean:
    """`compressed_average` over replicas, as FSDP2's hook after the reduce-scatter; `state` holds its errors.

    shards: returns what this rank holds of the parameters by name; asked once, when their numbers are the first that
    are trained, to compare them.
    """

    def __init__(
        self, name: str, axis: str, group: dist.ProcessGroup, own_row: Segments, codec: Codec, feedback: Feedback,
        like: Tensor, sent: Ledger, shards: Callable[[], dict[str, Tensor]], servers: bool = True,
    ):  # fmt: skip
        self.name, self.axis = name, axis
        self._shards: Callable[[], dict[str, Tensor]] | None = shards
        self.binding: Binding = bind({axis: group})
        self.sent = sent
        self.widths, self.lengths = own_row.widths, [int(n) for n in own_row.valid[0]]
        self.transform = compressed_average(axis, codec, feedback, servers=servers)
        with self.binding:
            # (1,) -> (n,), without memory.
            self.state = self.transform.init([like.expand(n) for n in self.lengths])

    def __call__(self, reduced: Tensor) -> None:
        """Replace this rank's shard (n,) by the mean over the replicas.

        Raises: `RanksDisagree`, on every replica, at the first call, if they hold other parameters.
        """
        _lend((reduced, self.state))
        if self._shards is not None:
            self._check_start(self._shards())
            self._shards = None
        # (n,) -> S of (width,) -> S of (length,): the padding of this rank's row is not averaged.
        pieces = [x[:n] for x, n in zip(reduced.split(self.widths), self.lengths, strict=True)]
        with self.binding, self.sent:
            means, state = self.transform.compressed_update(pieces, self.state, None)
        # A True in front, for torch cannot stack the flags of a group without parameters.
        ok = torch.stack(
            [torch.ones((), dtype=torch.bool, device=reduced.device), *(x.isfinite().all() for x in means)]
        )
        ok = ok.all()  # the same on all replicas, which hold the same means
        self.state = keep(ok, state, self.state)
        for piece, mean in zip(pieces, means, strict=True):
            piece.copy_(torch.where(ok, mean, float("nan")))

    def _check_start(self, shards: dict[str, Tensor]) -> None:
        numbers = describe_numbers({f"{name} in {self.name}": x for name, x in shards.items()})
        cure = "replicas that start apart stay apart: take the same seed before the model is made, or a checkpoint"
        with self.binding:
            check_numbers(self.axis, numbers, device_of(shards), cure)


def _lend(x: Tree) -> None:
    """Keep the memory of tensors of another stream until the current one has done what it is about to be given.

    FSDP2 calls its hook on a stream that is not the one it made the reduced gradients on. Where they are cast after
    that, it gives their memory up at once, and the next group's, made on that first stream, would be written there.
    Errors that were made before the first backward pass are given up in it, on the stream of FSDP2's messages.
    """
    for leaf in tree.leaves(x):
        if leaf.device.type != "cpu":
            leaf.record_stream(torch.accelerator.current_stream(leaf.device))


def keep(ok: Tensor, new: Tree, old: Tree) -> Tree:
    """Return the new tree where `ok`, 0-d bool, else the old one; without asking a device to report."""
    # On the CPU a branch costs nothing, where `where` would copy all errors.
    if ok.device.type == "cpu":
        return new if bool(ok) else old
    return tree.map(lambda n, o: torch.where(ok, n, o), new, old)


def _factor(op: Any, size: int) -> float:
    """Return the factor that makes of the mean the result that a reduction asks for."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return 1
    if kind == dist.ReduceOp.SUM:
        return size
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]  # until torch 2.12 it is only pickled
        if isinstance(factor, float):
            return size * factor
    raise NotImplementedError(expected("op", "SUM, AVG or PREMUL_SUM of a number", f"{op}"))
