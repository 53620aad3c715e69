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

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import (
    Facts,
    Phase,
    Step,
    Transform,
    UpdateFn,
    check_is_transform,
    check_params,
    check_state,
    facts_of,
    has_phase,
    merged,
    missing,
)
from fn.collectives.agreement import check_agreement, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames, axis_index, axis_size, names
from fn.collectives.codecs.codec import identity
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.hierarchy import Codecs, Feedbacks, hops
from fn.errors import expected
from fn.kernels.tracing import is_concrete
from fn.roles import Roles
from fn.transforms import exchange
from fn.transforms import flat_layout as layouts
from fn.transforms.exchange import Kept, Rules, rules_of
from fn.transforms.resharding import Reshape, errors_reshape, in_parts, reshapes, shards_reshape, vectors_reshape
from fn.transforms.shards import Division, divisions, followed, shown, take, wide

Tree = Any


class ShardedState(NamedTuple):
    """What one rank keeps of a sharded optimizer.

    inner: the inner state, of this rank's shard. master: for each vector the params' shard in float32, or () where
    the params themselves are that precise. errors: worker errors of the reduce-scatter and server errors of the
    all-gather, for each vector. place: which shard this is and of how many, (2,) int64. momentum: for each vector the
    momentum that all ranks agreed on, or () where gradients are exchanged.
    """

    inner: Tree
    master: tuple[Tree, ...]
    errors: ErrorFeedbackState
    place: Tensor
    momentum: tuple[Tree, ...]

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that belong to one rank."""
        return frozenset({"inner", "master", "place"})

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        return Roles(copies=("master",), shard=("place",), others=("inner",))


class Sharded(NamedTuple):
    """The rule of `sharded` in a phase. inner: the update of the shard. codes: whether messages are codes."""

    rules: Rules
    inner: UpdateFn
    codes: bool


def _check_inner(inner: Any, axis: AxisNames) -> None:
    """Refuse an inner that would be another optimizer on shards than on whole tensors.

    So is one that communicates over a sharded axis: it would average different shards with each other. And one with
    rounds, or params of each rank's own, whose new params would be taken for updates.
    """
    check_is_transform("inner", inner)
    facts = facts_of(inner)
    if inner.rounds is not None:
        raise ValueError(expected("inner", "a transform with phases only", "one with rounds, such as fn.outer"))
    if shared := [name for name in names(axis) if name in facts.axes]:
        wanted = f"no communication over the axis {shared[0]!r}, on which every rank has another shard"
        cure = "make it without an axis, such as fn.adamw(lr); fn.sharded averages the gradients"
        raise ValueError(expected("inner", wanted, "a link that does", cure))
    if facts.local_params:
        raise ValueError(expected("inner", "params that are the same on all ranks", "each rank's own"))
    if facts.whole:
        got = f"{', '.join(facts.whole)}, which would see this rank's shard only"
        cure = "to clip, use fn.Optimizer(max_norm=...) or a link in front of fn.sharded; give mask and partition a "
        cure += "tree; a link of your own that is element-wise says so, fn.lift(..., elementwise=True)"
        raise ValueError(expected("inner", "element-wise links", got, cure))


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
    momentum: float | None = None,
) -> Transform:
    """Run `inner` on shards: ZeRO stages 1 and 2, the optimizer's state and the reduced gradients divided by W.

        shard = mean_r C(g_r + e_r)[piece of this rank]        u = inner(shard)        updates = all-gather(u)

    The warm-up averages and gathers exactly, and so does every phase on one rank. Exactly means in the params' dtype
    on the wire, with sums in float32.

    Args:
        inner: what updates the shard. It must not communicate over `axis`, on which every rank has another shard, and
            must be element-wise: it sees pieces of tensors, so that norms of tensors are not what they seem. Over
            another axis, whose ranks have the same shard, it may: with `fn.adamw(lr, axis="node")`, sharded over
            "local", every node keeps the whole state. Without a compressed phase of its own it is in its warm-up
            throughout, so that `fn.adamw(lr)` can be an inner.
        axis: the ranks among which the shards are divided; several names, such as ("local", "node"), make it
            hierarchical, and codec, feedback, gather and gather_feedback may then be tuples: see
            `fn.collectives.hierarchy.hops`.
        codec: how gradients travel in the compressed phase; None is `identity()`.
        feedback: what becomes of what was not delivered; None is `classic()`, and `off()` where codec is None.
        gather: how updates or params travel back; None is exactly, in the params' dtype. `int8()` with `master=True`
            is ZeRO++'s qwZ.
        gather_feedback: what becomes of what the all-gather did not deliver; None is `off()`, which is right for
            params, because the master copy does not lose anything.
        master: keep this rank's shard of the params in float32 in the state, and gather params. False gathers
            updates. None: where the params are in half precision. What is written into params between steps, by a
            model's `load_state_dict` for one, is followed, unless `gather` leaves them other numbers than the master's.
        layout: as for `compressed_average`. With "flat" and "fused" the inner sees a list of vectors, one per (dtype,
            device); with "per_tensor" a tree like the params, of pieces, so that masks and partitions by name work. All
            pieces are vectors: a mask by `ndim` is made from the params outside, as a tree of bools.
        momentum: exchange momentum in place of gradients, with this decay, which must be the inner's: what is
            reduced is b1 mu + (1 - b1) g_r, in codes there and back, so that every rank can add its next gradient to
            the mean. The inner is handed the gradient that leads its own momentum there. With a second moment that
            rests after the warm-up this is 1-bit Adam; see `sharded_onebit_adam`.
    Returns: a transform with a warm-up and a compressed phase and a `ShardedState`.
    Raises: ValueError if the layout or the momentum is not one, if inner communicates over `axis`, holds a link that
        needs whole tensors (see `fn.Facts`) or lets each rank go to params of its own, or if gather_feedback is given
        together with momentum, whose second half has the server errors; from init, if the ranks disagree; from the
        update, if the state belongs to other params or another number of ranks.

    Paper: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5; Wang et al., ZeRO++ (arXiv 2306.10209), sections
        4.1 and 4.3, for codes in both halves.
    Differs: params stay whole on every rank, so this is not stage 3; `fn.adapters.fsdp` is for that. Where a state of
        inner is not finite or a guard inside of it skips, the shard's updates are NaN, for all ranks to see and skip.
    """
    _check_inner(inner, axis)
    rules = rules_of(
        axis, codec, feedback, gather=gather, gather_feedback=gather_feedback, master=master, layout=layout,
        momentum=momentum,
    )  # fmt: skip

    def as_inner(structure: Any, shards: list[Tensor]) -> Tree:
        return tree.unflatten(structure, shards) if layout == "per_tensor" else shards

    def init(params: Tree) -> ShardedState:
        tree.check_real(params, "params")
        check_agreement(axis, {**describe((rules, inner)), **describe_leaves(params)}, device_of(params))
        leaves, structure = tree.flatten(tree.map(Tensor.detach, params))
        index, owned, masters, kept = axis_index(axis), [], [], []
        plan = rules.arrange(leaves)
        divisions.say(Division(plan, index))
        for bucket in plan:
            like = leaves[bucket.leaf_indices[0]]
            owned.append(take(leaves, bucket, index).to(wide(like.dtype), copy=True))
            masters.append(owned[-1].clone() if rules.keeps_master(like.dtype) else ())
            x = like.new_zeros(bucket.segments.valid.shape[0] * bucket.segments.row_length)
            kept.append(exchange.start(x, bucket, rules))
        place = torch.stack([index, torch.tensor(axis_size(axis), dtype=torch.int64, device="cpu")])
        state = _state(inner.init(as_inner(structure, owned)), masters, kept, place)
        if isinstance(axis, str):
            paths = tree.paths(params) if layout == "per_tensor" else None
            reshapes.say((state, _moves(state, leaves, paths, rules)))
        return state

    def step(phase: Phase) -> UpdateFn:
        own = phase if has_phase(inner, phase) else Phase.WARMUP
        move: UpdateFn = getattr(inner, f"{own.value}_update")

        def update(updates: Tree, state: ShardedState, params: Tree, /) -> tuple[Tree, ShardedState]:
            check_state(state, ShardedState)
            check_params(params)
            codes = phase is Phase.COMPRESSED and axis_size(axis) > 1
            leaves, structure = tree.flatten(params)
            plan, index = rules.arrange(leaves), axis_index(axis)
            check_shards(state, plan, index)
            tree.check_updates(updates, params)
            given = tree.leaves(tree.in_order(updates, params, "updates"))
            shards, kept, owned = [], [], []
            for bucket, before, precise in zip(plan, kept_of(state), state.master, strict=True):
                shard, after = exchange.reduce(layouts.join(given, bucket), before, bucket, rules, codes)
                shards.append(shard)
                kept.append(after)
                if isinstance(precise, Tensor) and rules.gather is None:
                    precise = followed(precise, leaves, bucket, index)
                owned.append(precise if isinstance(precise, Tensor) else take(leaves, bucket, index).to(shard.dtype))
            moves, inside = move(as_inner(structure, shards), state.inner, as_inner(structure, owned))
            moves, inside = shown(moves, state.inner, inside)
            found: dict[int, Tensor] = {}
            masters: list[Tree] = []
            for i, (bucket, moved, precise) in enumerate(zip(plan, tree.leaves(moves), owned, strict=True)):
                sends_params = isinstance(state.master[i], Tensor)
                value = precise + moved if sends_params else moved
                dtype = leaves[bucket.leaf_indices[0]].dtype if sends_params else moved.dtype
                whole, kept[i] = exchange.back(value, dtype, kept[i], bucket, rules, codes)
                parts = zip(bucket.leaf_indices, layouts.split(whole, bucket), strict=True)
                found.update((k, part - leaves[k] if sends_params else part) for k, part in parts)
                masters.append(value if sends_params else ())
            return layouts.restore(structure, found), _state(inside, masters, kept, state.place)

        return Step(Sharded(rules, move, phase is Phase.COMPRESSED), update)

    local = missing(Phase.LOCAL, "a sharded optimizer")
    facts = merged(facts_of(inner), Facts(names(axis)))
    return Transform(init, step(Phase.WARMUP), step(Phase.COMPRESSED), local, inner.needs_warmup, facts=facts)


def _state(inner: Tree, masters: list[Tree], kept: list[Kept], place: Tensor) -> ShardedState:
    errors = ErrorFeedbackState(tuple(k.worker for k in kept), tuple(k.server for k in kept))
    return ShardedState(inner, tuple(masters), errors, place, tuple(k.momentum for k in kept))


def _moves(state: ShardedState, leaves: list[Tensor], paths: list[str] | None, rules: Rules) -> Reshape:
    """Return how a state moves to another number of ranks. paths: of the leaves where the inner sees a tree of them."""
    axis, plan = str(rules.axis), partial(rules.arrange, leaves)
    numbers = [str(b) for b in range(len(state.master))]
    (to,) = hops(axis, rules.codec, rules.feedback)
    back = to
    if rules.momentum is None:
        (back,) = hops(axis, rules.gather or identity(), rules.gather_feedback)
    errors = errors_reshape(leaves, axis, plan, to, back)
    parts: list[tuple[Any, Reshape]] = [
        (lambda s: s.inner, shards_reshape(axis, plan, paths or numbers)),
        (lambda s: s.master, shards_reshape(axis, plan, numbers)),
        (lambda s: s.errors, errors),
        (lambda s: s.momentum, vectors_reshape(axis, plan)),
    ]
    return in_parts(parts, lambda fresh, found: ShardedState(found[0], found[1], found[2], fresh.place, found[3]))


def kept_of(state: ShardedState) -> list[Kept]:
    """Return what the exchanges of each vector keep."""
    return [Kept(*each) for each in zip(state.errors.worker, state.errors.server, state.momentum, strict=True)]


def check_shards(state: ShardedState, plan: list[layouts.Bucket], index: Tensor) -> None:
    """Refuse a state of other params, of another number of ranks or of another rank's shard with a ValueError."""
    lengths = [bucket.segments.row_length for bucket in plan]
    found = [m.shape[0] if isinstance(m, Tensor) else n for m, n in zip(state.master, lengths, strict=False)]
    if len(state.master) != len(plan) or found != lengths:
        raise ValueError(
            f"state: has master shards of {found} elements in {len(state.master)} vectors, but the params give "
            f"{lengths}; a state belongs to the world size and the params that it was made for"
        )
    if plan and is_concrete(state.place, index) and state.place.device.type == "cpu":
        here = [int(index), plan[0].segments.valid.shape[0]]
        if state.place.tolist() != here:
            shard, ranks = state.place.tolist()
            raise ValueError(
                f"state: is of shard {shard} of {ranks}, but this rank has shard {here[0]} of {here[1]}; a state "
                f"belongs to the ranks and the order of axes that it was made for"
            )
