"""What crosses ranks in `sharded`: gradients or momentum to their shards, and updates or params back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.collectives.axis import AxisNames, axis_index, axis_size, names
from fn.collectives.codecs.codec import identity
from fn.collectives.compressed import all_gather_shards, compressed_all_reduce, reduce_scatter_wide
from fn.collectives.feedback import classic, off
from fn.collectives.hierarchy import Codecs, Feedbacks, hops, initial_errors
from fn.collectives.messages import fill_rows, swap_rows
from fn.errors import expected
from fn.transforms.flat_layout import LAYOUTS, Bucket, buckets, join, rows_of
from fn.transforms.shards import row, wide

Tree = Any


class Rules(NamedTuple):
    """How messages travel. codec, feedback: to the shards. gather, gather_feedback: back; None is exactly.

    momentum: its decay, where momentum is exchanged in place of gradients. master: whether params travel back, of
    which the shard is kept in float32; None: where they are in half precision. layout: as for `compressed_average`.
    """

    axis: AxisNames
    codec: Codecs
    feedback: Feedbacks
    gather: Codecs | None
    gather_feedback: Feedbacks
    momentum: float | None
    master: bool | None
    layout: str

    def arrange(self, leaves: list[Tensor], world: int | None = None) -> list[Bucket]:
        """Return the vectors that the leaves make, on so many ranks; None: on those of the axis."""
        back = hops(self.axis, self.gather or identity(), self.gather_feedback)
        halves = [*hops(self.axis, self.codec, self.feedback), *back]
        world = axis_size(self.axis) if world is None else world
        return buckets(leaves, world, math.lcm(*(hop.codec.align for hop in halves)), self.layout)

    def keeps_master(self, dtype: torch.dtype) -> bool:
        """Return whether the shard of params of this dtype is kept in float32."""
        return wide(dtype) != dtype if self.master is None else self.master


def rules_of(
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    *,
    gather: Codecs | None = None,
    gather_feedback: Feedbacks | None = None,
    master: bool | None = None,
    layout: str = "flat",
    momentum: float | None = None,
) -> Rules:
    """Return the rules that the arguments of `sharded` make. Raises: ValueError as it does."""
    if layout not in LAYOUTS:
        raise ValueError(expected("layout", f"one of {LAYOUTS}", f"{layout!r}"))
    if momentum is not None and not 0.0 <= momentum < 1.0:
        raise ValueError(expected("momentum", "None or a number in [0, 1)", f"{momentum}"))
    if momentum is not None and gather_feedback is not None:
        raise ValueError("gather_feedback: is given together with momentum; send params then, with master=True")
    codec, feedback = (identity(), feedback or off()) if codec is None else (codec, feedback or classic())
    rules = Rules(axis, codec, feedback, gather, gather_feedback or off(), momentum, master, layout)
    hops(axis, codec, feedback)
    hops(axis, gather or identity(), rules.gather_feedback, ("gather", "gather_feedback"))
    return rules


class Kept(NamedTuple):
    """What a vector's exchanges keep from step to step: errors, and the momentum (n,) or ()."""

    worker: Tree
    server: Tree
    momentum: Tree


def start(x: Tensor, bucket: Bucket, rules: Rules) -> Kept:
    """Return what is kept at the start, for vectors like x (n,)."""
    at, wider = bucket.segments, x.to(wide(x.dtype))
    if rules.momentum is not None:
        worker, server = initial_errors(wider, rules.axis, rules.codec, rules.feedback, segments=at)
        return Kept(worker, server, torch.zeros_like(wider))
    worker, _ = initial_errors(x, rules.axis, rules.codec, rules.feedback, segments=at)
    back = identity() if rules.gather is None else rules.gather
    _, server = initial_errors(wider, rules.axis, back, rules.gather_feedback, segments=at)
    return Kept(worker, server, ())


def reduce(x: Tensor, kept: Kept, bucket: Bucket, rules: Rules, codes: bool) -> tuple[Tensor, Kept]:
    """Return this rank's shard of the mean gradient, in float32 or wider, and what is kept.

    Args: x: the joined gradients (n,). codes: whether they travel in codes, or exactly.
    """
    if rules.momentum is not None:
        return _reduce_momentum(x, kept, bucket, rules, codes)
    if not codes:
        return _exact_shard(x, bucket, rules), kept
    shard, worker = reduce_scatter_wide(
        x, kept.worker, rules.axis, rules.codec, rules.feedback, segments=bucket.segments
    )
    return shard, kept._replace(worker=worker)


def reduce_to_rows(
    leaves: Sequence[Tensor], kept: Kept, bucket: Bucket, rules: Rules, codes: bool
) -> tuple[Sequence[Tensor], Kept]:
    """Return vectors (n / W,) whose mean is what `reduce` returns, and what is kept. On the host, never traced.

    Args: leaves: gradients, not joined yet. The rest as for `reduce`.
    """
    narrow = leaves[bucket.leaf_indices[0]].element_size() < 4
    if codes or narrow or rules.momentum is not None or not isinstance(rules.axis, str):
        shard, kept = reduce(join(leaves, bucket), kept, bucket, rules, codes)
        return [shard], kept
    return swap_rows(rows_of(leaves, bucket), rules.axis), kept


def _reduce_momentum(x: Tensor, kept: Kept, bucket: Bucket, rules: Rules, codes: bool) -> tuple[Tensor, Kept]:
    """Average the momentum, and return the shard of that gradient which leads from the last mean to this one.

    A moving average of the inner with the same decay then is the momentum that all ranks agreed on.
    """
    b1, ranks, index = float(rules.momentum or 0.0), bucket.segments.valid.shape[0], axis_index(rules.axis)
    before = row(kept.momentum, index, ranks)
    if codes:
        mine, errors = torch.lerp(x.to(kept.momentum.dtype), kept.momentum, b1), (kept.worker, kept.server)
        mean, errors = compressed_all_reduce(
            mine, errors, rules.axis, rules.codec, rules.feedback, segments=bucket.segments
        )
        return before + (row(mean, index, ranks) - before) / (1.0 - b1), Kept(*errors, mean)
    shard = _exact_shard(x, bucket, rules)
    mean = _exactly_back(torch.lerp(shard, before, b1), shard.dtype, bucket, rules)
    return shard, kept._replace(momentum=mean)


def back(
    value: Tensor, dtype: torch.dtype, kept: Kept, bucket: Bucket, rules: Rules, codes: bool
) -> tuple[Tensor, Kept]:
    """Return the whole vector (n,) of which each rank has the shard `value`, and what is kept.

    Args: dtype: in which it travels where it does not travel in codes.
    """
    if not codes or rules.gather is None:
        return _exactly_back(value, dtype, bucket, rules), kept
    server = () if rules.momentum is not None else kept.server  # which belongs to the momentum then
    rule = (rules.axis, rules.gather, rules.gather_feedback)
    whole, server = all_gather_shards(value, server, *rule, segments=bucket.segments)
    return whole, kept if rules.momentum is not None else kept._replace(server=server)


def back_from_rows(
    value: Tensor, whole: Tensor, kept: Kept, bucket: Bucket, rules: Rules, codes: bool
) -> tuple[Tensor, Kept]:
    """Do what `back` does where it can be done in memory that is there. On the host, never traced.

    Args: value: this rank's shard, which may be its row of `whole`. whole: (W, n / W), in the dtype that travels.
    """
    if (codes and rules.gather is not None) or not isinstance(rules.axis, str):
        return back(value, whole.dtype, kept, bucket, rules, codes)
    mine = whole[int(axis_index(rules.axis))]
    if mine.data_ptr() != value.data_ptr():
        mine.copy_(value)
    fill_rows(whole, rules.axis)
    return whole.view(-1), kept


def _exact_shard(x: Tensor, bucket: Bucket, rules: Rules) -> Tensor:
    return reduce_scatter_wide(x, (), rules.axis, identity(), off(), segments=bucket.segments)[0]


def _exactly_back(value: Tensor, dtype: torch.dtype, bucket: Bucket, rules: Rules) -> Tensor:
    codecs = (identity(dtype),) * len(names(rules.axis))
    return all_gather_shards(value, (), rules.axis, codecs, off(), segments=bucket.segments)[0]
