"""ZeRO by whole tensors, as a combinator: each rank updates the tensors that it owns, and the updates are gathered.

    gradients of all tensors on each rank
      | to their owners, exactly or in codes with feedback      -> the mean, on one rank each
      | inner's update of the own tensors and their states      -> the updates of these
      | to all ranks, exactly or in codes with feedback         -> all updates, the same on every rank

Over `axis=("local", "node")` gradients travel exactly within a node, to the rank that has the owner's index there, and
in codes between the nodes; updates come back that way, so that a node sends as much as one rank would.

`fn.sharded` cuts tensors into pieces, which is what element-wise links can have. Muon, LAMB and all that needs whole
matrices can have this. The inner links see a tree like the params, in which tensors of other ranks have no elements;
under `simulate`, where all ranks have equal shapes, they are zeros. Of a stack of matrices, such as the experts of a
layer, they see slices (`fn.tree.Slices`), which ranks own one by one, where they take each matrix by itself.

    >>> import torch, fn
    >>> tx = fn.owned(fn.chain(fn.scale_by_muon(), fn.scale_by_learning_rate(0.1)), "data")
    >>> params = [torch.zeros(4, 2), torch.zeros(2, 4), torch.zeros(4, 2)]
    >>> fn.transforms.owned.plan(params, 2)                        # each of two ranks has one of the equal shapes
    (0, 0, 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import (
    Phase,
    Transform,
    UpdateFn,
    as_updates,
    check_params,
    check_state,
    facts_of,
    has_phase,
    missing,
    update_in,
)
from fn.collectives import axis as axes
from fn.collectives.agreement import check_agreement, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames, axis_size
from fn.collectives.codecs.codec import Codec, identity, mean_of_rows
from fn.collectives.compressed import ErrorFeedbackState, check_vector, encode
from fn.collectives.feedback import Feedback, Off, classic, off
from fn.collectives.hierarchy import Hop, hops
from fn.collectives.owners import columns_to_owners, from_owners, served_here, to_owners
from fn.compiling import own_code
from fn.errors import expected
from fn.facts import Facts, merged
from fn.kernels import flags, rules
from fn.kernels.lists import elementwise
from fn.kernels.tracing import cached_plan, is_concrete, is_recorded
from fn.roles import declare
from fn.transforms import flat_layout as layouts
from fn.transforms.flat_layout import Bucket
from fn.transforms.resharding import errors_reshape, reshapes
from fn.transforms.sharded import check_parts, show_failures, wide

Tree = Any
EVERY = -1
"""The owner of what every rank has."""

Costs = Tree | Callable[[Tree], Tree] | None
"""A number for each tensor, in a tree like the params, or a function of them. None: `newton_schulz_costs`."""


@declare(rank_local=("inner", "back"), errors=("back",), place=("owners",))
class OwnedState(NamedTuple):
    """What a rank keeps of an optimizer whose tensors have owners. Tuples have an entry for each tensor, or slice.

    inner: the inner state, of own tensors; those of others have no elements.
    errors: residual errors of the gradients, of all tensors that this rank sends in codes; () where they travel
        exactly. There are no servers.
    back: residual errors of the updates, at their owners; () where these travel exactly.
    owners: the rank that owns each tensor or slice, (n,) int64.
    """

    inner: Tree
    errors: ErrorFeedbackState
    back: tuple[Tree, ...]
    owners: Tensor


class Owned(NamedTuple):
    """The rule of a step of `owned`. inner: the inner update."""

    inner: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates of all owners, and the next state."""
        return self.run(updates, state, params)


def owned(
    inner: Transform,
    axis: AxisNames,
    *,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    gather: Codec | None = None,
    cost: Costs = None,
) -> Transform:
    """Run `inner` on whole tensors, each on its owner: ZeRO stage 1 for Muon and all that needs whole tensors.

        m = mean_r C(g_r + e_r)   at the owner of the tensor,      u = inner(m),      updates = gather of C(u + d)

    The step of a tensor is computed once, and its state is kept once, while `inner` alone would do both on every rank.
    An exact step sends as many bytes as an all-reduce of the gradients.

        >>> import torch, fn
        >>> tx = fn.owned(fn.chain(fn.scale_by_muon(), fn.scale_by_learning_rate(0.1)), "data")
        >>> def step(g, p):
        ...     return tx.update(fn.Phase.WARMUP)(g, tx.init(p), p)[0]
        >>> params = [torch.zeros(2, 2), torch.zeros(2, 2)]
        >>> grads = [torch.eye(2).repeat(2, 1, 1), torch.ones(2, 2, 2)]              # the same on both ranks
        >>> u = fn.simulate(step, "data", 2, in_dims=(0, None), out_dims=None)(grads, params)
        >>> alone = fn.chain(fn.scale_by_muon(), fn.scale_by_learning_rate(0.1))
        >>> torch.equal(u[1], alone.warmup_update([g[0] for g in grads], alone.init(params), params)[0][1])
        True

    Args:
        inner: what updates own tensors. It must not communicate over `axis`, on which every rank has other tensors, nor
            need all of them, as a norm of the whole tree does. A link of your own says so in its facts (`fn.Facts`).
            One without a compressed phase takes its warm-up steps in every phase.
            Where its facts say that it takes each matrix of a stack by itself (`batched`), as `scale_by_muon` does,
            ranks own slices of stacks; else a tensor of three dimensions is owned whole.
        axis: the axis' name, or two, ("local", "node"), from the faster network to the slower one: within a node
            gradients travel exactly, and updates as they came. A rank then keeps errors of only those tensors whose
            owner has its index in the node, because it sends them to the other nodes.
        codec: how gradients travel to the owners in the compressed phase; None is exactly.
        gather: how updates travel back in the compressed phase; None is exactly.
        feedback: how a rank keeps the errors of what it sends, both ways; None is `classic()`.
        cost: what the step of each tensor costs its owner, by which the ranks get equal shares: a tree of numbers like
            the params, or a function from params to one. None: of matrices what Newton-Schulz costs, the smaller side
            squared times the larger, of vectors their elements. Tensors of a shape are spread evenly, so that each
            owner has a batch of them.
    Returns: a transform with a warm-up and a compressed phase and an `OwnedState`.
    Raises: ValueError if inner communicates over `axis`, needs all tensors (see `fn.Facts`), or has rounds; TypeError
        for an axis that is no name, and from init for DTensors; from init, if inner lets each rank go to params of its
        own, or the ranks disagree; from the update, if the state belongs to other params or another number of ranks.

    Paper: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5.1, by tensors in place of pieces.
    Differs: an owner has whole tensors, so that shares are as equal as costs of tensors allow; a tensor that is larger
        than all others together is one rank's.
    """
    if not isinstance(axis, str) and not (isinstance(axis, tuple) and len(axis) in (1, 2)):
        raise TypeError(expected("axis", "the name of one axis, or of two, ('local', 'node')", f"{axis!r}"))
    *within, between = names = axes.names(axis)
    check_by_tensor(inner, names, "fn.owned")
    exact, to_owner, to_all = both_ways(between, codec, feedback, gather)
    facts = facts_of(inner)

    def planned(params: Tree) -> tuple[list[bool], tuple[int, ...]]:
        """Return which leaves are cut into slices, and who owns each tensor and slice."""
        cut = facts.in_slices(params)
        return cut, plan(params, axis_size(axis), cost, cut)

    def errors_of(leaves: Sequence[Tensor], hop: Hop) -> tuple[Tree, ...]:
        if hop.exact:
            return ()
        # vectors (n,), n rounded up to the codec's alignment: an owner gets whole tensors, so there is one row
        zeros = [x.new_zeros(row.segments.row_length) for x, row in zip(leaves, rows_of(leaves, hop), strict=True)]
        return tuple(hop.feedback.init(x) for x in zeros)

    def init(params: Tree) -> OwnedState:
        tree.check_real(params, "params")
        _check_whole(params)
        cut, owners = planned(params)
        # Detached: clones below would carry the graph of the params into the state.
        leaves, structure = tree.flatten(tree.sliced(tree.map(Tensor.detach, params), cut))
        fields = {**describe((to_owner, to_all, inner)), **describe_leaves(params), "owners": owners}
        # Before anything is sent: with other owners on another rank, both would wait for what nobody sends.
        check_agreement(axis, fields, device_of(params))
        own = mine(leaves, owners, axis)  # the shapes of the leaves here; (0, ...) for those of other ranks
        # Clones: own tensors are the params themselves, and a state that keeps one would change with them.
        state = inner.init(tree.unflatten(structure, [x.clone() for x in own]))
        roles.check_same_params(state)
        # Labels that a function makes of sizes would differ where tensors have no elements, and so would the states:
        # the ranks would then read each other's tensors as their own.
        check_agreement(axis, {"paths of the inner state": tree.paths(state)}, device_of(params))
        sent = _sent(leaves, owners, within, between)
        errors = ErrorFeedbackState(errors_of(sent, to_owner), tuple(() for _ in leaves))  # no servers: owners serve
        if not to_owner.exact:
            # of all tensors, for other ranks may have sent them in another world
            wides = [x.to(wide(x.dtype)) for x in leaves] if within else leaves
            reshapes.add((errors, errors_reshape(wides, axis, lambda world: rows_of(wides, to_owner), to_owner, exact)))
        # Updates are made of float32 means, so their errors are float32 for half precision, too.
        of_owners = errors_of([x.to(wide(x.dtype)) for x in own], to_all)
        return OwnedState(state, errors, of_owners, torch.tensor(owners, dtype=torch.int64, device="cpu"))

    def step(phase: Phase) -> UpdateFn:
        inner_phase = phase if has_phase(inner, phase) else Phase.WARMUP

        move = update_in(inner, inner_phase)

        def update(updates: Tree, state: OwnedState, params: Tree, /) -> tuple[Tree, OwnedState]:
            check_state(state, OwnedState)
            check_params(params)
            tree.check_updates(updates, params)
            cut, owners = planned(params)
            leaves, structure = tree.flatten(tree.sliced(params, cut))
            grads = tree.leaves(tree.sliced(tree.in_order(updates, params, "updates"), cut))
            check_owners(state, owners)
            codes = phase is Phase.COMPRESSED and axis_size(between) > 1
            worker, of_owners = state.errors.worker, state.back
            # W gradients of each tensor become one mean, at its owner; (0, ...) at the other ranks
            way = to_owner if codes else exact
            means, worker = _means_over(grads, worker, owners, within, way)
            own_params = tree.unflatten(structure, mine(leaves, owners, axis))
            with flags.unassumed():  # own tensors may be finite where another rank's are not
                moves, inside = move(tree.unflatten(structure, means), state.inner, own_params)
                # A guard inside skips on one rank only; its NaN travels, so that the guard outside skips on all.
                moves, inside = show_failures(as_updates(moves, own_params), state.inner, inside)
            del means  # before memory is taken for the updates of all tensors
            # an update at each owner becomes all updates on every rank, in the shapes of the leaves
            if codes and not to_all.exact:
                moved = tree.leaves(moves)
                gathered, of_owners = _updates_in_codes(moved, leaves, of_owners, owners, to_all, axis)
            else:
                gathered = _exact_updates(tree.leaves(moves), leaves, owners, axis)
            errors = state.errors._replace(worker=worker)
            return tree.stacked(gathered, params, cut), OwnedState(inside, errors, of_owners, state.owners)

        return Owned(move, own_code(update))

    local = missing(Phase.LOCAL, "an optimizer of owned tensors")
    facts_here = merged(facts, Facts(names, ("owned",)))
    return Transform(init, step(Phase.WARMUP), step(Phase.COMPRESSED), local, inner.needs_warmup, facts=facts_here)


def check_by_tensor(inner: Any, axes: Sequence[str], by: str) -> None:
    """Refuse an inner transform that needs all tensors, or the parts of other ranks. Args: by: what divides them."""
    check_parts(inner, axes, by)
    if links := facts_of(inner).tree:
        got = f"{', '.join(links)}, which would see this rank's tensors only"
        cure = f"to clip, use fn.Optimizer(max_norm=...) or a link in front of {by}; a link of your own that needs no "
        cure += "more than single tensors says so: link._replace(facts=fn.Facts(whole=('its name',)))"
        raise ValueError(expected("inner", "links that treat each tensor by itself", got, cure))


def both_ways(
    axis: str, codec: Codec | None, feedback: Feedback | None, gather: Codec | None
) -> tuple[Hop, Hop, Hop]:
    """Return how tensors travel over an axis: exactly, to their owners, and back. Args: as for `owned`."""
    if feedback is not None and codec is None and gather is None:
        raise ValueError("feedback: is given without a codec; give one, for an exact mean has no residual errors")
    exact, kept = Hop(axis, identity(), off()), classic() if feedback is None else feedback
    (to_owner,) = hops(axis, codec, kept) if codec is not None else [exact]
    (back,) = hops(axis, gather, kept, ("gather", "feedback")) if gather is not None else [exact]
    return exact, to_owner, back


def _check_whole(params: Tree) -> None:
    """Refuse DTensors: a rank may have a part, which an owner would take for the whole."""
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        if hasattr(p, "device_mesh"):
            got = f"a DTensor on {p.device_mesh}"
            cure = "hand over p.full_tensor(), and the whole gradient in every step"
            raise TypeError(expected("params", f"leaf {path or 'the root'!r} to be a whole tensor", got, cure))


def newton_schulz_costs(params: Tree, flatten: bool = True) -> Tree:
    """Return what orthogonalising each matrix costs: the smaller side squared times the larger; of others elements.

    Args: flatten: whether a tensor (n, ...) counts as a matrix (n, all others), or as a stack of matrices.

    >>> import torch
    >>> newton_schulz_costs([torch.zeros(6, 2), torch.zeros(2, 6), torch.zeros(5)])
    [24, 24, 5]
    """

    return tree.map(lambda p: _newton_schulz_cost(p.shape, flatten), params)


def _newton_schulz_cost(shape: torch.Size, flatten: bool = True) -> int:
    if len(shape) < 2:
        return shape.numel()
    return shape.numel() * min(*((shape[0], shape[1:].numel()) if flatten else shape[-2:]))


def plan(
    params: Tree, world: int, cost: Costs = None, cut: Sequence[bool] | None = None,
    among: Sequence[Sequence[int]] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the rank that owns each leaf, the same on all ranks, and of leaves that are cut each slice.

    Tensors of a shape and cost go to all ranks in turn. Those that are left over, fewer than there are ranks, go to the
    ranks that have least to do, the costliest shapes first.

    Args: params: whose shapes matter. world: the number of ranks. cost: as for `owned`. cut: see `Facts.in_slices`.
        among: of each owned tensor or slice the ranks that may own it; None: all.
    Raises: ValueError or TypeError for costs that are no finite numbers of at least 0, one for each leaf.
    """
    leaves = tree.leaves(params)
    cut = [False] * len(leaves) if cut is None else cut
    counts = [len(leaf) if is_cut else 1 for leaf, is_cut in zip(leaves, cut, strict=True)]
    # Each slice counts as a tensor of its own; a cost that is given is that of all slices.
    shapes = [leaf.shape[1:] if is_cut else leaf.shape for leaf, is_cut in zip(leaves, cut, strict=True)]
    if cost is None:
        prices = [*map(_newton_schulz_cost, shapes)]
    else:
        prices = [price / n for price, n in zip(tree.leaves(_costs(params, cost)), counts, strict=True)]
    each = [(shape, float(price)) for shape, price, n in zip(shapes, prices, counts, strict=True) for _ in range(n)]
    ranks = [range(world)] * len(each) if among is None else among
    return _planned(tuple((*one, tuple(some)) for one, some in zip(each, ranks, strict=True)), world)


def _costs(params: Tree, cost: Costs) -> Tree:
    made = tree.in_order(cost(params) if callable(cost) else cost, params, "cost")
    for path, price in zip(tree.paths(made), tree.leaves(made), strict=True):
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise ValueError(expected("cost", f"leaf {path!r} to be a finite number of at least 0", f"{price!r}"))
    return made


@cached_plan
def _planned(shapes: tuple[tuple[torch.Size, float, tuple[int, ...]], ...], world: int) -> tuple[int, ...]:
    owners, loads = [0] * len(shapes), [0.0] * world
    by_cost = sorted(tree.places_by(shapes).items(), key=lambda entry: -entry[0][1])
    for (_, price, ranks), places in by_cost:
        # Dealt in turn: every owner has as many of a shape, and Newton-Schulz iterates them as one batch.
        whole_rounds = len(places) // len(ranks) * len(ranks)
        for j, i in enumerate(places):
            # Of equal loads the lowest rank, so that all ranks make the same plan.
            owners[i] = ranks[j % len(ranks)] if j < whole_rounds else min(ranks, key=lambda r: (loads[r], r))
            loads[owners[i]] += price or 1e-9  # what costs nothing is spread, too
    return tuple(owners)


def check_owners(state: OwnedState, owners: tuple[int, ...]) -> None:
    """Refuse a state of other params, of other costs or of another number of ranks with a ValueError."""
    # Owners on a device are taken on trust: to compare them in each step would wait for it.
    if is_concrete(state.owners) and state.owners.device.type == "cpu" and tuple(state.owners.tolist()) != owners:
        both = [[*owners], state.owners.tolist()]
        shares = ([of.count(r) for r in range(max(of, default=0) + 1)] for of in both)
        wanted, got = (f"{len(of)} tensors, by owner {n}" for of, n in zip(both, shares, strict=True))
        cure = "a state belongs to the params, the costs and the number of ranks that it was made for"
        raise ValueError(expected("state.owners", wanted, got, cure))


def mine(leaves: Sequence[Tensor], owners: Sequence[int], axis: AxisNames) -> list[Tensor]:
    """Return own leaves as they are, and tensors without elements for those of others; zeros under `simulate`.

    Args: owners: `EVERY` for what all ranks have.
    """
    if axes.is_simulated(axis):  # vmap gives all ranks the same shapes, so what others own is zero, not empty
        rank = axes.axis_index(axis)
        pairs = zip(leaves, owners, strict=True)
        return [x if owner == EVERY else torch.where(rank.to(x.device) == owner, x, 0.0) for x, owner in pairs]
    here = axes.own_rank(axis)
    have = [axis_size(axis) == 1 or owner in (here, EVERY) for owner in owners]
    return [x if has else _without_elements(x, x.dtype) for x, has in zip(leaves, have, strict=True)]


def _without_elements(like: Tensor, dtype: torch.dtype) -> Tensor:
    # (n, ...) -> (0, ...): it stays a matrix, as which an inner link may check it
    return like.new_empty((0, *like.shape[1:]), dtype=dtype)


def rows_of(leaves: Sequence[Tensor], hop: Hop) -> list[Bucket]:
    """Return a row for each tensor, padded for the codec."""
    return layouts.buckets(leaves, 1, hop.codec.align, "per_tensor")


def _sent(leaves: Sequence[Tensor], owners: Sequence[int], within: Sequence[str], between: str) -> list[Tensor]:
    """Return the tensors that this rank sends in codes: over two axes means of the node, others without elements."""
    if not within:
        return [*leaves]
    # float32 for half precision, as means are
    wides = [x.to(wide(x.dtype)) for x in leaves]
    return mine(wides, [owner // axis_size(between) for owner in owners], within[0])


def _means_over(
    grads: Sequence[Tensor], errors: Sequence[Tree], owners: Sequence[int], within: Sequence[str], hop: Hop
) -> tuple[list[Tensor], tuple[Tree, ...]]:
    """Return the means of own tensors, and the next errors. Args: within: the axis of a node; [] where there is none.

    Over two axes the first mean is a node's, exact, at the rank with the owner's index; only those ranks send it on.
    """
    if not within:
        if hop.exact:
            return _exact_means(grads, owners, hop.axis), (*errors,)
        return _means_in_codes(grads, errors, owners, hop)
    (local,) = within
    nodes, after = axis_size(hop.axis), [*errors]
    in_node, across = [owner // nodes for owner in owners], [owner % nodes for owner in owners]
    means = _exact_means(grads, in_node, local)
    here = served_here(in_node, local)
    if not here:  # the ranks of this index serve no tensor, on all nodes alike
        return means, tuple(after)
    some, of_node = [means[i] for i in here], [across[i] for i in here]
    if hop.exact:
        found = _exact_means(some, of_node, hop.axis, axis_size(local))
    else:
        found, kept = _means_in_codes(some, [errors[i] for i in here], of_node, hop, axis_size(local))
        for i, error in zip(here, kept, strict=True):
            after[i] = error
    for i, mean in zip(here, found, strict=True):
        means[i] = mean
    return means, tuple(after)


def _exact_means(grads: Sequence[Tensor], owners: Sequence[int], axis: str, among: int = 1) -> list[Tensor]:
    """Return the means of own tensors, float32 for half precision, and tensors without elements for those of others."""
    if axes.resolve(axis).transport == axes.SIMULATED:  # one vector for all: each call under vmap takes long
        buckets = layouts.buckets(grads, 1, 1, "flat")
        # (1, n) on each rank -> (W, n) on all of them: the mean is taken everywhere, and cut down to own tensors
        items = [layouts.join(grads, bucket)[None] for bucket in buckets]
        rows = to_owners(items, [0] * len(buckets), axis, among)
        vectors = [mean_of_rows(identity(), some) for some in rows]
        # (n,) -> the shapes of the gradients
        parts = [layouts.split(vector, bucket) for vector, bucket in zip(vectors, buckets, strict=True)]
        places = [i for bucket in buckets for i in bucket.leaf_indices]
        mean_of = dict(zip(places, (x for some in parts for x in some), strict=True))
        return mine([mean_of[i] for i in range(len(grads))], owners, axis)
    # Contiguous, for a device sends large tensors from where they lie.
    columns = columns_to_owners([g.contiguous() for g in grads], owners, axis)  # of own tensors W each, None of others
    # None in a trace or a graph, where nothing that was received may be written over.
    own = axes.own_rank(axis) if is_concrete(*grads) and not is_recorded(grads) else None
    means = iter(_means([x for x in columns if x is not None], own))
    return [
        _without_elements(g, wide(g.dtype)) if x is None else next(means) for x, g in zip(columns, grads, strict=True)
    ]


def _means(columns: Sequence[Sequence[Tensor]], own: int | None) -> list[Tensor]:
    """Return the mean over the ranks of each tensor, as `mean_of_rows` adds them, float32 for half precision.

    Args: columns: of each tensor those of all ranks. own: the rank whose tensors are this rank's gradients; those of
        the others were received, and are written over. None: nothing is.
    """
    ranks = [*map(list, zip(*columns, strict=True))]  # tensors of W ranks -> W lists of tensors
    if not ranks:
        return []
    total = [x.to(wide(x.dtype)) for x in ranks[0]]
    # The sum is written over what was received. This rank's own gradients are the caller's, so where they come first
    # the second rank's tensors are the room.
    room = None if own is None or len(ranks) == 1 else ranks[1] if own == 0 else total
    # Half precision that was received is no room for a float32 sum.
    room = room if room and [x.dtype for x in room] == [x.dtype for x in total] else None
    for row in ranks[1:]:
        total = elementwise(rules.plus, (total, row), 1.0, out=None if room is None else [room])
        room = None if own is None else total
    # Times 1 / W, as in `mean_of_rows`: a division rounds otherwise, and a simulation would have other bits.
    means: list[Tensor] = elementwise(rules.scaled, (total,), 1.0 / len(ranks), out=None if room is None else [room])
    return means


def _means_in_codes(
    grads: Sequence[Tensor], errors: Sequence[Tree], owners: Sequence[int], hop: Hop, among: int = 1
) -> tuple[list[Tensor], tuple[Tree, ...]]:
    """Return the means as `_exact_means` does, from messages in codes, and the next errors."""
    buckets, items, after = _buckets(grads, grads, errors, owners, hop), [], [*errors]
    for bucket in buckets:
        items.append(_encoded(grads, after, bucket, hop, worker=True))
    mean_of: dict[int, Tensor] = {}
    came = to_owners(items, _owners_of(buckets, owners), hop.axis, among)
    for bucket, received in zip(buckets, came, strict=True):
        # None at the ranks that do not own the tensors of this bucket
        if received is not None:  # codes of W rows, at the owner
            means = layouts.split(mean_of_rows(hop.for_rows(bucket.segments), received), bucket)
            mean_of.update(zip(bucket.leaf_indices, means, strict=True))
    means = [
        mean_of[i].to(wide(g.dtype)) if i in mean_of else _without_elements(g, wide(g.dtype))
        for i, g in enumerate(grads)
    ]
    return mine(means, owners, hop.axis), tuple(after)


def _buckets(
    leaves: Sequence[Tensor], like: Sequence[Tensor], errors: Sequence[Tree], owners: Sequence[int], hop: Hop
) -> list[Bucket]:
    """Return which tensors are encoded together: each alone; on a device, where launches cost more, all of an owner.

    Args: leaves: what is encoded. like: their shapes. The numbers are the same, since no scale crosses tensors. Errors
        that are no vectors are not joined.
    """
    # Errors of a tuple of tensors, such as one in 8 bits with its scales, cannot be laid end to end.
    are_vectors = all(isinstance(e, Tensor) for e in errors) or isinstance(hop.feedback.rule, Off)
    alike = all(len({(x.dtype, x.device) for x in tensors}) == 1 for tensors in (leaves, like))
    if not (alike and are_vectors and _is_launched(leaves[0])):
        return rows_of(like, hop)
    buckets = []
    for owner in sorted({*owners}):
        places = [i for i, o in enumerate(owners) if o == owner]
        (bucket,) = layouts.buckets([like[i] for i in places], 1, hop.codec.align, "flat")
        # `buckets` counted among the owner's tensors; these are their places among all.
        buckets.append(bucket._replace(leaf_indices=tuple(places)))
    return buckets


def _is_launched(x: Tensor) -> bool:
    return x.device.type != "cpu"


def _owners_of(buckets: Sequence[Bucket], owners: Sequence[int]) -> list[int]:
    # the first one tells: all tensors of a bucket have the same owner
    return [owners[bucket.leaf_indices[0]] for bucket in buckets]


def _encoded(leaves: Sequence[Tensor], errors: list[Tree], bucket: Bucket, hop: Hop, *, worker: bool) -> Tree:
    """Return codes of the tensors of a bucket, and replace their errors by the next ones."""
    places, x = bucket.leaf_indices, layouts.join(leaves, bucket)
    are_joined = len(places) > 1 and isinstance(errors[places[0]], Tensor)
    # (n_i,) of each tensor -> (n,), in the order in which `join` lays them
    error = torch.cat([errors[i] for i in places]) if are_joined else errors[places[0]]
    check_vector(x, error, hop.codec.align, "updates")
    # (n,) -> codes of one row (1, n): an owner takes whole tensors, where a server would take a piece of each
    payload, error = encode(hop.for_rows(bucket.segments), hop.feedback, x.view(1, -1), error, worker=worker)
    # (n,) -> (n_i,) of each tensor
    parts = error.split([*bucket.segments.widths]) if are_joined else [error] * len(places)
    for i, part in zip(places, parts, strict=True):
        errors[i] = part
    return payload


def _exact_updates(
    moves: Sequence[Tensor], like: Sequence[Tensor], owners: Sequence[int], axis: AxisNames
) -> list[Tensor]:
    """Return the updates of all tensors. Args: moves: of own tensors. like: the params, for their shapes."""
    here = None if axes.is_simulated(axis) or axis_size(axis) == 1 else axes.own_rank(axis)
    forms: dict[Any, Tensor] = {}
    items = []
    for move, p, owner in zip(moves, like, owners, strict=True):
        if here is None or owner == here:
            # (n, ...) -> (1, n, ...): an item is a row, of the only rank that sends it
            items.append(move[None])
        else:  # says the shape that is to be received, and takes no memory
            form = forms.setdefault((move.dtype, move.device), move.new_empty(1))
            # (1,) -> (1, n, ...), with strides of 0
            items.append(form.expand(1, *p.shape))
    # (1, n, ...) -> (n, ...)
    return [row[0] for row in from_owners(items, owners, axis)]


def _updates_in_codes(
    moves: Sequence[Tensor], like: Sequence[Tensor], errors: Sequence[Tree], owners: Sequence[int], hop: Hop,
    axis: AxisNames,
) -> tuple[list[Tensor], tuple[Tree, ...]]:  # fmt: skip
    """Return the updates as `_exact_updates` does, from messages in codes, and the next errors."""
    here = None if axes.is_simulated(axis) else axes.own_rank(axis)
    buckets, items, after = _buckets(moves, like, errors, owners, hop), [], [*errors]
    of_buckets = _owners_of(buckets, owners)
    for bucket, owner in zip(buckets, of_buckets, strict=True):
        if here is None or owner == here:
            items.append(_encoded(moves, after, bucket, hop, worker=False))
        else:
            move, codec = moves[bucket.leaf_indices[0]], hop.for_rows(bucket.segments)
            # as long as the codes that arrive: who receives has to know their length
            items.append(form_of(codec, 1, bucket.segments.row_length, move.dtype, move.device))
    update_of: dict[int, Tensor] = {}
    for bucket, payload in zip(buckets, from_owners(items, of_buckets, axis), strict=True):
        parts = layouts.split(hop.for_rows(bucket.segments).decode(payload).reshape(-1), bucket)  # (1, n) -> (n,)
        update_of.update(zip(bucket.leaf_indices, parts, strict=True))
    # updates keep the dtype that inner gave them, whatever codes are decoded to
    return [update_of[i].to(move.dtype) for i, move in enumerate(moves)], tuple(after)


@cached_plan
def form_of(codec: Codec | None, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tree:
    """Return an item for its shapes and dtypes alone."""
    item = torch.zeros((rows, width), dtype=dtype, device=device)
    # (1,) -> the shapes of an item, with strides of 0: a plan that is kept takes no memory
    return tree.map(lambda x: x.new_empty(1).expand(x.shape), item if codec is None else codec.encode(item))
