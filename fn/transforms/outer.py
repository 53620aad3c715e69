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
    Phase,
    Round,
    Transform,
    UpdateFn,
    apply_updates,
    check_arguments,
    check_state,
    declare_rule,
    facts_of,
)
from fn.collectives.agreement import check_order, device_of, true_on_all
from fn.collectives.axis import current_binding
from fn.collectives.simulation import replicated_if_equal
from fn.compiling import original
from fn.facts import Facts, merged
from fn.kernels import lists, rules
from fn.kernels.flags import are_assumed, is_true
from fn.kernels.tracing import is_concrete
from fn.roles import ERROR, declare
from fn.transforms.adam import zeros_like_moment
from fn.transforms.decay_and_lr import Rate
from fn.transforms.fragments import Fragments, fragment_places, places_in, put
from fn.transforms.outer_checks import (
    averages_of_rounds,
    check_alike,
    check_holds,
    check_outer,
    check_schedule,
    local_phase,
)
from fn.transforms.skip_nonfinite import all_finite, only_where, select

Tree = Any


@declare(
    rank_local=("inner", "dropped", "sound"),
    local_params=lambda state, params: tree.leaves(state.anchor) if float(state.alone) else None,
    difference=("pending",),
    dropped=("dropped",),
    left_out=("left_out",),
    copies=("anchor",),
    watched=("anchor",),
)
class OuterState(NamedTuple):
    """The state of `outer`.

    inner: the state of the inner optimizer. It is each rank's own, and no exchange changes it.
    anchor: the params that all ranks agreed on last, in float32 where params are in half precision.
    pending: the mean pseudo-gradients for the next outer step, this rank's own until they are averaged.
    outer: the states of the outer optimizer, one per fragment that has params, in the order of their numbers.
    sync: the states of the transform that averages, one per fragment, as those below.
    alone: local steps since the warm-up, 0-d int64.
    dropped: local steps that this rank left out because they were not finite, 0-d int64.
    left_out: exchanges that all ranks left out because a mean or an outer step was not finite, 0-d int64.
    begun: whether an exchange has begun and not ended, 0-d bools, one per fragment.
    sound: whether this rank's difference in the exchange that has begun is finite, 0-d bools, one per fragment.
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
    sound: Tree


Store = torch.dtype | Literal["cpu"] | None
"""Where an anchor is kept: in a dtype, or in the host's memory."""


class OuterWarmup(NamedTuple):
    """The rule of a warm-up step; the anchor is set to the params after it. inner: the inner optimizer's update."""

    inner: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


class PlainWarmup(OuterWarmup):
    """The rule of a warm-up step without an anchor."""

    __slots__ = ()


@declare_rule(tensorwise=True)
class OuterLocal(NamedTuple):
    """The rule of a local step, which is left out if it is not finite.

    inner: the inner optimizer's update. together: the axes over which it communicates, whose ranks leave out a step
    together. settings: of the exchange, for ranks to compare. run: (the inner update, updates, state, params) -> the
    update and the next state.
    """

    inner: UpdateFn
    together: tuple[str, ...]
    settings: Mapping[str, Any]
    run: Callable[[UpdateFn, Tree, Tree, Tree], tuple[Tree, Tree]]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(self.inner, updates, state, params)


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
            exchange: anchor, outer state and residual errors stay bitwise. "keep": the ranks go on with their params.
            "anchor": all ranks go back to the anchor in this fragment, and the steps since are lost. In either case,
            and also where a `sync` left its difference out of the mean, a rank whose difference, params or inner state
            are not finite takes the anchor and a fresh inner state.
    Returns: a transform with a warm-up, rounds, and as phases the local one and the exchange of fragment 0. Where an
        exchange begins or ends it returns new params, elsewhere updates. A round that ends an exchange that did not
        begin moves nothing, so params that join in between start with the next exchange. A rank leaves out a local step
        that is not finite alone, and counts it (`dropped`). On one rank it is a lookahead optimizer.
    Raises: TypeError or ValueError that names the argument; from `init`, if the fragments do not fit the params.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512), algorithm 2:
        fragments, alpha, and the delay, which is `fn.every`'s.
    """
    check_outer(inner, outer_tx, sync, fragments, alpha, store, on_skip)
    move = moves_of(outer_tx)
    inner_phase, inside = local_phase(inner), facts_of(inner).axes
    dtype, host = (None, torch.device("cpu")) if store == "cpu" else (store, None)
    shards = facts_of(inner).shards
    island = (*shards, *inside)  # whose ranks leave out steps together; a mean may travel while `inside` is in use

    exchanged = {"outer_tx": outer_tx, "sync": sync, "fragments": fragments}
    settings = {**exchanged, "alpha": alpha, "store": store, "on_skip": on_skip}

    def as_anchor(x: Tensor) -> Tensor:
        # Float32 for half precision: a small outer step would round to nothing there, exchange after exchange.
        return x.to(host, dtype or torch.promote_types(x.dtype, torch.float32))

    def init(params: Tree) -> OuterState:
        tree.check_real(params, "params")
        check_holds(dtype, params)
        # A clone: an anchor in the memory of params, which adapters write into, would move with them, and every
        # difference would be zero.
        anchor = tree.map(lambda p: as_anchor(p.detach().clone(memory_format=torch.contiguous_format)), params)
        zeros = tree.leaves(tree.map(zeros_like_moment, params))
        places_of = fragment_places(fragments, params)
        parts = [[zeros[i] for i in places] for places in places_of.values()]
        check_order(facts_of(sync).axes, params, {f"fragment {n}": places for n, places in places_of.items()})
        pending = tree.map(lambda p: zeros_like_moment(p).to(host), params)
        # Counters lie where the params do: on the host each step would wait for the device to count.
        device = device_of(params)
        alone, dropped, left_out = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
        # () for a fragment without params: its rounds return at once, and send nothing.
        outer_states = tuple(outer_tx.init([x.to(host) for x in part]) if part else () for part in parts)
        sync_states = tuple(sync.init(part) if part else () for part in parts)
        begun = tuple(torch.zeros((), dtype=torch.bool, device=device) if part else () for part in parts)
        sound = tuple(torch.ones((), dtype=torch.bool, device=device) if part else () for part in parts)
        inner_state = inner.init(params)
        if inside:  # the ranks of an island take one and the same step
            roles.check_same_params(inner_state, f" of {', '.join(map(repr, inside))}, which are an island")
        states = inner_state, anchor, pending, outer_states, sync_states
        return OuterState(*states, alone, dropped, left_out, begun, sound)

    def warmup(updates: Tree, state: OuterState, params: Tree, /) -> tuple[Tree, OuterState]:
        updates, params = check_arguments(updates, state, params, OuterState, "anchor")
        check_alike(state.alone)
        moves, inner_state = inner.warmup_update(updates, state.inner, params)
        ok = all_finite(tree.leaves(moves))
        # An anchor that is NaN on one rank of an island only would make that rank skip alone.
        ok = true_on_all(ok, inside, device_of(params))
        anchor = tree.map(as_anchor, apply_updates(params, moves))
        # a guard around it looks at the anchor only, so what is wrong elsewhere has to show there
        anchor = tree.map(lambda x: torch.where(ok.to(x.device), x, torch.nan), anchor)
        axes = tuple(current_binding().axes)  # of averaged gradients all ranks make the same, which vmap cannot know
        anchor = tree.map(lambda x: replicated_if_equal(x, axes), anchor) if axes else anchor
        return moves, state._replace(inner=inner_state, anchor=anchor)

    def alike(x: Tensor) -> Tensor:
        """Return what the ranks of an island have alike, which vmap cannot know."""
        return replicated_if_equal(x, inside) if inside else x

    def fragment_of(
        number: int, state: OuterState, params: Tree, field: str
    ) -> tuple[Tree, list[Tensor], int, Sequence[int]]:
        """Return the params in the order of the state, their leaves, and the entry and the places of a fragment."""
        params = tree.in_order(params, state.anchor, "params")
        return params, tree.leaves(params), *places_in(fragments, params, number, field)

    def difference(number: int, state: OuterState, params: Tree) -> tuple[Tree, OuterState]:
        """Keep this rank's pseudo-gradient, anchor - params, where the mean belongs, and whether it is finite."""
        check_state(state, OuterState)  # the parts behind this one are handed what it returns
        params, leaves, number, places = fragment_of(number, state, params, "begin")
        if not places:
            return params, state
        anchor, (pending, structure) = tree.leaves(state.anchor), tree.flatten(state.pending)
        here = [leaves[i] for i in places]
        # Through the params' dtype: a wider anchor has digits that no rank's params ever had, and a rank that has not
        # moved would send them as its difference.
        anchors = [anchor[i].to(p).to(pending[i].dtype) for i, p in zip(places, here, strict=True)]
        differences = lists.elementwise(rules.plus, (anchors, here), -1.0)  # anchor - p, in the shapes of the leaves
        # Ranks with the same place in their islands average with each other. One rank's NaN would be left out of the
        # mean of its place only, and the places' anchors would part for good: so it is a NaN on the whole island.
        sound = true_on_all(all_finite(differences), island, device_of(leaves))
        if island and not is_true(sound):
            differences = [torch.where(sound.to(x.device), x, torch.nan) for x in differences]
        # With store="cpu" they wait in the host's memory, and `mean` brings them back to the device.
        differences = [alike(x.to(host)) for x in differences]
        # numbers of the average that belong to a difference: a weight multiplies them with it, from 1 on
        of_sync = roles.replace(state.sync[number], "difference", torch.ones_like)
        state = state._replace(
            pending=tree.unflatten(structure, put(pending, places, differences)),
            sync=tree.with_part(state.sync, number, of_sync),
            begun=tree.with_part(state.begun, number, torch.ones_like(state.begun[number])),
            sound=tree.with_part(state.sound, number, alike(sound.to(state.sound[number].device))),
        )
        return params, state

    def mean(number: int, state: OuterState, params: Tree) -> tuple[Tree, OuterState]:
        """Average the pseudo-gradients over the ranks; keep the mean, and the residual errors if it is finite."""
        params, leaves, number, places = fragment_of(number, state, params, "begin")
        if not places:
            return params, state
        anchor, (pending, structure) = tree.leaves(state.anchor), tree.flatten(state.pending)
        differences, before = [pending[i].to(leaves[i].device) for i in places], state.sync[number]
        means, after = sync.compressed_update(differences, before, [anchor[i] for i in places])
        means = [alike(x) for x in tree.leaves(means)]
        ok = true_on_all(all_finite(means), shards, device_of(leaves))
        after = _after_mean(ok, after, before)
        # A mean that is not finite is kept as well: `outer_step` sees it, and leaves the exchange out.
        pending = put(pending, places, [d.to(pending[i]) for i, d in zip(places, means, strict=True)])
        pending = tree.unflatten(structure, pending)
        return params, state._replace(pending=pending, sync=tree.with_part(state.sync, number, after))

    def outer_step(number: int, state: OuterState, params: Tree) -> tuple[Tree, OuterState]:
        """Take the outer step, if the exchange has begun."""
        params, leaves, number, places = fragment_of(number, state, params, "end")
        # A flag on a device is not waited for: the outer step is computed, and not selected below.
        if not places or is_true(state.begun[number]) is False:
            return params, state

        # 1. compute: the anchor and the outer state behind the step
        structure = tree.flatten(params)[1]
        anchor, pending = tree.leaves(state.anchor), tree.leaves(state.pending)
        before, means = [anchor[i] for i in places], [pending[i] for i in places]
        wide = [x.to(d.dtype) for x, d in zip(before, means, strict=True)]  # a narrow anchor would round the step away
        moves, outer_state = move(means, state.outer[number], wide)
        # The sum takes the memory of the moves, where nothing else lies in it: a copy of the params less.
        new = lists.elementwise(rules.plus, (wide, moves), 1.0, out=room_in(moves, [*means, *wide]))
        rounded = [x.to(leaves[i].dtype) for i, x in zip(places, new, strict=True)]
        stored = [x.to(old.dtype) for x, old in zip(new, before, strict=True)]
        # Rounded results, too: what is finite in float32 may overflow in float16 params, or in a narrow anchor.
        results = [*means, *new, *rounded, *stored, *_floats(outer_state)]
        finite = all_finite([*{id(x): x for x in results}.values()])  # mostly, what was rounded is the same tensor

        # 2. decide: whether all ranks take the step, and whether this rank's params go along
        finite = true_on_all(finite, island, device_of(leaves))
        factors = roles.find(state.sync[number], "difference")
        verdict = _decided(finite, state.begun[number], state.sound[number], factors)

        # 3. write: the anchor first, then the params
        after = select(verdict.taken, stored, before)
        outer_state = select(verdict.taken, outer_state, state.outer[number])
        left_out = state.left_out
        if not is_true(verdict.taken):
            left_out = left_out + (verdict.begun & ~verdict.taken).to(left_out)
        state = state._replace(
            anchor=tree.unflatten(structure, put(anchor, places, after)),
            pending=tree.unflatten(structure, put(pending, places, _zeros_like(means))),
            outer=tree.with_part(state.outer, number, outer_state),
            begun=tree.with_part(state.begun, number, torch.zeros_like(state.begun[number])),
            left_out=left_out,
        )
        anchors = [x.to(leaves[i].device, d.dtype) for i, x, d in zip(places, after, means, strict=True)]
        moved = anchors
        if alpha:
            moved = [x + alpha * (leaves[i].to(x.dtype) - x) for i, x in zip(places, anchors, strict=True)]
        if is_true(verdict.taken & verdict.counts):
            return tree.unflatten(structure, put(leaves, places, moved)), state
        moved = select(verdict.counts, moved, anchors)
        instead = [leaves[i].to(x.dtype) for i, x in zip(places, moved, strict=True)]
        # Only where an exchange has begun: a round that ends none would throw the local steps away.
        if on_skip == "anchor":
            instead = select(verdict.begun, [x.to(p) for x, p in zip(after, instead, strict=True)], instead)
        moved = put(leaves, places, select(verdict.taken, moved, instead))
        if not is_true(verdict.unharmed):
            moved, state = _healed(inner, island, verdict, leaves, moved, state)
        return tree.unflatten(structure, moved), state

    exchange = Exchange(difference, mean, outer_step, partial(check_schedule, fragments))

    checked = partial(check_arguments, kind=OuterState, like="anchor")
    alone = local_steps(inner.update(inner_phase), checked, island, inside, settings)
    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL}) if inner_phase in inner.needs_warmup else frozenset[Phase]()
    facts = merged(Facts(inside=inside), *map(facts_of, (inner, outer_tx, sync)))
    facts = facts._replace(averages=averages_of_rounds(inner, inner_phase, sync))
    together = OuterWarmup(inner.warmup_update, warmup)
    return Transform(init, together, exchange.after(alone, Round(0, 0)), alone, needs, exchange, facts)


class Verdict(NamedTuple):
    """What was decided where an exchange may end: 0-d bools on one device.

    begun: whether one ends. taken: whether all ranks take its outer step. sound: whether this rank's difference was
    finite, or none was asked for. counts: nor did an average take it times 0.
    """

    begun: Tensor
    taken: Tensor
    sound: Tensor
    counts: Tensor

    @property
    def unharmed(self) -> Tensor:
        """Return whether nothing was left out that may be due to this rank's numbers."""
        return (self.taken & self.counts) | ~self.begun


def _decided(finite: Tensor, begun: Tensor, sound: Tensor, factors: Sequence[Tensor]) -> Verdict:
    """Decide what becomes of an exchange.

    Args: finite: whether its results are, on all ranks. begun, sound: of the state. factors: by which the average
        multiplied this rank's difference.
    """
    begun = begun.to(finite.device)
    taken, sound = finite & begun, sound.to(finite.device) | ~begun
    counts = sound
    for factor in factors:
        counts = counts & (factor != 0).to(finite.device)
    if is_true(taken & counts, wait=True):
        # Flags on the host, so that nothing is selected by them: that takes a pass and memory for each tensor.
        return Verdict(*[torch.ones_like(taken, device="cpu")] * 4)
    return Verdict(begun, taken, sound, counts)


def _after_mean(ok: Tensor, after: Tree, before: Tree) -> Tree:
    """Return the state of an average whose mean is left out where ok is false.

    Residual errors are as before then, for what they owed was not delivered, and so is what is not finite. All else
    goes on: with an old number of its turn NoLoCo would draw the same pairs in the next exchange.
    """

    def kept(new: Tensor, old: Tensor, mark: str) -> Tree:
        if mark != ERROR and not new.is_floating_point():
            return new
        return select(ok if mark == ERROR else ok.to(new.device) | new.isfinite().all(), new, old)

    return after if is_true(ok) else tree.map(kept, after, before, roles.kinds(after))


def _healed(
    inner: Transform, island: Sequence[str], verdict: Verdict, params: list[Tensor], moved: list[Tensor],
    state: OuterState,
) -> tuple[list[Tensor], OuterState]:  # fmt: skip
    """Give a rank that is not finite the anchor and a fresh inner state, where an exchange was left out.

    So does a rank whose difference alone was not finite, and which the average left out. With the params that it has
    every later mean would not be finite, and no exchange would ever be taken again.

    Args: island: axes whose ranks do it together. params, moved: before the outer step and after it.
    """
    # The inner state as well: a NaN in a moment would be back in the params after the next local step.
    is_finite = true_on_all(all_finite([*params, *_floats(state.inner)]), island, device_of(params))
    fine = verdict.sound.to(is_finite.device) & (verdict.unharmed.to(is_finite.device) | is_finite)
    anchor, structure = tree.flatten(state.anchor)
    moved = select(fine, moved, [a.to(x) for x, a in zip(moved, anchor, strict=True)])
    # Made in every case, and selected below: to ask first whether it is needed would wait for the device.
    fresh = inner.init(tree.unflatten(structure, [x.to(p.dtype) for x, p in zip(moved, params, strict=True)]))
    return moved, state._replace(inner=select(fine, state.inner, fresh))


def local_steps(
    update: UpdateFn, check: Callable[[Tree, Any, Tree], tuple[Tree, Tree]], island: Sequence[str],
    together: tuple[str, ...], settings: Mapping[str, Any],
) -> OuterLocal:  # fmt: skip
    """Return the local steps of an inner optimizer, in a state with the fields `inner`, `alone` and `dropped`.

    Args: update: of the inner optimizer. check: (updates, state, params) -> updates and params in their order, or an
        error. island: axes whose ranks leave out a step together. together, settings: see `OuterLocal`.
    """

    def local(inner: UpdateFn, updates: Tree, state: Any, params: Tree, /) -> tuple[Tree, Any]:
        updates, params = check(updates, state, params)
        moves, inner_state, ok = taken_alone(inner, updates, state.inner, params, island)
        # Where the host knows that the step was taken, the count is the same tensor as before: no launch.
        dropped = state.dropped if is_true(ok) else state.dropped + (~ok).to(state.dropped)
        return moves, state._replace(inner=inner_state, alone=state.alone + 1, dropped=dropped)

    return OuterLocal(update, together, settings, local)


def taken_alone(
    update: UpdateFn, updates: Tree, state: Tree, params: Tree, shards: Sequence[str] = ()
) -> tuple[Tree, Tree, Tensor]:
    """Take a step, or leave it out on this rank alone where it is not finite: no message tells the others.

    Args: update: what takes the step. updates, state, params: its arguments. shards: axes over which the tensors are
        divided, whose ranks leave the step out together.
    Returns: its updates, which move nothing where it is left out; the state after it; whether it was taken, 0-d bool.
    """
    moves, after = update(updates, state, params)
    ok = all_finite(tree.leaves(moves))
    for new, old in zip(roles.find(after, "skips"), roles.find(state, "skips"), strict=True):
        ok = ok if new is old else ok & (new == old).to(ok.device)  # what a guard inside skips counts as left out
    ok = true_on_all(ok, shards, device_of(params))
    if is_true(ok):
        return moves, after, ok
    moves = only_where(ok, moves, params)
    leaves, structure = tree.flatten(after)  # a guard inside may return another class than it was given
    return moves, tree.unflatten(structure, select(ok, leaves, tree.leaves(state))), ok


def moves_of(outer_tx: Transform) -> Callable[[list[Tensor], Tree, list[Tensor]], tuple[list[Tensor], Tree]]:
    """Return the update of an outer optimizer, whose last link, the rate, writes over what the others made.

    An exchange is when memory is full: what is written over is a copy of the params less.
    """
    update = original(outer_tx.local_update)
    *front, last = update.inner if isinstance(update, Chained) else [update]
    if not isinstance(last, Rate):  # in a chain inside of the chain
        return lambda means, state, params: _leaves_first(outer_tx.local_update(means, state, params))
    lr = last.lr

    def move(means: list[Tensor], state: Tree, params: list[Tensor]) -> tuple[list[Tensor], Tree]:
        # All links but the rate, whose state is the last one of the chain's tuple.
        directions, after = _leaves_first(Chained((*front,))(means, state[:-1], params)) if front else (means, ())
        room = room_in(directions, [*means, *params, *tree.leaves((state, after))])
        moves = lists.elementwise(rules.scaled, (directions,), -lr, out=room)
        return moves, (*after, state[-1]) if front else state

    return move


def _leaves_first(result: tuple[Tree, Tree]) -> tuple[list[Tensor], Tree]:
    return tree.leaves(result[0]), result[1]


def room_in(tensors: list[Tensor], others: list[Tensor]) -> list[list[Tensor]] | None:
    """Return the tensors, which `elementwise` may write into; None if they share memory with others.

    None also in traces, where gradients are taken, and on a CPU: there results lie in memory that is used again.
    """
    on_device = all(x.device.type != "cpu" for x in tensors) and is_concrete(*tensors, *others)
    # Autograd may need the old numbers, and a kernel writes lists of one dtype.
    if not on_device or any(x.requires_grad for x in (*tensors, *others)) or len({x.dtype for x in tensors}) > 1:
        return None
    # By storages: a trace without nesterov returns its momentum itself, and views share memory as well.
    taken = {x.untyped_storage()._cdata for x in others}
    return None if any(x.untyped_storage()._cdata in taken for x in tensors) else [tensors]


def _floats(state: Tree) -> list[Tensor]:
    return [x for x in tree.leaves(state) if x.is_floating_point()]


def _zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros, without memory for them where they are copied into the state at once."""
    if not are_assumed() or {x.device.type for x in tensors} <= {"cpu"}:
        return [*map(torch.zeros_like, tensors)]
    kinds = {(x.dtype, x.device): x for x in tensors}
    zeros = {kind: x.new_zeros(()) for kind, x in kinds.items()}
    # () -> the shape of each, with strides of 0: all are one number in memory
    return [zeros[x.dtype, x.device].expand_as(x) for x in tensors]
