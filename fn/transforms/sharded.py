"""ZeRO as a combinator: each rank updates its shard of the params, and the updated shards are gathered.

    gradients (n,) on each rank
      | reduce-scatter by a codec with feedback       -> shard of the mean (n / W,), float32
      | inner's update of this shard and its state    -> shard of the updates
      | all-gather of the updates, or of new params   -> (n,), the same on every rank

The inner links need not know of it: they see this rank's shard of gradients and params, as vectors.

    >>> import torch, fn
    >>> inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(1e-3))
    >>> tx = fn.sharded(inner, "data", fn.int4(), fn.damped())
    >>> state = tx.init({"w": torch.ones(6)})
    >>> [mu.shape for mu in state.inner[0].mu]                     # one rank, so the shard is all
    [torch.Size([6])]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fn import roles, tree
from fn.arguments import check_flag, check_interval, check_is_transform
from fn.base import (
    NewParams,
    Phase,
    Transform,
    UpdateFn,
    apply_updates,
    as_updates,
    check_params,
    check_state,
    declare_rule,
    facts_of,
    has_phase,
    missing,
    update_in,
)
from fn.collectives.agreement import check_agreement, check_order, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames, axis_index, axis_size, names
from fn.collectives.codecs.codec import identity
from fn.collectives.compressed import ErrorFeedbackState, all_gather_shards, compressed_all_reduce, reduce_scatter_wide
from fn.collectives.feedback import classic, off
from fn.collectives.hierarchy import Codecs, Feedbacks, Hop, hops, initial_errors
from fn.collectives.messages import fill_rows, swap_rows
from fn.collectives.primitives import all_gather, psum
from fn.collectives.simulation import replicated_if_equal
from fn.errors import expected
from fn.facts import Facts, merged
from fn.kernels import flags, memory_pool, rules
from fn.kernels.tracing import is_concrete, is_recorded
from fn.roles import declare
from fn.transforms import flat_layout as layouts
from fn.transforms.adam import are_on_host, common, share, start_rested
from fn.transforms.flat_layout import Bucket, end_to_end, join, split
from fn.transforms.leafwise import apply
from fn.transforms.resharding import Notes, Reshape, bucket_of, errors_reshape, in_parts, reshapes, shards_reshape
from fn.transforms.residuals import Residuals, residuals

Tree = Any


@declare(rank_local=("inner", "master", "place"), copies=("master",), place=("place",), rested=("rested",))
class ShardedState(NamedTuple):
    """What one rank keeps of a sharded optimizer. Tuples have an entry for each vector that travels, see `flat_layout`.

    inner: the inner state, of this rank's shard.
    master: the params' shard in float32, or () where the params themselves are that precise.
    errors: residual errors, of the reduce-scatter (worker) and of the all-gather (server).
    place: the number of this rank's shard and the number of shards, (2,) int64.
    momentum: the momentum that all ranks agreed on, or () where gradients are exchanged.
    rested: how many of the updates that inner's ages count each tensor sat out, a tree like the params of 0-d int64; ()
        where none did, and where inner has no ages.
    """

    inner: Tree
    master: tuple[Tree, ...]
    errors: ErrorFeedbackState
    place: Tensor
    momentum: tuple[Tree, ...]
    rested: Tree = ()


@declare_rule(now=True)  # its master params
class Sharded(NamedTuple):
    """The rule of `sharded` in a phase. inner: the update of the shard. codes: whether messages are codes."""

    rules: Rules
    inner: UpdateFn
    codes: bool
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates of all shards, and the next state."""
        return self.run(updates, state, params)


class Rules(NamedTuple):
    """How messages of `sharded` travel; its arguments, with defaults filled in.

    codec, feedback: of the gradients, to the shards. gather, gather_feedback: of updates or params, back; None is full
    precision. momentum: its decay, of this step, where momentum is exchanged in place of gradients; (W, n / W) where
    that of its elements differs. master: whether params travel back, of which the shard is kept in float32; None: where
    they are in half precision. layout: as for `compressed_average`.
    """

    axis: AxisNames
    codec: Codecs
    feedback: Feedbacks
    gather: Codecs | None
    gather_feedback: Feedbacks
    momentum: float | Tensor | None
    master: bool | None
    layout: str

    def arrange(self, leaves: list[Tensor], world: int | None = None) -> list[Bucket]:
        """Return how leaves make vectors on `world` ranks; None: on those of the axis."""
        back = hops(self.axis, self.gather or identity(), self.gather_feedback)
        halves = [*hops(self.axis, self.codec, self.feedback), *back]
        world = axis_size(self.axis) if world is None else world
        # One layout serves both halves, so a row has to suit the codecs of both.
        return layouts.buckets(leaves, world, math.lcm(*(hop.codec.align for hop in halves)), self.layout)

    def ways(self) -> tuple[list[Hop], list[Hop]]:
        """Return how both halves of an exchange travel."""
        there = hops(self.axis, self.codec, self.feedback)
        if self.momentum is not None:  # which travels alike both ways
            return there, there
        return there, hops(self.axis, self.gather or identity(), self.gather_feedback)

    def keeps_master(self, dtype: torch.dtype) -> bool:
        """Return whether the shard of params of this dtype is kept in float32."""
        return wide(dtype) != dtype if self.master is None else self.master


class Kept(NamedTuple):
    """What a vector's exchanges keep from step to step: residual errors, and the momentum (n,) or ()."""

    worker: Tree
    server: Tree
    momentum: Tree


class Division(NamedTuple):
    """How an init divided params. state: which it made. leaves: the params. arrange: W -> the vectors that they make.

    paths: of the leaves, where inner sees a tree of them; else it sees a list of the vectors.
    """

    state: ShardedState
    leaves: list[Tensor]
    arrange: Callable[[list[Tensor], int], list[Bucket]]
    paths: list[str] | None

    def parts(self, state: ShardedState, leaves: list[Tensor]) -> Iterator[tuple[Tensor, int, Callable[..., Tensor]]]:
        """Yield (a vector of the state, the number of a leaf that has a part of it, what finds that part in it).

        Args: state: like the one that init made, of other leaves, on another number of ranks. Errors are left out.
        """
        row, ranks = state.place.tolist()
        plan = self.arrange(leaves, ranks)
        numbers = [str(b) for b in range(len(plan))]
        for suffixes, some in ((self.paths or numbers, state.inner), (numbers, (state.master, state.momentum))):
            for path, x in tree.by_path(some).items():
                if bucket := bucket_of(path, x, suffixes, plan):
                    for s, i in enumerate(bucket.leaf_indices):
                        yield x, i, partial(layouts.part, bucket=bucket, row=row, s=s)


divisions: Notes[Division] = Notes()
"""From each init of `sharded`."""


def check_parts(inner: Any, axes: Sequence[str], by: str) -> None:
    """Refuse an inner transform that would average the parts that ranks have with each other, or that has rounds.

    One with rounds returns new params, which would be taken for updates. Args: by: what divides the params.
    """
    check_is_transform("inner", inner)
    if inner.exchange is not None:
        cure = f"put fn.outer around the chain that holds {by}"
        raise ValueError(expected("inner", "a transform with phases only", "one with rounds, such as fn.outer", cure))
    facts = facts_of(inner)
    if shared := [name for name in axes if name in facts.axes + facts.shards]:
        wanted = f"no communication over the axis {shared[0]!r}, on which every rank has another part"
        cure = f"make it without an axis, such as fn.adamw(lr); {by} brings the ranks together"
        raise ValueError(expected("inner", wanted, "a link that does", cure))


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

    A tensor that an adapter leaves out of a step, see `fn.Optimizer`, keeps its part of all vectors, and has an age of
    its own from then on. Where inner corrects its moments, the age of a tensor begins with the first step in which its
    mean gradient is not zero throughout. A rank has a piece of the mean only, so all ask each other: in the second
    step, and then while there are tensors that never had a gradient. In a trace, and purely on a device, where nobody
    waits for the answer, they ask in each step.

    Args:
        inner: what updates the shard. It must not communicate over `axis`, on which every rank has another shard, and
            must be element-wise, because it sees pieces of tensors, whose norms are not those of the tensors. It may
            communicate over another axis, whose ranks have the same shard: with `fn.adamw(lr, axis="node")`, sharded
            over "local", every node keeps the whole state. One without a compressed phase, such as `fn.adamw(lr)`,
            takes its warm-up steps in every phase.
        axis: the ranks among which the shards are divided; several names, such as ("local", "node"), make it
            hierarchical, and codec, feedback, gather and gather_feedback may then be tuples: see
            `fn.collectives.hierarchy.hops`.
        codec: how gradients travel in the compressed phase; None is `identity()`.
        feedback: how errors of the gradients are kept; None is `classic()`, and `off()` where codec is None.
        gather: how updates or params travel back; None is exactly, in the params' dtype. `int8()` with `master=True`
            is ZeRO++'s qwZ.
        gather_feedback: how errors of what travels back are kept; None is `off()`, which is right for
            params, because the master copy loses nothing.
        master: keep this rank's shard of the params in float32 in the state, and gather params, which the update
            returns as `fn.base.NewParams`. False gathers updates. None: where the params are in half precision. If
            something writes into params between steps, such as a model's `load_state_dict`, the master follows; with
            `gather`, whose params in codes differ from the master anyway, only before the first step of an
            `fn.Optimizer`.
        layout: as for `compressed_average`. With "flat" and "fused" the inner sees a list of vectors, one per (dtype,
            device); with "per_tensor" a tree like the params, of pieces, so that masks and partitions by name work. All
            pieces are vectors: a mask by `ndim` is made from the params outside, as a tree of bools.
        momentum: exchange momentum in place of gradients, with this decay, which must be the inner's: what is
            reduced is b1 mu + (1 - b1) g_r, in codes there and back, so that every rank can add its next gradient to
            the mean. The inner is handed the gradient that leads its own momentum there. With a second moment that
            rests after the warm-up this is 1-bit Adam; see `sharded_onebit_adam`.
    Returns: a transform with a warm-up and a compressed phase and a `ShardedState`.
    Raises: ValueError if the layout or the momentum is not one, if inner communicates over `axis`, holds a link that
        needs whole tensors (see `fn.Facts`), or if gather_feedback is given together with momentum, whose second half
        has the server errors; from init, if inner lets each rank go to params of its own, or the ranks disagree; from
        the update, if the state belongs to other params or another number of ranks.

    Paper: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5; Wang et al., ZeRO++ (arXiv 2306.10209), sections
        4.1 and 4.3, for codes in both halves.
    Differs: params stay whole on every rank, so this is not stage 3; `fn.adapters.fsdp` is for that. Where a guard
        inside of inner skips, the shard's updates are NaN, for all ranks to see and skip.
    """
    check_parts(inner, names(axis), "fn.sharded")
    if whole := facts_of(inner).whole:
        got = f"{', '.join(whole)}, which would see this rank's shard only"
        cure = "to clip, use fn.Optimizer(max_norm=...) or a link in front of fn.sharded; give mask and partition a "
        cure += "tree; a link of your own that is element-wise says so, fn.lift(..., elementwise=True)"
        raise ValueError(expected("inner", "element-wise links", got, cure))
    layouts.check_layout(layout)
    if master is not None:
        check_flag("master", master)
    if momentum is not None:
        check_interval("momentum", momentum, "[0, 1)")
        if gather_feedback is not None:
            raise ValueError("gather_feedback: is given together with momentum; send params then, with master=True")
    feedback = (off() if codec is None else classic()) if feedback is None else feedback
    codec = identity() if codec is None else codec
    back = off() if gather_feedback is None else gather_feedback
    rules = Rules(axis, codec, feedback, gather, back, momentum, master, layout)
    hops(axis, codec, feedback)
    hops(axis, identity() if gather is None else gather, rules.gather_feedback, ("gather", "gather_feedback"))

    def as_inner(structure: Any, shards: list[Tensor]) -> Tree:
        return tree.unflatten(structure, shards) if layout == "per_tensor" else shards

    def init(params: Tree) -> ShardedState:
        tree.check_real(params, "params")
        # Before anything else is sent: ranks with other vectors would read each other's as their own.
        check_agreement(axis, {**describe((rules, inner)), **describe_leaves(params)}, device_of(params))
        check_order(facts_of(inner).axes, params)
        leaves, structure = tree.flatten(tree.map(Tensor.detach, params))
        index, owned, masters, kept = axis_index(axis), [], [], []
        plan = rules.arrange(leaves)  # leaves of a dtype and device make a vector (n,), padded to W rows (n / W,)
        for bucket in plan:
            like = leaves[bucket.leaf_indices[0]]
            # A copy: a state that keeps the shard would otherwise change with the params.
            owned.append(shard_of(leaves, bucket, index).to(wide(like.dtype), copy=True))  # (n / W,)
            masters.append(owned[-1].clone() if rules.keeps_master(like.dtype) else ())
            # (n,), W rows end to end
            x = like.new_zeros(bucket.segments.valid.shape[0] * bucket.segments.row_length)
            kept.append(start_exchange(x, bucket, rules))
        # () and () -> (2,), on the host, where it is compared without a wait
        place = torch.stack([index, torch.tensor(axis_size(axis), dtype=torch.int64, device="cpu")])
        inner_state = inner.init(as_inner(structure, owned))
        roles.check_same_params(inner_state)
        corrected = any(roles.find(inner_state, "ages"))
        state = _state(inner_state, masters, kept, place, start_rested(params, corrected))
        paths = tree.paths(params) if layout == "per_tensor" else None
        divisions.add(Division(state, leaves, rules.arrange, paths))
        residuals.add(Residuals(state.errors, leaves, rules.arrange, axis, *rules.ways()))
        if isinstance(axis, str):
            reshapes.add((state, _moves(state, leaves, paths, rules)))
        return state

    def step(phase: Phase) -> UpdateFn:
        inner_phase = phase if has_phase(inner, phase) else Phase.WARMUP
        move = update_in(inner, inner_phase)

        def update(updates: Tree, state: ShardedState, params: Tree, /) -> tuple[Tree, ShardedState]:
            check_state(state, ShardedState)
            check_params(params)
            codes = phase is Phase.COMPRESSED and axis_size(axis) > 1
            leaves, structure = tree.flatten(params)
            plan, index = rules.arrange(leaves), axis_index(axis)
            check_shards(state, plan, index)
            tree.check_updates(updates, params)
            if phase not in inner.needs_warmup:  # which would go on from second moments as they are
                suffixes = tree.paths(params) if layout == "per_tensor" else [str(b) for b in range(len(plan))]
                state = started(state, plan, suffixes, index, axis)
            grads = tree.leaves(tree.in_order(updates, params, "updates"))
            rests, ages = rests_of(state, plan), roles.find(state.inner, "ages")
            shards, kept, owned = [], [], []
            for bucket, before, saved, rest in zip(plan, kept_of(state), state.master, rests, strict=True):
                here = rules
                if momentum is not None and any(ages):  # what travels is corrected as the inner's momentum is
                    age = ages[0][0] + 1 if rest is None else ages[0][0] + 1 - rest
                    here = rules._replace(momentum=1 - share(momentum, age))
                shard, after = reduce_to_shard(join(grads, bucket), before, bucket, here, codes)  # (n,) -> (n / W,)
                shards.append(shard)
                kept.append(after)
                if not isinstance(saved, Tensor):
                    # (n / W,), in float32 for half precision, as gradients are: the weight decay is not rounded
                    owned.append(shard_of(leaves, bucket, index).to(shard.dtype))
                else:
                    # Params in codes differ from the master anyway, so there the difference says nothing of what was
                    # written.
                    owned.append(saved if rules.gather is not None else refreshed(saved, leaves, bucket, index))
            with flags.unassumed():  # this shard may be finite where another rank's is not
                pieces = as_inner(structure, owned)
                given = handed_down(state.inner, rests, index, pieces)
                moves, inside = move(as_inner(structure, shards), given, pieces)
                inside = taken_back(inside, given, state.inner, rests)
                # A NaN is gathered with the shard, so that the guard around this skips on all ranks.
                moves, inside = show_failures(as_updates(moves, pieces), state.inner, inside)
            moved_leaves: dict[int, Tensor] = {}
            new_params: dict[int, Tensor] = {}  # of vectors that have a master
            masters: list[Tree] = []
            for i, (bucket, moved, old) in enumerate(zip(plan, tree.leaves(moves), owned, strict=True)):
                sends_params = isinstance(state.master[i], Tensor)
                value = old + moved if sends_params else moved
                dtype = leaves[bucket.leaf_indices[0]].dtype if sends_params else moved.dtype
                whole, kept[i] = gather_back(value, dtype, kept[i], bucket, rules, codes)  # (n / W,) -> (n,)
                parts = zip(bucket.leaf_indices, split(whole, bucket), strict=True)
                (new_params if sends_params else moved_leaves).update(parts)
                masters.append(value if sends_params else ())
            made = _state(inside, masters, kept, state.place, state.rested)
            if not new_params:
                return layouts.restore(structure, moved_leaves), made
            # As they are: p + (p' - p) may miss p', which the next step would take for a write by hand, and the master
            # would lose its digits.
            new_params.update((k, *apply_updates([leaves[k]], [moved])) for k, moved in moved_leaves.items())
            return NewParams(layouts.restore(structure, new_params)), made

        return Sharded(rules, move, phase is Phase.COMPRESSED, update)

    local = missing(Phase.LOCAL, "a sharded optimizer")
    facts = merged(facts_of(inner), Facts(names(axis)))
    return Transform(init, step(Phase.WARMUP), step(Phase.COMPRESSED), local, inner.needs_warmup, facts=facts)


def _state(inner: Tree, masters: list[Tree], kept: list[Kept], place: Tensor, rested: Tree) -> ShardedState:
    errors = ErrorFeedbackState(tuple(k.worker for k in kept), tuple(k.server for k in kept))
    return ShardedState(inner, tuple(masters), errors, place, tuple(k.momentum for k in kept), rested)


def _moves(state: ShardedState, leaves: list[Tensor], paths: list[str] | None, rules: Rules) -> Reshape:
    """Return how a state moves to another number of ranks. paths: of the leaves where the inner sees a tree of them."""
    axis, plan = str(rules.axis), partial(rules.arrange, leaves)
    numbers = [str(b) for b in range(len(state.master))]
    (there,), (back,) = rules.ways()
    errors = errors_reshape(leaves, axis, plan, there, back)
    parts: list[tuple[Any, Reshape]] = [
        (lambda s: s.inner, shards_reshape(axis, plan, paths or numbers)),
        (lambda s: (s.master, s.momentum, s.rested), shards_reshape(axis, plan, numbers)),
        (lambda s: s.errors, errors),
    ]

    def join(fresh: ShardedState, moved: list[Tree]) -> ShardedState:
        inner, (master, momentum, rested), errors = moved
        # `place`: of the new ranks
        return fresh._replace(inner=inner, master=master, momentum=momentum, rested=rested, errors=errors)

    return in_parts(parts, join)


def started(
    state: ShardedState, plan: list[Bucket], suffixes: Sequence[str], index: Tensor, axis: AxisNames
) -> ShardedState:
    """Return the state before an update, in which tensors that never had a mean gradient have sat out all before it.

    Only tensors that had none before the latest update are asked. Args: suffixes: as for `bucket_of`.
    """
    counts, structure = tree.flatten(state.rested)
    nodes = [node for node in tree.named_tuples(state.inner) if roles.find(node, "ages")]
    for node in nodes:
        check_state(node, type(node))
    ages = [*filter(None, roles.find(nodes, "ages"))]
    if not counts or not ages:
        return state
    age = replicated_if_equal(ages[0][-1], axis)
    if are_on_host(age, *counts) and (int(age) == 0 or all(int(n) != int(age) - 1 for n in counts)):
        return state
    squares = []
    for path, x in tree.by_path(roles.find(nodes, "second_moment")).items():
        if bucket := bucket_of(path, x, suffixes, plan):
            squares.append((bucket, x))
    zero = zero_on_all(squares, [n == age - 1 for n in counts], index, axis)
    news = [n + rests.to(n.device) for n, rests in zip(counts, zero, strict=True)]
    return state._replace(rested=tree.unflatten(structure, news))


def zero_on_all(
    vectors: Sequence[tuple[Bucket, Tensor]], asked: Sequence[Tensor], index: Tensor, axis: AxisNames
) -> list[Tensor]:
    """Return of leaves that are asked whether all ranks' parts are zero, 0-d bool each; false of others.

    Ranks tell each other in one message, of four bytes a leaf. Args: vectors: this rank's rows, (n / W,). asked: 0-d
    bool for each leaf.
    """
    here: dict[int, Tensor] = {}
    for bucket, x in vectors:
        row = int(index) if is_concrete(index, x) else index
        moved = layouts.nonzero(x, bucket, row).unbind()
        # An empty tensor never has a gradient, and would have all ask each other for good.
        tensors = zip(bucket.leaf_indices, bucket.shapes, moved, strict=True)
        here.update((i, ~flag) for i, shape, flag in tensors if shape.numel())
    nowhere = torch.zeros((), dtype=torch.bool, device="cpu")
    # S of () -> (S,)
    flags = torch.stack([x & here.get(i, nowhere).to(x.device) for i, x in enumerate(asked)])
    return [*(psum(flags.int(), axis) == axis_size(axis)).unbind()]


def rests_of(state: ShardedState, plan: list[Bucket]) -> list[Tensor | None]:
    """Return how many updates the tensors of each vector sat out, 0-d, or (W, n / W) of its elements; None for none."""
    counts = tree.leaves(state.rested)
    alike = common(counts)
    if alike == 0:
        return [None] * len(plan)
    of_vectors = [[counts[i] for i in bucket.leaf_indices] for bucket in plan]
    return [
        some[0] if alike is not None or not bucket.segments.row_length else layouts.spread(some, bucket)
        for bucket, some in zip(plan, of_vectors, strict=True)
    ]


def handed_down(inner: Tree, rests: list[Tensor | None], index: Tensor, pieces: Tree) -> Tree:
    """Return the inner state with what the tensors of its vectors sat out.

    Args: rests: as `rests_of` returns them. index: of this rank's row. pieces: the vectors, as inner sees them.
    """
    if rests.count(None) == len(rests):
        return inner
    rows = [rest if rest is None or not rest.ndim else row_of(rest, index, rest.shape[0]) for rest in rests]
    of_paths = dict(zip(tree.paths(pieces), rows, strict=True))

    def counts(before: Tree) -> Tree:
        leaves, structure = tree.flatten(before)
        found = [of_paths.get(path) for path in tree.paths(before)]
        return tree.unflatten(structure, [x if r is None else x.maximum(r) for x, r in zip(leaves, found, strict=True)])

    return roles.replace(inner, "rested", counts)


def taken_back(after: Tree, given: Tree, before: Tree, rests: list[Tensor | None]) -> Tree:
    """Return the inner state after an update with its own counts, one for each vector, and what it added to them.

    Args: given: what `handed_down` made of the state before. rests: as for that.
    """
    if rests.count(None) == len(rests):
        return after
    counts = zip(*(roles.find(inner, "rested") for inner in (given, before)), strict=True)

    def own(new: Tree) -> Tree:
        return tree.map(lambda x, handed, old: old + (x - handed).amin(), new, *next(counts))

    return roles.replace(after, "rested", own)


def kept_of(state: ShardedState) -> list[Kept]:
    """Return what the exchanges of each vector keep."""
    return [Kept(*fields) for fields in zip(state.errors.worker, state.errors.server, state.momentum, strict=True)]


def check_shards(state: ShardedState, plan: list[Bucket], index: Tensor) -> None:
    """Refuse a state of other params, of another number of ranks or of another rank's shard with a ValueError."""
    lengths = [bucket.segments.row_length for bucket in plan]
    masters = [m.shape[0] if isinstance(m, Tensor) else n for m, n in zip(state.master, lengths, strict=False)]
    if len(state.master) != len(plan) or masters != lengths:
        raise ValueError(
            f"state: has master shards of {masters} elements in {len(state.master)} vectors, but the params give "
            f"{lengths}; a state belongs to the world size and the params that it was made for"
        )
    # A place on a device is not read: each step would wait for it.
    if plan and is_concrete(state.place, index) and state.place.device.type == "cpu":
        number, ranks = int(index), plan[0].segments.valid.shape[0]
        if state.place.tolist() != [number, ranks]:
            shard, of = state.place.tolist()
            raise ValueError(
                f"state: is of shard {shard} of {of}, but this rank has shard {number} of {ranks}; a state "
                f"belongs to the ranks and the order of axes that it was made for"
            )


def start_exchange(x: Tensor, bucket: Bucket, rules: Rules) -> Kept:
    """Return what a vector's exchanges keep at the start. x: zeros like the vector (n,)."""
    segments, wider = bucket.segments, x.to(wide(x.dtype))
    if rules.momentum is not None:
        # Momentum travels in codes both ways, so both errors are its own; what `gather` sends has none.
        worker, server = initial_errors(wider, rules.axis, rules.codec, rules.feedback, segments=segments)
        return Kept(worker, server, torch.zeros_like(wider))
    worker, _ = initial_errors(x, rules.axis, rules.codec, rules.feedback, segments=segments)
    # updates come from float32 shards, so their errors are as wide
    _, server = initial_errors(wider, rules.axis, rules.gather or identity(), rules.gather_feedback, segments=segments)
    return Kept(worker, server, ())


def reduce_to_shard(
    x: Tensor, kept: Kept, bucket: Bucket, rules: Rules, codes: bool, *, consume: bool = False
) -> tuple[Tensor, Kept]:
    """Return this rank's shard of the mean gradient, in float32 or wider, and what is kept.

    Args: x: the joined gradients (n,). codes: whether they travel in codes, or exactly. consume: x is not needed any
        more, and its memory may be used.
    """
    if rules.momentum is not None:
        return _reduce_momentum(x, kept, bucket, rules, codes, consume)
    if not codes:
        return _exact_shard(x, bucket, rules), kept
    shard, worker = reduce_scatter_wide(
        x, kept.worker, rules.axis, rules.codec, rules.feedback, segments=bucket.segments
    )
    return shard, kept._replace(worker=worker)


def reduce_to_rows(
    leaves: Sequence[Tensor], kept: Kept, bucket: Bucket, rules: Rules, codes: bool
) -> tuple[Sequence[Tensor], Kept]:
    """Return vectors (n / W,) whose mean is the shard of `reduce_to_shard`, and what is kept.

    A kernel that updates the shard can take their mean on its way, which saves a pass. On the host, never traced.

    Args: leaves: gradients, not joined yet. The rest as for `reduce_to_shard`.
    """
    narrow = leaves[bucket.leaf_indices[0]].element_size() < 4
    if codes or narrow or rules.momentum is not None or not isinstance(rules.axis, str):
        x = join(leaves, bucket)
        consume = layouts.is_fresh(x, leaves, bucket)
        shard, kept = reduce_to_shard(x, kept, bucket, rules, codes, consume=consume)
        return [shard], kept
    return swap_rows(layouts.rows_of(leaves, bucket), rules.axis), kept  # W rows, one to each rank -> one of each rank


def _reduce_momentum(
    x: Tensor, kept: Kept, bucket: Bucket, rules: Rules, codes: bool, consume: bool
) -> tuple[Tensor, Kept]:
    """Average the momentum, and return the shard of the gradient that leads from the old mean mu to the new one mu'.

    That is mu + (mu' - mu) / (1 - b1): the inner transform's moving average, with the same decay, then arrives at mu'.
    """
    ranks, index = bucket.segments.valid.shape[0], axis_index(rules.axis)
    b1: Any = rules.momentum
    of_row = b1
    if isinstance(b1, Tensor):  # `lerp` takes a weight of the dtype of what it weighs
        b1 = of_row = b1.to(kept.momentum.dtype)
        if b1.ndim:
            b1, of_row = b1.reshape(-1), row_of(b1, index, ranks)  # (W, n / W) -> (n,), (n / W,)
    before = row_of(kept.momentum, index, ranks)  # (n,) -> (n / W,)
    if codes:
        wider = x.to(kept.momentum.dtype)
        # Written over the gradient only where the caller gave that away.
        local = torch.lerp(wider, kept.momentum, b1, **({"out": wider} if consume else {}))
        errors = kept.worker, kept.server
        rule = rules.axis, rules.codec, rules.feedback
        fresh = is_concrete(local)  # its memory becomes the error's
        mean, errors = compressed_all_reduce(local, errors, *rule, segments=bucket.segments, consume=fresh)  # (n,)
        # (n,) -> (n / W,), this rank's row of the mean
        return before + (row_of(mean, index, ranks) - before) / (1.0 - of_row), Kept(*errors, mean)
    shard = _exact_shard(x, bucket, rules)
    # (n / W,) -> (n,): all ranks hold the same momentum when the codes begin
    mean = _gather_exactly(torch.lerp(shard, before, of_row), shard.dtype, bucket, rules)
    return shard, kept._replace(momentum=mean)


def gather_back(
    value: Tensor, dtype: torch.dtype, kept: Kept, bucket: Bucket, rules: Rules, codes: bool
) -> tuple[Tensor, Kept]:
    """Return the whole vector (n,) from each rank's shard `value`, and what is kept.

    Args: dtype: that of the messages, where they are not codes.
    """
    if not codes or rules.gather is None:
        return _gather_exactly(value, dtype, bucket, rules), kept
    rule = (rules.axis, rules.gather, rules.gather_feedback)
    if rules.momentum is not None:  # the server error belongs to the momentum's exchange, and must not be spent here
        return all_gather_shards(value, (), *rule, segments=bucket.segments)[0], kept
    whole, server = all_gather_shards(value, kept.server, *rule, segments=bucket.segments)
    return whole, kept._replace(server=server)


def gather_in_place(
    value: Tensor, dtype: torch.dtype, whole: Tensor | None, kept: Kept, bucket: Bucket, rules: Rules, codes: bool
) -> tuple[Tensor, Kept]:
    """Do what `gather_back` does, in the memory of `whole` where nothing is encoded. Outside of traces.

    Args: value: this rank's shard, which may be its row of `whole`. dtype: of the messages. whole: memory (W, n / W);
        None on a device, whose collectives bring their own.
    """
    if (codes and rules.gather is not None) or not isinstance(rules.axis, str):
        return gather_back(value, dtype, kept, bucket, rules, codes)
    if whole is None:
        # (n / W,) -> (W, n / W) -> (n,)
        return all_gather(value.to(dtype), rules.axis).view(-1), kept
    row = whole[int(axis_index(rules.axis))]
    # The kernel that made it may have written the row in place.
    if row.data_ptr() != value.data_ptr():
        row.copy_(value)
    fill_rows(whole, rules.axis)
    # (W, n / W) -> (n,)
    return whole.view(-1), kept


def _exact_shard(x: Tensor, bucket: Bucket, rules: Rules) -> Tensor:
    return reduce_scatter_wide(x, (), rules.axis, identity(), off(), segments=bucket.segments)[0]


def _gather_exactly(value: Tensor, dtype: torch.dtype, bucket: Bucket, rules: Rules) -> Tensor:
    codecs = (identity(dtype),) * len(names(rules.axis))
    return all_gather_shards(value, (), rules.axis, codecs, off(), segments=bucket.segments)[0]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a shard is updated: float32 for params in half precision, else theirs."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def row_of(vector: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return row `index` of a vector (n,) of `rows` equal rows; it may share memory with the vector."""
    table = vector.view(rows, -1)  # (W, n / W)
    if is_concrete(index, vector):
        return table[int(index)]
    # In a trace or under vmap the index is no number: (W, n / W) -> (1, n / W) -> (n / W,), selected.
    return table.index_select(0, index.to(vector.device).view(1)).view(-1)


def shard_of(leaves: Sequence[Tensor], bucket: Bucket, index: Tensor) -> Tensor:
    """Return row `index` of the joined bucket, (n / W,): a rank's shard. Outside of vmap the other rows are not joined.

    Args: leaves, bucket: as for `flat_layout.join`. index: 0-d int64.
    Returns: a vector that may share memory with a leaf.
    """
    tensors = [leaves[i].reshape(-1) for i in bucket.leaf_indices]  # (n_i,) each
    if not is_concrete(index, *tensors):
        return row_of(join(leaves, bucket), index, bucket.segments.valid.shape[0])
    tensors, number = [end_to_end(tensors)] if bucket.fused else tensors, int(index)
    pieces = []  # (width,) of each tensor; the last rows have less of it, or nothing, and padding
    for x, width in zip(tensors, bucket.segments.widths, strict=True):
        piece = x[number * width : (number + 1) * width]
        pieces.append(piece if piece.shape[0] == width else F.pad(piece, (0, width - piece.shape[0])))
    return end_to_end(pieces)  # (n / W,)


def refreshed(master: Tensor, leaves: Sequence[Tensor], bucket: Bucket, index: Tensor) -> Tensor:
    """Return a master shard (n / W,) that takes over what was written into the params since they were rounded from it.

    That may be a checkpoint that a model loads, or a clamp after each step; without it, the next step would undo them.

    Args: leaves, bucket, index: as for `shard_of`.
    """
    current = shard_of(leaves, bucket, index)
    if is_concrete(master, current) and current.device.type == "cpu" and not is_recorded([master, current]):
        rounded = memory_pool.empty(current.shape, current.dtype, current.device).copy_(master)
        # compared as bits by NumPy, which takes a twentieth of the time that torch takes for half precision
        if np.array_equal(current.view(torch.int16).numpy(), rounded.view(torch.int16).numpy()):
            return master
    # Where the param is the master, rounded, the master has more digits; elsewhere the param was written.
    return torch.where(master.to(current.dtype) == current, master, current.to(master.dtype))


def show_failures(moves: Tree, before: Tree, after: Tree) -> tuple[Tree, Tree]:
    """Make the moves of a shard NaN where a guard inside skipped.

    Only this rank can see that. The moves are gathered, so all ranks then see a NaN and skip together. The guard around
    `sharded` counts that step, so skip counts inside stay as they were.

    Args: moves: of this rank's shard. before, after: the inner states of this step.
    Returns: the moves, and the state after.
    """
    skips = roles.find(before, "skips")
    if not skips:
        return moves, after
    # S counts () -> (S,) -> ()
    ok = torch.stack([new == old for new, old in zip(roles.find(after, "skips"), skips, strict=True)]).all()
    olds, (news, structure) = tree.leaves(before), tree.flatten(after)
    kept = [old if any(old is count for count in skips) else new for new, old in zip(news, olds, strict=True)]
    after = tree.unflatten(structure, kept)
    if is_concrete(ok) and ok.device.type == "cpu" and ok:
        return moves, after
    # A factor of NaN, not a selection: it reaches zeros as well, and is one pass over all moves.
    factor = torch.where(ok, 1.0, math.nan).to(torch.float32)
    return apply(rules.scaled, (moves,), factor), after
