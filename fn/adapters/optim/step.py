"""A step of all param groups, in the order in which things happen.

`take` is the step that begins when all gradients are there:

1. `collect`: the gradients, unscaled; NaN in their place if this rank has something to ask the others. In the first
   step of a phase the ranks find out whether these are each rank's own (`gradients.still_in_doubt`).
2. `stage_all`: gradients are clipped, if there is a `max_norm`. Then each param group is staged: all that can fail is
   done, and nothing is written. It is in place where the device has kernels for a whole step, and pure elsewhere.
3. `commit`: if all groups are finite, all are written, params and state; else the step is counted as skipped.
4. `ask`: if the step was skipped, whether for its numbers or to ask. Once the others have answered, 1 to 3 follow once
   more.

`write` ends a step whose groups `fn.adapters.ddp.overlap` has staged behind the backward pass. A round of local steps
is `take` of its local step, then `fn.adapters.optim.exchange`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.consistency import device_among
from fn.adapters.optim.donate import check_apart, compile_update, donate
from fn.adapters.optim.gradients import Clipping, Grads, Kept, clipping, still_in_doubt, unscaled
from fn.adapters.optim.param_groups import names_of
from fn.adapters.optim.signals import writing
from fn.adapters.optim.training import Training
from fn.adapters.optim.warnings import say_slow, warn_of_thawed
from fn.base import Guarded, NewParams, Part, Phase, Round, SideBySide, UpdateFn
from fn.collectives.agreement import true_on_all
from fn.collectives.profiling import step_range
from fn.compiling import original
from fn.errors import expected
from fn.inplace.match import in_place, refusing, same_links
from fn.inplace.memory import among, copy_into, written_into
from fn.inplace.own_memory import in_own_memory
from fn.inplace.protocol import InPlace, Staged, settled
from fn.kernels import flags, rules
from fn.kernels.lists import elementwise
from fn.kernels.orthonormal import attempt
from fn.transforms.skip_nonfinite import SkipState

Tree = Any

logger = logging.getLogger("fn")


def take(training: Training, phase: Phase | Round, problem: Exception | None = None) -> bool:
    """Take a step, or the local step of a round, from the gradients in `p.grad`. The axes must be bound.

    Args: problem: why this rank cannot take the step. Returns: whether something moved; else the step was skipped.
    """
    part = phase.local if isinstance(phase, Round) else phase
    update = update_of(training, part)  # raises for a phase that there is not before anything is sent
    if phase is not Phase.COMPRESSED:
        training.keep_momentum(phase)
    grads = collect(training, phase, problem)
    if isinstance(phase, Phase) and phase in training.doubts:
        training.doubts = still_in_doubt(training.doubts, phase, grads, training.axes)
    counts = training.skip_counts()
    moved = _attempt(training, update, part, grads, counts)
    if not moved and ask(training, counts):
        moved = _attempt(training, update, part, collect(training, phase), counts)
    return moved


def collect(training: Training, phase: Phase | Round, problem: Exception | None = None) -> Grads:
    """Return the gradients of all param groups, without the scale of the loss. As `gradients.Gradients.collect`."""
    grads = training.gradients.collect(training.params, phase, problem, training.inside)
    return unscaled(grads, *training.scale)


def _attempt(training: Training, update: Update, phase: Phase | Part, grads: Grads, counts: Sequence[int]) -> bool:
    """Stage all param groups, and write them or skip the step. Args: counts: of skipped steps, before this one."""
    kept = hold(training, phase)  # before a compiled update writes
    commit(training, stage_all(training, update, phase, grads), kept)
    return _has_moved(training, counts)


def hold(training: Training, phase: Phase | Part) -> list[Kept]:
    """Return what a step is to leave as it is, since it has no gradient."""
    return training.gradients.hold(phase.phase, training.params, training.states, training.transforms)


def write(training: Training, phase: Phase, steps: Sequence[Staged]) -> bool:
    """Write a step that was staged group by group; return whether something moved. The axes must be bound."""
    counts = training.skip_counts()
    commit(training, steps, hold(training, phase))
    return _has_moved(training, counts)


def _has_moved(training: Training, counts: Sequence[int]) -> bool:
    """Tell whether no step more is counted as skipped. Args: counts: of skipped steps, before this one."""
    return max(training.skip_counts(), default=0) == max(counts, default=0)


def ask(training: Training, counts: Sequence[int]) -> bool:
    """Compare with the other ranks after a skipped step; tell whether it is to be taken again.

    A step that was skipped to ask is none that is counted. Args: counts: of skipped steps, before this one.
    """
    names = [names_of(group) for group in training.groups]
    absent, again = training.gradients.absent, True
    try:
        again = training.gradients.agree_on_missing(training.all_axes, training.params, names)
        warn_of_thawed(training, absent - training.gradients.absent)
    finally:
        if again:
            for counter, before in zip(training.counters("skips"), counts, strict=True):
                counter.fill_(before)
    return again


def stage_all(training: Training, update: Update, phase: Phase | Part, given: Grads) -> list[Staged]:
    """Take a step up to where it is written, each param group for itself. Nothing is changed.

    But for a compiled update, which is one graph: it writes the state, whose new numbers depend on all that is sent.
    """
    states, params = training.states, tuple(training.params)
    grads = given if update.clip.gradients is None else update.clip.gradients(given, params)
    with update.clip.binding:
        if update.compiled is not None:
            moves, _ = update.compiled(grads, states, tuple([p.detach() for p in group] for group in params))
            return [Staged(True, lambda: move(params, moves))]
        groups = [(grads, states, params)] if update.spans else [*zip(grads, states, params, strict=True)]
        slow = partial(say_slow, training, phase, given)

        def staged() -> list[Staged]:
            steps = settled([stage(of, *args, slow) for of, args in zip(update.groups, groups, strict=True)])
            return _agreed(training, phase, steps)

        with attempt() as begun:
            steps = staged()
        if begun.was_quick and not all(step.ok for step in steps):  # for its numbers, or for how it was taken
            steps = staged()
        if all(step.ok for step in steps) and not all(step.safe for step in steps):
            triples = zip(steps, update.groups, groups, strict=True)
            pure = partial(stage_purely, exactly=True)
            steps = settled([step if step.safe else pure(of, *args) for step, of, args in triples])
        return steps


def _agreed(training: Training, phase: Phase | Part, steps: list[Staged]) -> list[Staged]:
    """Return staged steps that are ok, and safe, only if they are on all ranks that take them together."""

    def on_all(flag: bool, axes: Sequence[str]) -> bool:
        here = torch.tensor(flag, dtype=torch.bool, device="cpu")
        return bool(true_on_all(here, axes, device_among(training.groups)))

    shards = [axis for axis in training.all_axes if axis not in training.axes]
    if len(steps) > 1 and shards:  # a group's own guard asks the ranks that have the rest of its tensors
        ok = on_all(all(step.ok for step in steps), shards)
        steps = [step._replace(ok=step.ok and ok) for step in steps]
    if isinstance(phase, Part) and training.inside:  # one rank alone would send once more, and wait for ever
        safe = on_all(all(step.safe for step in steps), training.inside)
        steps = [step._replace(safe=step.safe and safe) for step in steps]
    return steps


@torch.no_grad()
def stage_group(training: Training, index: int, phase: Phase, grads: list[Tensor]) -> Staged:
    """Take a step of a param group up to where it would be written. Nothing is changed.

    Args: index: of the group. phase: of the step. grads: one per parameter. The axes must be bound.
    """
    update = update_of(training, phase).groups[index]
    slow = partial(say_slow, training, phase, [grads], index)
    with attempt():  # if it comes out as NaN, the ranks meet in `take`
        return stage(update, grads, training.states[index], training.params[index], slow)


def stage(update: UpdateFn, grads: Tree, state: Tree, params: Tree, slow: Callable[[], None] = lambda: None) -> Staged:
    """Take a step up to where it would be written, in place or purely. Nothing is changed.

    Args: update: guarded, so that its state counts skipped steps; `InPlace` if it has kernels. slow: is called where
        these do not fit. The others: its arguments.
    """
    if isinstance(update, InPlace):
        if update.fits(grads, state, params):
            return update.stage(grads, state, params)
        slow()
    return stage_purely(update, grads, state, params)


def stage_purely(update: UpdateFn, grads: Tree, state: Tree, params: Tree, *, exactly: bool = False) -> Staged:
    """Compute a step that waits to be written. Nothing is changed.

    It is computed as if all numbers were finite (`flags.assumed`), unless `exactly` is True. Where they are not, it is
    skipped; in a local phase, whose guard does not look, a rank may leave out a part of it, so there it is not safe.

    Args: the others: as `stage`.
    Raises: ValueError if what is computed cannot be written.
    """
    params = tree.map(Tensor.detach, params)
    check_apart(state, params)
    pure = original(update.pure if isinstance(update, InPlace) else update)
    late: list[Callable[[], None]] = []
    with nullcontext(list[Tensor]()) if exactly else flags.assumed() as assumed:
        moves, after = checked(pure if exactly else in_own_memory(pure, late))(grads, state, params)
    is_old = among(tree.leaves(state))
    moves = tree.map(lambda u: u.clone() if is_old(u) else u, moves)
    taken = after.skipped is state.skipped or after.skipped == state.skipped
    holds = flags.all_of(assumed)
    # The count of a step that is taken is not written, so that nobody waits for a device to read it.
    write_state = written_into(state, after._replace(skipped=state.skipped))

    def commit() -> None:
        for write in late:
            write()
        write_state()
        move(params, moves)

    if isinstance(pure, Guarded) and not pure.looks:
        return Staged(taken, commit, holds)
    return Staged(taken if holds is True else holds & taken, commit)


def commit(training: Training, steps: Sequence[Staged], kept: Sequence[Kept] = ()) -> None:
    """Write staged steps, which make up a step of all param groups; or count it as skipped if one is not finite.

    Args: kept: what is not to be moved. Without grad mode.
    """
    if not all(step.ok for step in steps):
        states = training.states
        for guard in [states] if isinstance(states, SkipState) else states:
            guard.skipped.add_(1)
        return
    with writing(training), step_range("apply"):
        for step in steps:
            step.commit()
        for numbers in kept:
            numbers.put_back()


def move(params: Tree, moves: Tree) -> None:
    """Add updates to parameters, in the wider of the two dtypes, rounded once; or copy `NewParams`, rounded."""
    pairs = [*zip(tree.leaves(params), tree.leaves(moves), strict=True)]
    if isinstance(moves, NewParams):
        copy_into(*([pair[side] for pair in pairs] for side in (0, 1)))
        return
    if pairs and all(x.device.type != "cpu" for x in pairs[0]):
        # kernels calculate in float32, which would round a float64 update before it is added, and once more after
        fits = [(p, u) for p, u in pairs if p.dtype == u.dtype or u.dtype != torch.float64]
        if fits:
            olds, news = map(list, zip(*fits, strict=True))
            elementwise(rules.added, (olds, news), wide=True, out=[olds])
        pairs = [(p, u) for p, u in pairs if p.dtype != u.dtype and u.dtype == torch.float64]
    alike = [(p, u) for p, u in pairs if p.dtype == u.dtype]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for p, u in pairs:
        if p.dtype != u.dtype:
            p.copy_(p + u)


class Update(NamedTuple):
    """The update of a phase.

    clip: what the gradients of all param groups go through first. groups: the update of each param group, `InPlace`
    where it has kernels; a single one where it spans all groups. compiled: that of all groups, which writes the new
    state itself, so that the copies are part of its kernels; None unless the user asked for it.
    """

    clip: Clipping
    groups: Sequence[UpdateFn]
    spans: bool
    compiled: UpdateFn | None


def update_of(training: Training, phase: Phase | Part) -> Update:
    """Return the update of a phase or a local step, made once for the numbers that the param groups hold."""
    if phase not in training.updates:
        whole = training.joined().composed(phase)
        updates, between_exchanges = _updates_in(whole), Part("local", Phase.LOCAL)
        if isinstance(phase, Part) and phase != between_exchanges:
            others = _updates_in(training.joined().composed(between_exchanges))
            if all(map(same_links, updates, others)):
                return update_of(training, between_exchanges)  # compiled once for all rounds
        clip = clipping(phase.phase, training.max_norm, next(iter(training.axes), None), training.states)
        spans = not isinstance(whole, SideBySide)
        compiled = _compiled(whole, updates, spans) if training.compile else None
        ways = [in_place(update, training.bounds.setdefault(i, {})) for i, update in enumerate(updates)]
        reason = next((one for one in ways if isinstance(one, str)), None)
        if reason and not spans and compiled is None:
            on_host = all(p.device.type == "cpu" for params in training.params for p in params)
            text = "the %s step is taken link by link: %s; see `python -m fn explain`"
            logger.log(logging.INFO if on_host else logging.WARNING, text, phase.phase.value, reason)
        groups = [pure if isinstance(one, str) else one for pure, one in zip(updates, ways, strict=True)]
        training.updates[phase] = Update(clip, groups, spans, compiled)
    update: Update = training.updates[phase]
    return update


def _updates_in(whole: UpdateFn) -> Sequence[UpdateFn]:
    """Return the updates of all param groups, or the one that spans them."""
    return whole.updates if isinstance(whole, SideBySide) else [whole]


def _compiled(whole: UpdateFn, updates: Sequence[UpdateFn], spans: bool) -> UpdateFn:
    run = compile_update(donate(checked(whole)))
    for i, update in enumerate(updates):
        run = refusing(update, run, () if spans else (i,))
    return run


def checked(update: UpdateFn) -> UpdateFn:
    """Return an update of lists of params that refuses what adding would broadcast, before anything is written.

    Raises: ValueError that names the first update of another shape than its parameter.
    """

    def step(grads: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        moves, after = update(grads, state, params)
        shapes = [getattr(u, "shape", None) for u in tree.leaves(moves)]
        wanted = [p.shape for p in tree.leaves(params)]
        if len(shapes) != len(wanted):
            raise ValueError(expected("updates", f"{len(wanted)}, one for each parameter", f"{len(shapes)}"))
        if shapes != wanted:
            place = next(i for i, shape in enumerate(shapes) if shape != wanted[i])
            shape, path = shapes[place], tree.paths(moves)[place]
            text = f"leaf {path!r} to have the shape of its parameter, {tuple(wanted[place])}"
            raise ValueError(expected("updates", text, f"{None if shape is None else tuple(shape)}"))
        return moves, after

    return step
