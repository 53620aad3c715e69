"""Local steps: each rank goes its own way for a while, then the ranks agree on where they went.

anchor x                 the params that all ranks agreed on last
  | h local steps        rank r goes to p_r; nothing is sent
  | d = mean(x - p_r)    one all-reduce of the differences, in full precision or in any codes
  | x <- outer step      by any optimizer, with d, the pseudo-gradient, in the place of a gradient
  | p_r <- x             and so on
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import (
    Chained,
    Facts,
    NewParams,
    Part,
    Phase,
    Round,
    Step,
    Transform,
    UpdateFn,
    apply_updates,
    check_arguments,
    check_interval,
    check_is_transform,
    check_state,
    facts_of,
    has_phase,
    links_of,
    merged,
    name_of,
)
from fn.collectives.agreement import device_of, true_on_all
from fn.collectives.axis import current_binding
from fn.collectives.simulation import found_alike
from fn.compiling import memoized, original
from fn.errors import expected
from fn.kernels import lists, rules
from fn.kernels.flags import are_assumed, known, read
from fn.kernels.tracing import is_concrete
from fn.roles import declare
from fn.transforms.adam import zeros_like_moment
from fn.transforms.decay_and_lr import Rate
from fn.transforms.skip_nonfinite import all_addable, all_finite

Tree = Any


@declare(
    rank_local=("inner", "dropped"),
    local_params=True,
    added={"left_out": 0, "begun": True},  # version 0.2.0 took every exchange that ends as one that began
    dropped=("dropped",),
    left_out=("left_out",),
    copies=("anchor",),
    watched=("anchor",),
    others=("inner", "sync"),
)
class OuterState(NamedTuple):
    """State of `outer`.

    inner: the state of the inner optimizer. It is each rank's own, and no exchange changes it.
    anchor: the params that all ranks agreed on last, in float32 where params are in half precision.
    pending: the mean pseudo-gradients for the next outer step, this rank's own until they are averaged.
    outer: the states of the outer optimizer, one per fragment; () for a fragment without params, as in `sync`, `begun`.
    sync: the states of the transform that averages, one per fragment.
    alone: local steps since the warm-up, 0-d int64.
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


Fragments = int | Callable[[Tree], Tree] | None
"""None: one fragment. A number P: leaf i is in fragment i mod P. A function: params -> a tree of numbers."""

Store = torch.dtype | Literal["cpu"] | None
"""Where an anchor is kept: in a dtype, or in the host's memory."""


class OuterWarmup(NamedTuple):
    """The rule of a warm-up step; the anchor is set to the params after it. inner: the inner optimizer's update."""

    inner: UpdateFn


class PlainWarmup(NamedTuple):
    """The rule of a warm-up step without an anchor. inner: the inner optimizer's update."""

    inner: UpdateFn


class OuterLocal(NamedTuple):
    """The rule of a local step, which is left out if it is not finite.

    inner: the inner optimizer's update. of: makes the same step of another update of the inner optimizer.
    """

    inner: UpdateFn
    of: Callable[[UpdateFn], Step]


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
    """Take local steps by one optimizer, and now and then a common step by another: DiLoCo and its family.

    A `Round` says what follows the local step. Where the exchange of fragment f begins, the ranks average their
    pseudo-gradients x_f - p_f. Where it ends, the mean is the gradient of the outer optimizer, whose params are the
    anchor x:

        d = C(x_f - p_f);    x_f <- x_f + outer_tx(d);    p_f <- x_f + alpha (p_f - x_f)

    The warm-up has no rounds: the inner optimizer takes its steps on gradients that a link in front averages, and the
    anchor is a copy of the params. Params and inner state are alike on all ranks then, so no warm-up step may follow a
    local one, as none does in `fn.every`. It is refused, except in a pure step on an accelerator, which would have to
    wait for the device to see it. So a named method is

        chain(average(axis), outer(inner, outer_tx, compressed_average(axis, identity(), off())))

        >>> import torch, fn
        >>> sgd, sync = fn.scale_by_learning_rate(0.1), fn.compressed_average("data", fn.identity(), fn.off())
        >>> tx = fn.outer(sgd, fn.scale_by_learning_rate(0.5), sync)
        >>> params, state = torch.tensor([1.0]), tx.init(torch.tensor([1.0]))
        >>> for step in range(4):                # four local steps of 0.1, of which the outer step takes half
        ...     updates, state = tx.update(fn.every(4)(step))(torch.tensor([1.0]), state, params)
        ...     params = fn.apply_updates(params, updates)
        >>> params
        tensor([0.8000])

    Args:
        inner: the optimizer of the local steps, a chain that ends in a learning rate and does not communicate. Its
            state is never averaged or reset; one without a local phase takes its warm-up steps.
        outer_tx: the optimizer of the anchor, any chain that ends in `scale_by_learning_rate`. It does not communicate.
        sync: the transform whose compressed phase averages the pseudo-gradients, over any axis and in any codes.
        fragments: which params are exchanged together. None: all. A number P: leaf i is in fragment i mod P. A
            function: params -> a tree of the fragments' numbers. The schedule has to have as many: a fragment that no
            round names is never exchanged. One without params sends nothing.
        alpha: in [0, 1], the weight of the rank's own params after an exchange. 0: the params are bitwise the anchor,
            rounded to their dtype, the same on all ranks.
        store: the dtype in which the anchor is kept; None: float32 for params in half precision, else their own. In a
            narrower one, outer steps of less than half a unit in its last place move nothing. "cpu": like None, but
            anchor, mean and outer state are kept in the host's memory, where outer steps are taken; an exchange then
            waits for the device, to see whether the mean is finite.
        on_skip: what becomes of the params where a mean or an outer step is not finite. All ranks then leave out the
            exchange: anchor, outer state and residual errors stay bitwise. "keep": the ranks go on with their params. A
            rank whose params or inner state are not finite takes the anchor and a fresh inner state. "anchor": all
            ranks go back to the anchor in this fragment, and the steps since are lost.
    Returns: a transform with a warm-up, rounds, and as phases the local one and the exchange of fragment 0. Where an
        exchange begins or ends it returns `NewParams`, elsewhere updates. A round that ends an exchange that did not
        begin moves nothing, so params that join in between start with the next exchange. A rank leaves out a local step
        that is not finite alone, and counts it (`dropped`). On one rank it is a lookahead optimizer.
    Raises: TypeError or ValueError that names the argument; from `init`, if the fragments do not fit the params.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512), algorithm 2:
        fragments, alpha, and the delay, which is `fn.every`'s.
    """
    check_inner(inner)
    check_outer_tx(outer_tx)
    check_sync(sync)
    if facts_of(sync).unequal:  # the anchor is taken to be the same on all ranks, and they would drift apart in silence
        cure = "with an average of pairs write fn.own_anchors(average, inner, outer_tx, sync)"
        raise ValueError(expected("sync", "an average that is the same on all ranks", "one that differs", cure))
    check_fragments(fragments)
    check_interval("alpha", alpha, "[0, 1]")
    check_store(store)
    if on_skip not in ("keep", "anchor"):
        raise ValueError(expected("on_skip", "'keep' or 'anchor'", f"{on_skip!r}"))
    move = moves_of(outer_tx)
    inner_update = inner.local_update if has_phase(inner, Phase.LOCAL) else inner.warmup_update
    dtype, host = (None, torch.device("cpu")) if store == "cpu" else (store, None)
    shards = facts_of(inner).shards  # the ranks of an island, which leave out together

    def as_anchor(x: Tensor) -> Tensor:
        return x.to(host, dtype or torch.promote_types(x.dtype, torch.float32))

    def init(params: Tree) -> OuterState:
        tree.check_real(params, "params")
        check_holds(dtype, params)
        anchor = tree.map(lambda p: as_anchor(p.detach().clone(memory_format=torch.contiguous_format)), params)
        zeros = tree.leaves(tree.map(zeros_like_moment, params))
        parts = [[zeros[i] for i in places] for places in fragment_places(fragments, params)]
        pending = tree.map(lambda p: zeros_like_moment(p).to(host), params)
        device = next((p.device for p in tree.leaves(params)), torch.device("cpu"))
        alone, dropped, left_out = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
        outer_states = tuple(outer_tx.init([x.to(host) for x in part]) if part else () for part in parts)
        sync_states = tuple(sync.init(part) if part else () for part in parts)
        begun = tuple(torch.zeros((), dtype=torch.bool, device=device) if part else () for part in parts)
        inner_state = inner.init(params)
        return OuterState(inner_state, anchor, pending, outer_states, sync_states, alone, dropped, left_out, begun)

    def warmup(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
        updates, params = check_arguments(updates, state, params, OuterState, "anchor")
        check_alike(state.alone)
        moves, inner_state = inner.warmup_update(updates, state.inner, params)
        ok = all_addable(tree.leaves(moves)) & all_finite(_floats(inner_state))
        anchor = tree.map(as_anchor, apply_updates(params, moves))
        # a guard around it looks at the anchor only, so what is wrong elsewhere has to show there
        anchor = tree.map(lambda x: torch.where(ok.to(x.device), x, torch.nan), anchor)
        axes = tuple(current_binding().axes)  # of averaged gradients all ranks make the same, which vmap cannot know
        anchor = tree.map(lambda x: found_alike(x, axes), anchor) if axes else anchor
        return moves, state._replace(inner=inner_state, anchor=anchor)

    def alone_by(update: UpdateFn) -> Step:
        def local(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
            updates, params = check_arguments(updates, state, params, OuterState, "anchor")
            moves, inner_state, ok = taken_alone(update, updates, state.inner, params, shards)
            dropped = state.dropped if known(ok) else state.dropped + (~ok).to(state.dropped)
            return moves, state._replace(inner=inner_state, alone=state.alone + 1, dropped=dropped)

        return Step(OuterLocal(update, alone_by), local)

    def difference(places: Sequence[int], params: list[Tensor], state: OuterState, fragment: int) -> OuterState:
        """Keep this rank's pseudo-gradient, anchor - params, where the mean belongs."""
        anchor, structure = tree.flatten(state.anchor)
        pending = tree.leaves(state.pending)
        starts = [anchor[i].to(params[i]).to(pending[i].dtype) for i in places]  # on the device of the params
        steps = lists.elementwise(rules.plus, (starts, [params[i] for i in places]), -1.0)
        steps = [x.to(host) for x in steps]
        begun = _with(state.begun, fragment, torch.ones_like(state.begun[fragment]))
        return state._replace(pending=tree.unflatten(structure, put(pending, places, steps)), begun=begun)

    def mean(places: Sequence[int], params: list[Tensor], state: OuterState, fragment: int) -> OuterState:
        """Average the pseudo-gradients over the ranks; keep the mean, and the residual errors if it is finite."""
        anchor, structure = tree.flatten(state.anchor)
        pending = tree.leaves(state.pending)
        steps, before = [pending[i].to(params[i].device) for i in places], state.sync[fragment]
        averaged, after = sync.compressed_update(steps, before, [anchor[i] for i in places])
        ok = true_on_all(all_finite(tree.leaves(averaged)), shards, device_of(params))
        after = tree.map(lambda new, old: _chosen(ok, new, old), after, before)
        means = [d.to(pending[i]) for i, d in zip(places, tree.leaves(averaged), strict=True)]
        pending_tree = tree.unflatten(structure, put(pending, places, means))
        return state._replace(pending=pending_tree, sync=_with(state.sync, fragment, after))

    def outer_step(
        places: Sequence[int], params: list[Tensor], state: OuterState, fragment: int
    ) -> tuple[list[Tensor], OuterState]:
        """Take the outer step, if the exchange has begun; return the params after it, and the state."""
        begun = state.begun[fragment]
        if _is_known(~begun):
            return params, state
        anchor, structure = tree.flatten(state.anchor)
        pending = tree.leaves(state.pending)
        before, means = [anchor[i] for i in places], [pending[i] for i in places]
        wide = [x.to(d.dtype) for x, d in zip(before, means, strict=True)]
        moves, outer_state = move(means, state.outer[fragment], wide)
        new = lists.elementwise(rules.plus, (wide, moves), 1.0, out=room_in(moves, [*means, *wide]))
        rounded = [x.to(params[i].dtype) for i, x in zip(places, new, strict=True)]
        stored = [x.to(old.dtype) for x, old in zip(new, before, strict=True)]
        results = [*means, *new, *rounded, *stored, *_floats(outer_state)]
        ok = all_finite([*{id(x): x for x in results}.values()])  # mostly, what was rounded is the same tensor
        ok = true_on_all(ok, shards, device_of(params))
        taken = ok & begun.to(ok.device)
        if read(taken):  # then nothing below is selected, which would take a pass and memory for each tensor
            ok = taken = torch.ones_like(taken, device="cpu")
        outer_state = tree.map(lambda new, old: _chosen(taken, new, old), outer_state, state.outer[fragment])
        after = [_chosen(taken, x, old) for x, old in zip(stored, before, strict=True)]
        state = state._replace(
            anchor=tree.unflatten(structure, put(anchor, places, after)),
            pending=tree.unflatten(structure, put(pending, places, _zeros_like(means))),
            outer=_with(state.outer, fragment, outer_state),
            left_out=state.left_out if _is_known(ok) else state.left_out + (begun & ~ok.to(begun.device)).long(),
            begun=_with(state.begun, fragment, torch.zeros_like(begun)),
        )
        anchors = [x.to(params[i].device, d.dtype) for i, x, d in zip(places, after, means, strict=True)]
        moved = [_between(x, params[i], alpha) for i, x in zip(places, anchors, strict=True)]
        if _is_known(taken):
            return put(params, places, moved), state
        instead = [params[i].to(x.dtype) for i, x in zip(places, moved, strict=True)]
        if on_skip == "anchor":
            instead = [_chosen(begun, x.to(p), p) for x, p in zip(after, instead, strict=True)]
        moved = put(params, places, [_chosen(taken, x, old) for x, old in zip(moved, instead, strict=True)])
        unharmed = ok | ~begun.to(ok.device)
        return (moved, state) if _is_known(unharmed) else healed(unharmed, params, moved, state)

    def healed(
        ok: Tensor, params: list[Tensor], moved: list[Tensor], state: OuterState
    ) -> tuple[list[Tensor], OuterState]:
        """Where an exchange was left out, give a rank that is not finite the anchor and a fresh inner state.

        Its params would otherwise make every later mean not finite, and no exchange would ever be taken again.
        """
        is_finite = true_on_all(all_finite([*params, *_floats(state.inner)]), shards, device_of(params))
        fine = ok.to(is_finite.device) | is_finite
        anchor, structure = tree.flatten(state.anchor)
        moved = [_chosen(fine, x, a.to(x)) for x, a in zip(moved, anchor, strict=True)]
        fresh = inner.init(tree.unflatten(structure, [x.to(p.dtype) for x, p in zip(moved, params, strict=True)]))
        return moved, state._replace(inner=tree.map(lambda old, new: _chosen(fine, old, new), state.inner, fresh))

    def take_part(part: Part, params: Tree, state: OuterState) -> tuple[Tree, OuterState]:
        """Take a part of an exchange; return the params and the state."""
        places = places_in(fragments, params, part.fragment, "end" if part.kind == "outer" else "begin")
        if not places:
            return params, state
        leaves, structure = tree.flatten(params)
        if part.kind != "outer":
            return params, (difference if part.kind == "difference" else mean)(places, leaves, state, part.fragment)
        leaves, state = outer_step(places, leaves, state, part.fragment)
        return tree.unflatten(structure, leaves), state

    def exchange(round_: Round) -> UpdateFn:
        def update(updates: Tree, state: OuterState, params: Tree, /) -> tuple[NewParams, OuterState]:
            moves, state = alone(updates, state, params)
            params = apply_updates(tree.in_order(params, state.anchor, "params"), moves)
            for part in round_.exchange:
                params, state = take_part(part, params, state)
            return NewParams(params), state

        return update

    def of_part(part: Part) -> UpdateFn:
        def update(updates: Tree, state: OuterState, params: Tree, /) -> tuple[NewParams, OuterState]:
            check_state(state, OuterState)
            params, state = take_part(part, tree.in_order(params, state.anchor, "params"), state)
            return NewParams(params), state

        return update

    @memoized
    def rounds(key: Round | Part) -> UpdateFn:
        if key == Round() or (isinstance(key, Part) and key.kind == "local"):
            return alone
        return of_part(key) if isinstance(key, Part) else exchange(key)

    alone = alone_by(inner_update)
    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL}) if Phase.LOCAL in inner.needs_warmup else frozenset[Phase]()
    facts = merged(Facts(local_params=True), *map(facts_of, (inner, outer_tx, sync)))
    together = Step(OuterWarmup(inner.warmup_update), warmup, lambda state, read: check_alike(read(state.alone)))
    return Transform(init, together, rounds(Round(0, 0)), alone, needs, rounds, facts)


def taken_alone(
    update: UpdateFn, updates: Tree, state: Tree, params: Tree, shards: Sequence[str] = ()
) -> tuple[Tree, Tree, Tensor]:
    """Take a step that this rank alone leaves out where it is not finite: no message tells the others.

    Args: shards: axes over which the tensors are divided, whose ranks leave it out together. The others: of an update.
    Returns: its updates, -0.0 where it is left out; the state after it; whether it was taken, 0-d bool.
    """
    moves, after = update(updates, state, params)
    ok = all_addable(tree.leaves(moves)) & all_finite(_floats(after))
    for new, old in zip(roles.find(after, "skips"), roles.find(state, "skips"), strict=True):
        ok = ok if new is old else ok & (new == old).to(ok.device)  # what a guard inside skips counts as left out
    ok = true_on_all(ok, shards, device_of(params))
    if known(ok):
        return moves, after, ok
    moves = tree.map(lambda u: torch.where(ok.to(u.device), u, -0.0), moves)
    leaves, structure = tree.flatten(after)  # a guard inside may return another class than it was given
    chosen = [_chosen(ok, new, old) for new, old in zip(leaves, tree.leaves(state), strict=True)]
    return moves, tree.unflatten(structure, chosen), ok


def moves_of(outer_tx: Transform) -> Callable[[list[Tensor], Tree, list[Tensor]], tuple[list[Tensor], Tree]]:
    """Return the update of an outer optimizer, whose last link, the rate, writes over what the others made.

    An exchange is when memory is full: what is written over is a copy of the params less.
    """
    update = original(outer_tx.local_update)
    *front, last = update.links if isinstance(update, Chained) else [update]
    if not (isinstance(last, Step) and isinstance(last.rule, Rate)):  # in a chain inside of the chain
        return lambda means, state, params: _leaves_first(outer_tx.local_update(means, state, params))
    lr = last.rule.lr

    def move(means: list[Tensor], state: Tree, params: list[Tensor]) -> tuple[list[Tensor], Tree]:
        directions, after = _leaves_first(Chained((*front,))(means, state[:-1], params)) if front else (means, ())
        room = room_in(directions, [*means, *params, *tree.leaves((state, after))])
        moves = lists.elementwise(rules.scaled, (directions,), -lr, out=room)
        return moves, (*after, state[-1]) if front else state

    return move


def _leaves_first(result: tuple[Tree, Tree]) -> tuple[list[Tensor], Tree]:
    return tree.leaves(result[0]), result[1]


def room_in(tensors: list[Tensor], others: list[Tensor]) -> list[list[Tensor]] | None:
    """Return tensors of a device as what may be written over; None if they lie in the memory of others, or elsewhere.

    On a CPU results lie in memory that is used again, and a tensor at a time is enough.
    """
    on_device = all(x.device.type != "cpu" for x in tensors) and is_concrete(*tensors, *others)
    if not on_device or any(x.requires_grad for x in (*tensors, *others)) or len({x.dtype for x in tensors}) > 1:
        return None
    taken = {x.untyped_storage()._cdata for x in others}
    return None if any(x.untyped_storage()._cdata in taken for x in tensors) else [tensors]


def _floats(state: Tree) -> list[Tensor]:
    return [x for x in tree.leaves(state) if x.is_floating_point()]


def _with(states: tuple[Tree, ...], place: int, new: Tree) -> tuple[Tree, ...]:
    return (*states[:place], new, *states[place + 1 :])


def _between(anchor: Tensor, p: Tensor, alpha: float) -> Tensor:
    """Return anchor + alpha (p - anchor); the anchor itself, bitwise, for alpha 0."""
    return anchor + alpha * (p.to(anchor.dtype) - anchor) if alpha else anchor


def _zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros, without memory for them where they are copied into the state at once."""
    if not are_assumed() or {x.device.type for x in tensors} <= {"cpu"}:
        return [*map(torch.zeros_like, tensors)]
    kinds = {(x.dtype, x.device): x for x in tensors}
    zeros = {kind: x.new_zeros(()) for kind, x in kinds.items()}
    return [zeros[x.dtype, x.device].expand_as(x) for x in tensors]


def _is_known(ok: Tensor) -> bool:
    """Tell whether a flag is known to be true without waiting for a device."""
    return ok.device.type == "cpu" and is_concrete(ok) and bool(ok)


def _chosen(ok: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` where ok, else `old`."""
    return new if new is old or _is_known(ok) else torch.where(ok.to(new.device), new, old)


def check_fragments(fragments: Any) -> None:
    """Refuse an argument `fragments` of another kind with a TypeError, a number below 1 with a ValueError."""
    if fragments is None or callable(fragments):
        return
    if not isinstance(fragments, int) or isinstance(fragments, bool):
        wanted = "a number, None, or a function from params to a tree of numbers"
        raise TypeError(expected("fragments", wanted, f"{fragments!r}"))
    if fragments < 1:
        raise ValueError(expected("fragments", "a number of at least 1", f"{fragments}"))


def fragment_places(fragments: Fragments, params: Tree) -> list[list[int]]:
    """Return the places of each fragment's leaves, among the leaves of the params.

    If P is greater than the number of leaves, fragments without a leaf are left out.

    Raises: ValueError if a function returns another structure than that of the params, or a number below 0; TypeError
        if it returns what is no whole number.
    """
    count = len(tree.leaves(params))
    if fragments is None:
        return [[*range(count)]]
    if isinstance(fragments, int):
        return [[*range(f, count, fragments)] for f in range(min(fragments, max(count, 1)))]
    numbered = tree.in_order(fragments(params), params, "fragments")
    numbers_of = tree.leaves(numbered)
    for path, number in zip(tree.paths(numbered), numbers_of, strict=True):
        if not isinstance(number, numbers.Integral) or isinstance(number, bool):
            raise TypeError(expected("fragments", f"leaf {path!r} to be a whole number", f"{number!r}"))
        if number < 0:
            raise ValueError(expected("fragments", f"leaf {path!r} to be a number from 0", f"{number}"))
    parts: list[list[int]] = [[] for _ in range(1 + max(numbers_of, default=0))]
    for place, number in enumerate(numbers_of):
        parts[number].append(place)
    return parts


def places_in(fragments: Fragments, params: Tree, fragment: int, field: str) -> Sequence[int]:
    """Return the places of a fragment that a round names.

    A fragment behind the last leaf is empty: several param groups may have different numbers of leaves, and a function
    numbers them together.

    Raises: ValueError if there is none of that number.
    """
    parts = fragment_places(fragments, params)
    if fragment < len(parts):
        return parts[fragment]
    count = fragments if isinstance(fragments, int) else len(parts)
    if callable(fragments) or fragment < count:
        return ()
    cure = "give fn.every(fragments=...) and fn.outer(fragments=...) the same number"
    raise ValueError(expected(f"phase.{field}", f"one of {count} fragments, from 0", f"{fragment}", cure))


def put(leaves: Sequence[Tensor], places: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves, with new ones at some places."""
    new_at = dict(zip(places, new, strict=True))
    return [new_at.get(i, x) for i, x in enumerate(leaves)]


def check_inner(inner: Any) -> None:
    """Refuse an inner optimizer that communicates, as far as its facts say, or that has rounds of its own."""
    check_is_transform("inner", inner)
    if inner.rounds is not None:
        raise ValueError(expected("inner", "an optimizer that takes steps", "one with rounds, such as fn.outer"))
    _check_silent("inner", inner, "local steps send nothing; put fn.average(axis) in front of fn.outer for the warm-up")


def check_outer_tx(outer_tx: Any) -> None:
    """Refuse an outer optimizer that communicates or does not end in a learning rate: it would climb, not descend."""
    check_is_transform("outer_tx", outer_tx)
    _check_silent("outer_tx", outer_tx, "all ranks take the outer step alike; sync is what communicates")
    last = links_of(outer_tx.local_update)[-1:] if has_phase(outer_tx, Phase.LOCAL) else []
    if not last or not isinstance(last[0].update, Step) or not isinstance(last[0].update.rule, Rate):
        got = name_of(last[0].update) if last else "none in its local phase"
        cure = "write fn.chain(fn.trace(0.9, nesterov=True), fn.scale_by_learning_rate(0.7))"
        raise ValueError(expected("outer_tx", "scale_by_learning_rate as the last link", got, cure))


def check_sync(sync: Any) -> None:
    """Refuse a transform that averages in the warm-up only. `fn.chain()`, which never averages, is for one rank."""
    check_is_transform("sync", sync)
    if not has_phase(sync, Phase.COMPRESSED):
        raise ValueError(expected("sync", "an average with a compressed phase", "one without"))
    if links_of(sync.warmup_update) and not links_of(sync.compressed_update):
        cure = "for the exact mean write fn.compressed_average(axis, fn.identity(), fn.off())"
        raise ValueError(expected("sync", "an average in the compressed phase", "one in the warm-up only", cure))


def check_store(store: Any) -> None:
    """Refuse what is neither "cpu" nor a floating dtype of 16 bits or more."""
    if store is None or store == "cpu":
        return
    if not isinstance(store, torch.dtype):
        raise TypeError(expected("store", "a dtype, 'cpu' or None", f"{store!r}"))
    if not store.is_floating_point or store.itemsize < 2:
        raise ValueError(expected("store", "a floating dtype of 16 bits or more", f"{store}"))


def check_holds(store: torch.dtype | None, params: Any) -> None:
    """Refuse params that overflow in the dtype of their anchor: no exchange of them would ever be finite."""
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        if narrows(store, p.dtype) and is_concrete(p) and not p.is_meta and (p.isfinite() & p.to(store).isinf()).any():
            got = f"{store}, in which leaf {path!r} overflows"
            raise ValueError(expected("store", "a dtype that holds the params", got, "use torch.bfloat16, or None"))


def narrows(store: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Tell whether a dtype has a smaller range than that of the params."""
    return store is not None and torch.finfo(store).max < torch.finfo(dtype).max


def check_alike(alone: Tensor) -> None:
    """Refuse a warm-up step behind local ones, where the host can tell: the ranks' inner states differ then."""
    if alone.device.type == "cpu" and is_concrete(alone) and alone > 0:
        got = f"WARMUP after {int(alone)} steps of rounds"
        cure = "no exchange brings the inner states of the ranks together; begin with the warm-up, as fn.every does"
        raise ValueError(expected("phase", "LOCAL or a round", got, cure))


def _check_silent(argument: str, transform: Transform, cure: str) -> None:
    if axes := facts_of(transform).axes:
        got = f"one over {', '.join(map(repr, axes))}"
        raise ValueError(expected(argument, "no communication over an axis", got, cure))
