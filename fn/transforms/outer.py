"""Local steps: each rank goes its own way for a while, then the ranks agree on where they went.

anchor x                 the params that all ranks agreed on last
  | h local steps        rank r goes to p_r; nothing is sent
  | d = mean(x - p_r)    one all-reduce of the differences, in full precision or in any codes
  | x <- outer step      by any optimizer, with d, the pseudo-gradient, in the place of a gradient
  | p_r <- x             and so on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import (
    Chained,
    Exchange,
    Facts,
    Phase,
    Round,
    Transform,
    UpdateFn,
    apply_updates,
    check_arguments,
    check_state,
    facts_of,
    merged,
    says,
)
from fn.collectives.agreement import device_of, true_on_all
from fn.collectives.axis import current_binding
from fn.collectives.simulation import found_alike
from fn.compiling import original
from fn.kernels import lists, rules
from fn.kernels.flags import are_assumed, known, read
from fn.kernels.tracing import is_concrete
from fn.roles import declare
from fn.transforms import norm_guard
from fn.transforms.adam import zeros_like_moment
from fn.transforms.decay_and_lr import Rate
from fn.transforms.fragments import Fragments, fragment_places, places_in, put
from fn.transforms.round_arguments import (
    check_alike,
    check_holds,
    check_outer,
    check_schedule,
    local_phase,
)
from fn.transforms.skip_nonfinite import all_finite

Tree = Any


@declare(
    rank_local=("inner", "dropped"),
    local_params=True,
    agreed=lambda state, params: tree.leaves(state.anchor) if float(state.alone) else None,
    difference=("pending",),
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
    guard: what the guard knows of norms, per fragment; () without a guard.
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
    guard: Tree = ()


Store = torch.dtype | Literal["cpu"] | None
"""Where an anchor is kept: in a dtype, or in the host's memory."""


class OuterWarmup(NamedTuple):
    """The rule of a warm-up step; the anchor is set to the params after it. inner: the inner optimizer's update."""

    inner: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)

    def check(self, state: OuterState, read: Callable[[Tensor], Tensor]) -> None:
        """Refuse a state in which the ranks went their own ways."""
        check_alike(read(state.alone))


class PlainWarmup(NamedTuple):
    """The rule of a warm-up step without an anchor. inner: the inner optimizer's update."""

    inner: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)

    def check(self, state: Tree, read: Callable[[Tensor], Tensor]) -> None:
        """Refuse a state in which the ranks went their own ways."""
        check_alike(read(state.alone))


@says(hands_down=True)
class OuterLocal(NamedTuple):
    """The rule of a local step, which is left out if it is not finite.

    inner: the inner optimizer's update. of: makes the same step of another update of the inner optimizer. together: the
    axes over which it communicates, whose ranks leave out a step together. settings: of the exchange, for ranks to
    compare.
    """

    inner: UpdateFn
    of: Callable[[UpdateFn], UpdateFn]
    together: tuple[str, ...]
    settings: Mapping[str, Any]
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)

    def mapped(self, f: Callable[[UpdateFn], UpdateFn]) -> UpdateFn:
        """Return the same step of what f makes of the inner update."""
        return self.of(f(self.inner))


def outer(
    inner: Transform,
    outer_tx: Transform,
    sync: Transform,
    *,
    fragments: Fragments = None,
    alpha: float = 0.0,
    store: Store = None,
    on_skip: Literal["keep", "anchor"] = "keep",
    guard: norm_guard.Guard | None = None,
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
        inner: the optimizer of the local steps, a chain that ends in a learning rate. Its state is never averaged or
            reset; one without a local phase takes its warm-up steps. It may communicate over another axis than `sync`,
            in an island whose ranks take local steps together, such as `fn.muon(axis="data")`: these are its steps of
            the compressed phase then, or of the warm-up where there is none.
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
        guard: which differences count in the mean, and how much, by their norms: `norm_guard()`. A rank whose
            difference is left out goes on from the anchor, and so do all where an exchange is left out. None: all
            differences count alike, and one that is not finite makes all ranks leave out the exchange.
    Returns: a transform with a warm-up, rounds, and as phases the local one and the exchange of fragment 0. Where an
        exchange begins or ends it returns new params, elsewhere updates. A round that ends an exchange that did not
        begin moves nothing, so params that join in between start with the next exchange. A rank leaves out a local step
        that is not finite alone, and counts it (`dropped`). On one rank it is a lookahead optimizer.
    Raises: TypeError or ValueError that names the argument; from `init`, if the fragments do not fit the params.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512), algorithm 2:
        fragments, alpha, and the delay, which is `fn.every`'s.
    """
    check_outer(inner, outer_tx, sync, fragments, alpha, store, on_skip, guard)
    move, axes = moves_of(outer_tx), facts_of(sync).axes
    inner_phase, inside = local_phase(inner), facts_of(inner).axes
    dtype, host = (None, torch.device("cpu")) if store == "cpu" else (store, None)
    shards = facts_of(inner).shards
    island = (*shards, *inside)  # whose ranks leave out steps together; a mean may travel while `inside` is in use

    settings = {
        "outer_tx": outer_tx,
        "sync": sync,
        "fragments": fragments,
        "alpha": alpha,
        "store": store,
        "on_skip": on_skip,
        "guard": guard,
    }

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
        guards = () if guard is None else tuple(norm_guard.start(guard, device) if part else () for part in parts)
        inner_state = inner.init(params)
        if inside:  # the ranks of an island take one and the same step
            roles.check_same_params(inner_state, f" of {', '.join(map(repr, inside))}, which are an island")
        states = inner_state, anchor, pending, outer_states, sync_states
        return OuterState(*states, alone, dropped, left_out, begun, guards)

    def warmup(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
        updates, params = check_arguments(updates, state, params, OuterState, "anchor")
        check_alike(state.alone)
        moves, inner_state = inner.warmup_update(updates, state.inner, params)
        ok = all_finite(tree.leaves(moves))
        ok = true_on_all(ok, inside, device_of(params))
        anchor = tree.map(as_anchor, apply_updates(params, moves))
        # a guard around it looks at the anchor only, so what is wrong elsewhere has to show there
        anchor = tree.map(lambda x: torch.where(ok.to(x.device), x, torch.nan), anchor)
        axes = tuple(current_binding().axes)  # of averaged gradients all ranks make the same, which vmap cannot know
        anchor = tree.map(lambda x: found_alike(x, axes), anchor) if axes else anchor
        return moves, state._replace(inner=inner_state, anchor=anchor)

    def alone_by(update: UpdateFn) -> OuterLocal:
        def local(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
            updates, params = check_arguments(updates, state, params, OuterState, "anchor")
            moves, inner_state, ok = taken_alone(update, updates, state.inner, params, island)
            dropped = state.dropped if known(ok) else state.dropped + (~ok).to(state.dropped)
            return moves, state._replace(inner=inner_state, alone=state.alone + 1, dropped=dropped)

        return OuterLocal(update, alone_by, inside, settings, local)

    def alike(x: Tensor) -> Tensor:
        """Return what the ranks of an island have alike, which vmap cannot know."""
        return found_alike(x, inside) if inside else x

    def chosen(number: int, state: OuterState, params: Tree, field: str) -> tuple[Tree, list[Tensor], Sequence[int]]:
        """Return the params in the order of the state, their leaves, and the places of those of a fragment."""
        check_state(state, OuterState)
        params = tree.in_order(params, state.anchor, "params")
        return params, tree.leaves(params), places_in(fragments, params, number, field)

    def difference(number: int, state: OuterState, params: Tree) -> tuple[Tree, OuterState]:
        """Keep this rank's pseudo-gradient, anchor - params, where the mean belongs."""
        params, leaves, places = chosen(number, state, params, "begin")
        if not places:
            return params, state
        anchor, (pending, structure) = tree.leaves(state.anchor), tree.flatten(state.pending)
        here = [leaves[i] for i in places]
        starts = [anchor[i].to(p).to(pending[i].dtype) for i, p in zip(places, here, strict=True)]  # on their device
        steps = lists.elementwise(rules.plus, (starts, here), -1.0)
        # one rank's alone would be left out of the mean of its place only, and the places' anchors would part for good
        fine = true_on_all(all_finite(steps), inside, device_of(leaves)) if inside else None
        if fine is not None and not known(fine):
            steps = [torch.where(fine.to(x.device), x, torch.nan) for x in steps]
        steps = [alike(x.to(host)) for x in steps]
        begun = _with(state.begun, number, torch.ones_like(state.begun[number]))
        state = state._replace(pending=tree.unflatten(structure, put(pending, places, steps)), begun=begun)
        if guard is not None:
            state = state._replace(guard=_with(state.guard, number, norm_guard.noted(state.guard[number], steps)))
        return params, state

    def mean(number: int, state: OuterState, params: Tree) -> tuple[Tree, OuterState]:
        """Average the pseudo-gradients over the ranks; keep the mean, and the residual errors if it is finite."""
        params, leaves, places = chosen(number, state, params, "begin")
        if not places:
            return params, state
        anchor, (pending, structure) = tree.leaves(state.anchor), tree.flatten(state.pending)
        steps, before = [pending[i].to(leaves[i].device) for i in places], state.sync[number]
        if guard is not None:
            steps, of_guard = norm_guard.weighed(guard, state.guard[number], steps, axes)
            state = state._replace(guard=_with(state.guard, number, of_guard))
        averaged, after = sync.compressed_update(steps, before, [anchor[i] for i in places])
        averaged = [alike(x) for x in tree.leaves(averaged)]
        ok = true_on_all(all_finite(averaged), shards, device_of(leaves))
        if guard is not None:
            averaged = norm_guard.clipped(guard, averaged)
            ok = ok & ~state.guard[number].nobody.to(ok.device)
        after = tree.map(lambda new, old: _chosen(ok, new, old), after, before)
        pending = put(pending, places, [d.to(pending[i]) for i, d in zip(places, averaged, strict=True)])
        pending = tree.unflatten(structure, pending)
        return params, state._replace(pending=pending, sync=_with(state.sync, number, after))

    def outer_step(number: int, state: OuterState, params: Tree) -> tuple[Tree, OuterState]:
        """Take the outer step, if the exchange has begun."""
        params, leaves, places = chosen(number, state, params, "end")
        if not places or _is_known(~state.begun[number]):
            return params, state
        begun, structure = state.begun[number], tree.flatten(params)[1]
        anchor, pending = tree.leaves(state.anchor), tree.leaves(state.pending)
        before, means = [anchor[i] for i in places], [pending[i] for i in places]
        wide = [x.to(d.dtype) for x, d in zip(before, means, strict=True)]
        moves, outer_state = move(means, state.outer[number], wide)
        new = lists.elementwise(rules.plus, (wide, moves), 1.0, out=room_in(moves, [*means, *wide]))
        rounded = [x.to(leaves[i].dtype) for i, x in zip(places, new, strict=True)]
        stored = [x.to(old.dtype) for x, old in zip(new, before, strict=True)]
        results = [*means, *new, *rounded, *stored, *_floats(outer_state)]
        ok = all_finite([*{id(x): x for x in results}.values()])  # mostly, what was rounded is the same tensor
        ok = ok if guard is None else ok & ~state.guard[number].nobody.to(ok.device)
        ok = true_on_all(ok, island, device_of(leaves))
        taken = ok & begun.to(ok.device)
        if read(taken):  # then nothing below is selected, which would take a pass and memory for each tensor
            ok = taken = torch.ones_like(taken, device="cpu")
            after = stored
        else:
            outer_state = tree.map(lambda new, old: _chosen(taken, new, old), outer_state, state.outer[number])
            after = [_chosen(taken, x, old) for x, old in zip(stored, before, strict=True)]
        left_out = state.left_out if _is_known(ok) else state.left_out + (begun & ~ok.to(begun.device)).long()
        state = state._replace(
            anchor=tree.unflatten(structure, put(anchor, places, after)),
            pending=tree.unflatten(structure, put(pending, places, _zeros_like(means))),
            outer=_with(state.outer, number, outer_state),
            begun=_with(state.begun, number, torch.zeros_like(begun)),
            left_out=left_out,
        )
        anchors = [x.to(leaves[i].device, d.dtype) for i, x, d in zip(places, after, means, strict=True)]
        moved = [_between(x, leaves[i], alpha) for i, x in zip(places, anchors, strict=True)]
        counts = None if guard is None else ~state.guard[number].out  # whether this rank's difference is in the mean
        if counts is not None and not read(counts):
            counts = counts.to(ok.device)
            moved = [_chosen(counts, x, y) for x, y in zip(moved, anchors, strict=True)]
            ok = ok & counts
        elif _is_known(taken):
            return tree.unflatten(structure, put(leaves, places, moved)), state
        instead = [leaves[i].to(x.dtype) for i, x in zip(places, moved, strict=True)]
        if on_skip == "anchor" or guard is not None:
            instead = [_chosen(begun, x.to(p), p) for x, p in zip(after, instead, strict=True)]
        moved = put(leaves, places, [_chosen(taken, x, old) for x, old in zip(moved, instead, strict=True)])
        unharmed = ok | ~begun.to(ok.device)
        if not _is_known(unharmed):
            moved, state = _healed(inner, island, unharmed, leaves, moved, state)
        return tree.unflatten(structure, moved), state

    exchange = Exchange(difference, mean, outer_step, partial(check_schedule, fragments))

    alone = alone_by(inner.update(inner_phase))
    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL}) if inner_phase in inner.needs_warmup else frozenset[Phase]()
    facts = merged(Facts(inside=inside), *map(facts_of, (inner, outer_tx, sync)))
    facts = facts if guard is None else merged(facts, Facts(whole=("norm_guard",), tree=("norm_guard",)))
    together = OuterWarmup(inner.warmup_update, warmup)
    return Transform(init, together, exchange.after(alone, Round(0, 0)), alone, needs, exchange, facts)


def _healed(
    inner: Transform, island: Sequence[str], ok: Tensor, params: list[Tensor], moved: list[Tensor], state: OuterState
) -> tuple[list[Tensor], OuterState]:
    """Where an exchange was left out, give a rank that is not finite the anchor and a fresh inner state.

    Also where only its own difference was. Its params would otherwise make every later mean not finite, and no exchange
    would ever be taken again.

    Args: island: axes whose ranks do it together. ok: where nothing was left out, 0-d. params, moved: before the outer
        step and after it.
    """
    is_finite = true_on_all(all_finite([*params, *_floats(state.inner)]), island, device_of(params))
    fine = ok.to(is_finite.device) | is_finite
    anchor, structure = tree.flatten(state.anchor)
    moved = [_chosen(fine, x, a.to(x)) for x, a in zip(moved, anchor, strict=True)]
    fresh = inner.init(tree.unflatten(structure, [x.to(p.dtype) for x, p in zip(moved, params, strict=True)]))
    return moved, state._replace(inner=tree.map(lambda old, new: _chosen(fine, old, new), state.inner, fresh))


def taken_alone(
    update: UpdateFn, updates: Tree, state: Tree, params: Tree, shards: Sequence[str] = ()
) -> tuple[Tree, Tree, Tensor]:
    """Take a step that this rank alone leaves out where it is not finite: no message tells the others.

    Args: shards: axes over which the tensors are divided, whose ranks leave it out together. The others: of an update.
    Returns: its updates, -0.0 where it is left out; the state after it; whether it was taken, 0-d bool.
    """
    moves, after = update(updates, state, params)
    ok = all_finite(tree.leaves(moves))
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
    if not isinstance(last, Rate):  # in a chain inside of the chain
        return lambda means, state, params: _leaves_first(outer_tx.local_update(means, state, params))
    lr = last.lr

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
