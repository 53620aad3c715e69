"""Local steps: each rank goes its own way for a while, then the ranks agree on where they went.

anchor x                 the params that all ranks agreed on last
  | h local steps        rank r goes to p_r; nothing is sent
  | d = mean(x - p_r)    one exchange of differences, exact or in any codes
  | x <- outer step      by any optimizer, with d in the place of a gradient
  | p_r <- x             and so on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import (
    Facts,
    NewParams,
    Part,
    Phase,
    Round,
    Step,
    Transform,
    UpdateFn,
    apply_updates,
    check_params,
    check_state,
    facts_of,
    has_phase,
    merged,
)
from fn.collectives.axis import current_binding
from fn.collectives.simulation import found_alike
from fn.compiling import memoized
from fn.errors import expected
from fn.kernels.tracing import is_concrete
from fn.roles import Roles
from fn.transforms.adam import zeros_like_moment
from fn.transforms.fragments import Fragments, check_fragments, fragment_places, places_in, put
from fn.transforms.outer_checks import (
    check_alike,
    check_alpha,
    check_holds,
    check_inner,
    check_outer_tx,
    check_store,
    check_sync,
)
from fn.transforms.skip_nonfinite import all_addable, all_finite

Tree = Any


class OuterState(NamedTuple):
    """State of `outer`.

    inner: the state of the inner optimizer. It is each rank's own, and no exchange changes it.
    anchor: the params that all ranks agreed on last, in float32 under half precision.
    pending: the mean differences that are to be taken over; like the anchor.
    outer: the states of the outer optimizer, one per fragment; () for one without params, also below.
    sync: the states of the mean, one per fragment.
    alone: steps since the warm-up, 0-d int64.
    dropped: local steps that this rank left out because they were not finite, 0-d int64.
    left_out: exchanges that all ranks left out because a mean or an outer step was not finite, 0-d int64.
    begun: whether an exchange has begun and not ended, 0-d bools, one per fragment.
    """

    inner: Tree
    anchor: Tree
    pending: Tree
    outer: Tree
    sync: Tree
    alone: Tensor
    dropped: Tensor
    left_out: Tensor
    begun: Tree

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that are one rank's own."""
        return frozenset({"inner", "dropped"})

    @property
    def local_params(self) -> bool:
        """Tell that each rank goes to params of its own."""
        return True

    @property
    def added(self) -> Mapping[str, float]:
        """Say what the fields are in states of version 0.2.0, which took every exchange that ends as one that began."""
        return {"left_out": 0, "begun": True}

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        counts = Roles(dropped=("dropped",), left_out=("left_out",))
        return counts._replace(copies=("anchor",), watched=("anchor",), others=("inner", "sync"))


Store = torch.dtype | Literal["cpu"] | None
"""Where an anchor is kept: in a dtype, or in the host's memory."""


class OuterWarmup(NamedTuple):
    """The rule of a warm-up step, which the anchor follows. inner: the update of the inner optimizer."""

    inner: UpdateFn


class OuterLocal(NamedTuple):
    """The rule of a local step, left out if it is not finite. inner: the update of the inner optimizer."""

    inner: UpdateFn


def outer(
    inner: Transform,
    outer_tx: Transform,
    sync: Transform,
    *,
    fragments: Fragments = None,
    alpha: float = 0.0,
    store: Store = None,
    on_skip: Literal["keep", "anchor"] = "keep",
) -> Transform:
    """Take local steps by one optimizer, and now and then a common one by another: DiLoCo and its family.

    A `Round` says what follows the local step. Where the exchange of fragment f begins, the ranks average how far they
    went, x_f - p_f; where it ends, that is the gradient of the outer optimizer, whose params are the anchor x:

        d = C(x_f - p_f);    x_f <- x_f + outer_tx(d);    p_f <- x_f + alpha (p_f - x_f)

    In the warm-up there are no rounds. The inner step is taken from what comes in, which a link in front has to
    average, and the anchor follows. Params and inner state have to be alike on all ranks, so no warm-up step may follow
    a local one; it is refused, but for a pure one on an accelerator, which would have to wait for it. In `fn.every`
    none does. So a named method is

        chain(average(axis), outer(inner, outer_tx, compressed_average(axis, identity(), off())))

    Args:
        inner: the optimizer of the local steps, a chain that ends in a learning rate and does not communicate. Its
            state is never averaged or reset; one without a local phase takes its warm-up steps.
        outer_tx: the optimizer of the anchor; x - p is a descent direction, so any chain that ends in
            `scale_by_learning_rate` is one. It does not communicate.
        sync: what averages the differences, in its compressed phase, over any axis and in any codes.
        fragments: which params are exchanged together. None: all. A number P: leaf i is of fragment i mod P. A
            function: params -> a tree of the fragments' numbers. There are to be as many as in the schedule; a fragment
            that no round names is never exchanged, and one without params sends nothing.
        alpha: in [0, 1], how much of the rank's own params stays at a take-over. 0: params are then bitwise the anchor,
            rounded to their dtype, the same on all ranks.
        store: the dtype in which the anchor is kept; None: float32 for params in half precision, else their own. In a
            narrower one, outer steps of less than half a unit in its last place move nothing. "cpu": like None, but
            anchor, mean and outer state are kept in the host's memory, where outer steps are taken; an exchange then
            waits for the device, to see whether the mean is finite.
        on_skip: what becomes of the params where a mean is not finite, or the outer step. All ranks then leave out the
            exchange: anchor, outer state and errors stay bitwise. "keep": the ranks go on with their params; one whose
            own params or inner state are not finite takes the anchor and a fresh inner state. "anchor": all ranks go
            back to the anchor in this fragment, and the steps since are lost.
    Returns: a transform with a warm-up, rounds, and as phases the local one and the exchange of fragment 0. Where
        something begins or ends it returns `NewParams`, elsewhere updates. A round that ends what did not begin moves
        nothing, so what joins in between starts with the next begin. A local step that is not finite is left out
        by that rank alone, and counted (`dropped`). On one rank it runs all the same, as a lookahead optimizer.
    Raises: TypeError or ValueError that names the argument; from `init`, if the fragments do not fit the params.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512), algorithm 2:
        fragments, alpha, and the delay, which is `fn.every`'s.
    """
    check_inner(inner)
    check_outer_tx(outer_tx)
    check_sync(sync)
    check_fragments(fragments)
    check_alpha(alpha)
    check_store(store)
    if on_skip not in ("keep", "anchor"):
        raise ValueError(expected("on_skip", "'keep' or 'anchor'", f"{on_skip!r}"))
    step_alone = inner.local_update if has_phase(inner, Phase.LOCAL) else inner.warmup_update

    dtype, host = (None, torch.device("cpu")) if store == "cpu" else (store, None)

    def kept(x: Tensor) -> Tensor:
        return x.to(host, dtype or torch.promote_types(x.dtype, torch.float32))

    def init(params: Tree) -> OuterState:
        tree.check_real(params, "params")
        check_holds(dtype, params)
        anchor = tree.map(lambda p: kept(p.detach().clone(memory_format=torch.contiguous_format)), params)
        zeros_of = tree.leaves(tree.map(zeros_like_moment, params))
        parts = [[zeros_of[i] for i in places] for places in fragment_places(fragments, params)]
        pending = tree.map(lambda p: zeros_like_moment(p).to(host), params)
        device = next((p.device for p in tree.leaves(params)), torch.device("cpu"))
        alone, dropped, left_out = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
        outers = tuple(outer_tx.init([x.to(host) for x in part]) if part else () for part in parts)
        means = tuple(sync.init(part) if part else () for part in parts)
        begun = tuple(torch.zeros((), dtype=torch.bool, device=device) if part else () for part in parts)
        return OuterState(inner.init(params), anchor, pending, outers, means, alone, dropped, left_out, begun)

    def checked(updates: Tree, state: OuterState, params: Tree) -> Tree:
        """Return the params in the order of the state; refuse arguments that do not fit together."""
        check_state(state, OuterState)
        check_params(params)
        tree.check_updates(updates, state.anchor)
        return tree.in_order(params, state.anchor, "params")

    def warmup(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
        params = checked(updates, state, params)
        check_alike(state.alone)
        moves, after = inner.warmup_update(updates, state.inner, params)
        ok = all_addable(tree.leaves(moves)) & all_finite(_floats(after))
        anchor = tree.map(kept, apply_updates(params, moves))
        anchor = tree.map(lambda x: torch.where(ok.to(x.device), x, torch.nan), anchor)
        axes = tuple(current_binding().axes)  # of averaged gradients all ranks make the same, which vmap cannot know
        anchor = tree.map(lambda x: found_alike(x, axes), anchor) if axes else anchor
        return moves, state._replace(inner=after, anchor=anchor)

    def local(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
        params = checked(updates, state, params)
        moves, after = step_alone(updates, state.inner, params)
        ok = (all_addable(tree.leaves(moves)) & all_finite(_floats(after))).to(state.dropped.device)
        for new, old in zip(roles.find(after, "skips"), roles.find(state.inner, "skips"), strict=True):
            ok = ok & (new == old)  # what a guard inside skips counts as dropped
        moves = tree.map(lambda u: torch.where(ok.to(u.device), u, -0.0), moves)
        leaves, structure = tree.flatten(after)  # a guard inside may return another class than it was given
        chosen = [_chosen(ok, new, old) for new, old in zip(leaves, tree.leaves(state.inner), strict=True)]
        after = tree.unflatten(structure, chosen)
        dropped = state.dropped + (~ok).to(torch.int64)
        return moves, state._replace(inner=after, alone=state.alone + 1, dropped=dropped)

    def difference(places: Sequence[int], here: list[Tensor], state: OuterState, fragment: int) -> OuterState:
        """Note how far this rank went, in the place of the mean."""
        anchor, structure = tree.flatten(state.anchor)
        pending = tree.leaves(state.pending)
        starts = [anchor[i].to(here[i]).to(pending[i].dtype) for i in places]  # on the device of the params
        went = [(x - here[i].to(x.dtype)).to(host) for i, x in zip(places, starts, strict=True)]
        begun = _with(state.begun, fragment, torch.ones_like(state.begun[fragment]))
        return state._replace(pending=tree.unflatten(structure, put(pending, places, went)), begun=begun)

    def mean(places: Sequence[int], here: list[Tensor], state: OuterState, fragment: int) -> OuterState:
        """Send how far the ranks went; keep the mean, and what was not delivered."""
        anchor, structure = tree.flatten(state.anchor)
        pending = tree.leaves(state.pending)
        went, before = [pending[i].to(here[i].device) for i in places], state.sync[fragment]
        found, errors = sync.compressed_update(went, before, [anchor[i] for i in places])
        ok = all_finite(tree.leaves(found))
        errors = tree.map(lambda new, old: _chosen(ok, new, old), errors, before)
        means = [d.to(pending[i]) for i, d in zip(places, tree.leaves(found), strict=True)]
        after = tree.unflatten(structure, put(pending, places, means))
        return state._replace(pending=after, sync=_with(state.sync, fragment, errors))

    def outer_step(
        places: Sequence[int], here: list[Tensor], state: OuterState, fragment: int
    ) -> tuple[list[Tensor], OuterState]:
        """Take the outer step, if the exchange has begun; return the params after it, and the state."""
        begun = state.begun[fragment]
        if _is_known(~begun):
            return here, state
        anchor, structure = tree.flatten(state.anchor)
        pending = tree.leaves(state.pending)
        before, went = [anchor[i] for i in places], [pending[i] for i in places]
        wide = [x.to(d.dtype) for x, d in zip(before, went, strict=True)]
        moves, after = outer_tx.local_update(went, state.outer[fragment], wide)
        new = [x + u.to(x.dtype) for x, u in zip(wide, tree.leaves(moves), strict=True)]
        rounded = [x.to(here[i].dtype) for i, x in zip(places, new, strict=True)]
        stored = [x.to(old.dtype) for x, old in zip(new, before, strict=True)]
        ok = all_finite([*went, *new, *rounded, *stored, *_floats(after)])
        taken = ok & begun.to(ok.device)
        after = tree.map(lambda new, old: _chosen(taken, new, old), after, state.outer[fragment])
        now = [_chosen(taken, x, old) for x, old in zip(stored, before, strict=True)]
        cleared = tree.unflatten(structure, put(pending, places, [torch.zeros_like(d) for d in went]))
        state = state._replace(
            anchor=tree.unflatten(structure, put(anchor, places, now)),
            pending=cleared,
            outer=_with(state.outer, fragment, after),
            left_out=state.left_out + (begun & ~ok.to(begun.device)).to(torch.int64),
            begun=_with(state.begun, fragment, torch.zeros_like(begun)),
        )
        wide = [x.to(here[i].device, d.dtype) for i, x, d in zip(places, now, went, strict=True)]
        there = [_between(x, here[i], alpha) for i, x in zip(places, wide, strict=True)]
        if on_skip == "anchor":
            own = [here[i].to(y.dtype) for i, y in zip(places, there, strict=True)]
            back = [_chosen(begun, x.to(y), p) for x, y, p in zip(now, there, own, strict=True)]
        else:
            back = [here[i].to(y.dtype) for i, y in zip(places, there, strict=True)]
        there = [_chosen(taken, y, x) for y, x in zip(there, back, strict=True)]
        there = put(here, places, there)
        unharmed = ok | ~begun.to(ok.device)
        return (there, state) if _is_known(unharmed) else healed(unharmed, here, there, state)

    def healed(
        ok: Tensor, here: list[Tensor], there: list[Tensor], state: OuterState
    ) -> tuple[list[Tensor], OuterState]:
        """Where an exchange was skipped, give a rank that is not finite the anchor and a fresh inner state."""
        own = all_finite([*here, *_floats(state.inner)])
        fine = ok.to(own.device) | own
        anchor, structure = tree.flatten(state.anchor)
        there = [_chosen(fine, y, x.to(y)) for y, x in zip(there, anchor, strict=True)]
        fresh = inner.init(tree.unflatten(structure, [y.to(p.dtype) for y, p in zip(there, here, strict=True)]))
        return there, state._replace(inner=tree.map(lambda old, new: _chosen(fine, old, new), state.inner, fresh))

    def taken(part: Part, here: Tree, state: OuterState) -> tuple[Tree, OuterState]:
        """Take a part of an exchange; return the params and the state."""
        places = places_in(fragments, here, part.fragment, "end" if part.kind == "outer" else "begin")
        if not places:
            return here, state
        leaves, structure = tree.flatten(here)
        if part.kind != "outer":
            return here, (difference if part.kind == "difference" else mean)(places, leaves, state, part.fragment)
        leaves, state = outer_step(places, leaves, state, part.fragment)
        return tree.unflatten(structure, leaves), state

    def exchange(round_: Round) -> UpdateFn:
        def update(updates: Tree, state: OuterState, params: Tree, /) -> tuple[NewParams, OuterState]:
            moves, state = local(updates, state, params)
            here = apply_updates(tree.in_order(params, state.anchor, "params"), moves)
            for part in round_.exchange:
                here, state = taken(part, here, state)
            return NewParams(here), state

        return update

    def of_part(part: Part) -> UpdateFn:
        def update(updates: Tree, state: OuterState, params: Tree, /) -> tuple[NewParams, OuterState]:
            check_state(state, OuterState)
            here, state = taken(part, tree.in_order(params, state.anchor, "params"), state)
            return NewParams(here), state

        return update

    @memoized
    def rounds(found: Round | Part) -> UpdateFn:
        if found == Round() or (isinstance(found, Part) and found.kind == "local"):
            return alone
        return of_part(found) if isinstance(found, Part) else exchange(found)

    alone = Step(OuterLocal(step_alone), local)
    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL}) if Phase.LOCAL in inner.needs_warmup else frozenset[Phase]()
    facts = merged(Facts(local_params=True), *map(facts_of, (inner, outer_tx, sync)))
    followed = Step(OuterWarmup(inner.warmup_update), warmup, lambda state, read: check_alike(read(state.alone)))
    return Transform(init, followed, rounds(Round(0, 0)), alone, needs, rounds, facts)


def _floats(state: Tree) -> list[Tensor]:
    return [x for x in tree.leaves(state) if x.is_floating_point()]


def _with(states: tuple[Tree, ...], place: int, new: Tree) -> tuple[Tree, ...]:
    return (*states[:place], new, *states[place + 1 :])


def _between(x: Tensor, here: Tensor, alpha: float) -> Tensor:
    """Return x + alpha (here - x); x itself, bitwise, for alpha 0."""
    return x + alpha * (here.to(x.dtype) - x) if alpha else x


def _is_known(ok: Tensor) -> bool:
    """Tell whether a flag is known to be true without waiting for a device."""
    return ok.device.type == "cpu" and is_concrete(ok) and bool(ok)


def _chosen(ok: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` where ok, else `old`."""
    return new if new is old or _is_known(ok) else torch.where(ok.to(new.device), new, old)
