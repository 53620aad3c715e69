"""ZeRO as a combinator: each rank updates a shard, and the shards are gathered.

    gradients (n,) on each rank
      | reduce-scatter by a codec with feedback       -> shard of the mean (n / W,), float32
      | inner's update of this shard and its state    -> shard of the updates
      | all-gather of the updates, or of the params   -> (n,), the same on every rank

Inner links do not know: they see this rank's shard of gradients and params, as vectors.

    >>> import torch, fn
    >>> inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(1e-3))
    >>> tx = fn.sharded(inner, "data", fn.int4(), fn.damped())
    >>> state = tx.init({"w": torch.ones(6)})
    >>> [mu.shape for mu in state.inner[0].mu]                     # one rank, so the shard is all
    [torch.Size([6])]
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Phase, Transform, UpdateFn, has_phase, missing
from fn.collectives.agreement import check_agreement, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames, axis_index, axis_size, names
from fn.collectives.codec import identity
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.feedback import classic, off
from fn.collectives.hierarchy import Codecs, Feedbacks, all_gather_shards, hops, initial_errors, reduce_scatter_wide
from fn.transforms import layout as layouts
from fn.transforms.shards import shown, take, wide

Tree = Any


class ShardedState(NamedTuple):
    """What one rank keeps of a sharded optimizer.

    inner: the inner state, of this rank's shard. master: for each vector the params' shard in float32, or () where
    the params themselves are that precise. errors: worker errors of the reduce-scatter and server errors of the
    all-gather, for each vector. place: which shard this is and of how many, (2,) int64.
    """

    inner: Tree
    master: tuple[Tree, ...]
    errors: ErrorFeedbackState
    place: Tensor

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that belong to one rank."""
        return frozenset({"inner", "master", "place"})


def sharded(
    inner: Transform,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    *,
    gather: Codecs | None = None,
    gather_feedback: Feedbacks | None = None,
    master: bool | None = None,
    layout: str = "flat",
) -> Transform:
    """Run `inner` on shards: ZeRO stages 1 and 2, the optimizer's state and the reduced gradients divided by W.

        shard = mean_r C(g_r + e_r)[piece of this rank]        u = inner(shard)        updates = all-gather(u)

    The warm-up averages and gathers exactly, and so does every phase on one rank. Exactly means in the params' dtype
    on the wire, with sums in float32.

    Args:
        inner: what updates the shard. It must not communicate, and must be element-wise: it sees pieces of tensors,
            so that norms of tensors are not what they seem. Without a compressed phase of its own it is in its
            warm-up throughout, so that `fn.adamw(lr)` can be an inner.
        axis: the ranks among which the shards are divided; several names, such as ("local", "node"), make it
            hierarchical, and codec, feedback, gather and gather_feedback may then be tuples: see `hierarchy.hops`.
        codec: how gradients travel in the compressed phase; None is `identity()`.
        feedback: what becomes of what was not delivered; None is `classic()`, and `off()` where codec is None.
        gather: how updates or params travel back; None is exactly, in the params' dtype. `int8()` with `master=True`
            is ZeRO++'s qwZ.
        gather_feedback: what becomes of what the all-gather did not deliver; None is `off()`, which is right for
            params, because the master copy does not lose anything.
        master: keep this rank's shard of the params in float32 in the state, and gather params. False gathers
            updates. None: where the params are in half precision.
        layout: as for `compressed_average`. With "flat" and "fused" the inner sees a list of vectors, one per (dtype,
            device); with "per_tensor" a tree like the params, of pieces, so that masks and partitions by name work.
    Returns: a transform with a warm-up and a compressed phase and a `ShardedState`.
    Raises: ValueError if the layout is unknown; from init, if the ranks disagree; from the update, if the state
        belongs to other params or another number of ranks.

    Paper: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5; Wang et al., ZeRO++ (arXiv 2306.10209), sections
        4.1 and 4.3, for codes in both halves.
    Differs: params stay whole on every rank, so this is not stage 3; `fn.adapters.fsdp` is for that. Where a state of
        inner is not finite or a guard inside of it skips, the shard's updates are NaN, for all ranks to see and skip.
    """
    exact = identity()
    reduce_rule = (off() if codec is None else classic()) if feedback is None else feedback
    gather_rule = off() if gather_feedback is None else gather_feedback
    reduce_codec = exact if codec is None else codec
    plan = [*hops(axis, reduce_codec, reduce_rule), *hops(axis, exact if gather is None else gather, gather_rule)]
    align = math.lcm(*(hop.codec.align for hop in plan))
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout: is {layout!r}; allowed are {layouts.LAYOUTS}")

    def arrange(leaves: list[Tensor]) -> list[layouts.Bucket]:
        return layouts.buckets(leaves, axis_size(axis), align, layout)

    def keeps_master(dtype: torch.dtype) -> bool:
        return wide(dtype) != dtype if master is None else master

    def exactly(dtype: torch.dtype) -> Codecs:
        return (identity(dtype if keeps_master(dtype) else wide(dtype)),) * len(names(axis))

    def as_inner(structure: Any, shards: list[Tensor]) -> Tree:
        return tree.unflatten(structure, shards) if layout == "per_tensor" else shards

    def init(params: Tree) -> ShardedState:
        tree.check_real(params, "params")
        fields = describe((reduce_codec, reduce_rule, gather, gather_rule, inner))
        fields |= {**describe_leaves(params), "layout": layout, "master": str(master)}
        check_agreement(axis, fields, device_of(params))
        leaves, structure = tree.flatten(tree.map(Tensor.detach, params))
        index, owned, masters, worker, server = axis_index(axis), [], [], [], []
        for bucket in arrange(leaves):
            like = leaves[bucket.places[0]]
            owned.append(take(leaves, bucket, index).to(wide(like.dtype), copy=True))
            masters.append(owned[-1].clone() if keeps_master(like.dtype) else ())
            x = like.new_zeros(bucket.segments.valid.shape[0] * bucket.segments.row_length)
            half = (axis, reduce_codec, reduce_rule)
            worker.append(initial_errors(x, *half, segments=bucket.segments)[0])
            back = (axis, gather or exact, gather_rule)
            server.append(initial_errors(x.to(wide(x.dtype)), *back, segments=bucket.segments)[1])
        errors = ErrorFeedbackState(tuple(worker), tuple(server))
        place = torch.stack([index, torch.tensor(axis_size(axis))])
        return ShardedState(inner.init(as_inner(structure, owned)), tuple(masters), errors, place)

    def reduce(leaves: list[Tensor], plan: list[layouts.Bucket], errors: tuple[Tree, ...], codes: bool) -> Any:
        shards, after = [], []
        for bucket, error in zip(plan, errors, strict=True):
            x, at = layouts.join(leaves, bucket), bucket.segments
            if codes:
                shard, error = reduce_scatter_wide(x, error, axis, reduce_codec, reduce_rule, segments=at)
            else:
                shard, _ = reduce_scatter_wide(x, (), axis, exact, off(), segments=at)
            shards.append(shard)
            after.append(error)
        return shards, tuple(after)

    def bring(value: Tensor, error: Tree, bucket: layouts.Bucket, dtype: torch.dtype, codes: bool) -> Any:
        if codes and gather is not None:
            return all_gather_shards(value, error, axis, gather, gather_rule, segments=bucket.segments)
        return all_gather_shards(value, (), axis, exactly(dtype), off(), segments=bucket.segments)[0], error

    def step(phase: Phase) -> UpdateFn:
        own = phase if has_phase(inner, phase) else Phase.WARMUP
        move: UpdateFn = getattr(inner, f"{own.value}_update")

        def update(updates: Tree, state: ShardedState, params: Tree, /) -> tuple[Tree, ShardedState]:
            tree.check_real(updates, "updates")
            codes = phase is Phase.COMPRESSED and axis_size(axis) > 1
            given, (leaves, structure) = tree.leaves(updates), tree.flatten(params)
            plan, index = arrange(leaves), axis_index(axis)
            _check(state, plan)
            shards, worker = reduce(given, plan, state.errors.worker, codes)
            owned = [
                take(leaves, bucket, index).to(shard.dtype) if isinstance(kept, tuple) else kept
                for bucket, shard, kept in zip(plan, shards, state.master, strict=True)
            ]
            moves, after = move(as_inner(structure, shards), state.inner, as_inner(structure, owned))
            moves, after = shown(moves, state.inner, after)
            found: dict[int, Tensor] = {}
            masters, server = [], []
            each = zip(plan, owned, tree.leaves(moves), state.master, state.errors.server, strict=True)
            for bucket, old, moved, kept, error in each:
                keep = isinstance(kept, Tensor)
                value = old + moved if keep else moved
                full, error = bring(value, error, bucket, leaves[bucket.places[0]].dtype, codes)
                parts = zip(bucket.places, layouts.part(full, bucket), strict=True)
                found.update((i, part - leaves[i] if keep else part) for i, part in parts)
                masters.append(value if keep else ())
                server.append(error)
            errors = ErrorFeedbackState(worker, tuple(server))
            return layouts.restore(structure, found), ShardedState(after, tuple(masters), errors, state.place)

        return update

    return Transform(init, step(Phase.WARMUP), step(Phase.COMPRESSED), missing(Phase.LOCAL, "a sharded optimizer"))


def _check(state: ShardedState, plan: list[layouts.Bucket]) -> None:
    lengths = [bucket.segments.row_length for bucket in plan]
    found = [m.shape[0] if isinstance(m, Tensor) else n for m, n in zip(state.master, lengths, strict=False)]
    if len(state.master) != len(plan) or found != lengths:
        raise ValueError(
            f"state: has master shards of {found} elements in {len(state.master)} vectors, but the params give "
            f"{lengths}; a state belongs to the world size and the params that it was made for"
        )
