"""A step of all param groups, in the order in which things happen.

`take` is the step that begins when all gradients are there:

1. `collect`: the gradients, unscaled; NaN in their place if this rank has something to ask the others (`Gradients`).
2. `still_in_doubt`: in the first step of a phase, whether the gradients are each rank's own.
3. `_move`: what has no gradient is held. Gradients are clipped, if there is a `max_norm`. Then the states move, in
   place and the params with them, where the device has kernels for a whole step; elsewhere by the pure update, compiled
   if that was asked for, whose new state is written into the buffers of the old one.
4. `_ask`: if the step was skipped, whether for its numbers or to ask. Once the others have answered, 1 and 3 follow
   once more.
5. `_apply`: the updates are added to the params, if those have not moved yet.

`write` ends a step that `Overlap` has taken up to where it is written. A round of local steps is `take` of its local
step, then `fn.adapters.optim.exchange`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.clipping import Clipping, clipping
from fn.adapters.optim.compiled import compile_update
from fn.adapters.optim.consistency import still_in_doubt
from fn.adapters.optim.donate import donate
from fn.adapters.optim.gradients import unscaled
from fn.adapters.optim.param_groups import names_of
from fn.adapters.optim.signals import begin_writing
from fn.adapters.optim.training import Training, sends_gradients
from fn.adapters.optim.warnings import say_slow, warn_of_thawed
from fn.base import NewParams, Part, Phase, Round, SideBySide, UpdateFn
from fn.collectives.profiling import step_range
from fn.errors import expected
from fn.inplace.match import in_place, refusing, same_links
from fn.inplace.protocol import InPlace, Staged
from fn.schedules import FreezeWhenStable

Tree = Any

logger = logging.getLogger("fn")
Grads = tuple[list[Tensor], ...]
Moves = list[Tensor] | NewParams
"""Of a param group: what is added to its params, or what they become."""


class Update(NamedTuple):
    """The update of a phase, of all param groups.

    clip: what the gradients go through first. donated: with the new state written back. in_place: how it is staged;
    None if it cannot be. groups: the same for each param group alone.
    """

    clip: Clipping
    donated: UpdateFn
    in_place: InPlace | None
    groups: Sequence[InPlace | None] = ()


def update_of(training: Training, phase: Phase | Part) -> Update:
    """Return the update of a phase or a local step, made once for the numbers that the param groups hold."""
    if phase not in training.updates:
        pure = training.joined().composed(phase)
        alone = Part("local", Phase.LOCAL)
        if isinstance(phase, Part) and phase != alone and same_links(pure, training.joined().composed(alone)):
            return update_of(training, alone)  # compiled once for all rounds
        clip = clipping(phase.phase, training.max_norm, next(iter(training.axes), None), training.states)
        donated = donate(checked(pure))
        donated = refusing(pure, compile_update(donated)) if training.compile else donated
        matched, known = in_place(pure, training.bounds), training.bounds
        updates = pure.updates if isinstance(pure, SideBySide) else ()
        groups = [in_place(update, known.setdefault(i, {})) for i, update in enumerate(updates)]
        staged = matched if isinstance(matched, InPlace) and not training.compile else None
        each = [one if isinstance(one, InPlace) else None for one in groups]
        if isinstance(matched, str) and isinstance(pure, SideBySide) and not training.compile:
            on_host = all(p.device.type == "cpu" for params in training.params for p in params)
            text = "the %s step is taken link by link: %s; see `python -m fn explain`"
            logger.log(logging.INFO if on_host else logging.WARNING, text, phase.phase.value, matched)
        training.updates[phase] = Update(clip, donated, staged, each)
    found: Update = training.updates[phase]
    return found


def take(training: Training, phase: Phase | Round, problem: Exception | None) -> None:
    """Take a step, or the local step of a round, from the gradients in `p.grad`. The axes must be bound.

    Args: problem: why this rank cannot take the step.
    """
    part = phase.local if isinstance(phase, Round) else phase
    update, before = update_of(training, part), training.skip_counts()
    grads = collect(training, phase, problem)
    if isinstance(phase, Phase) and phase in training.doubts:
        training.doubts = still_in_doubt(training.doubts, phase, grads, training.axes)
    updates = _move(training, part, update, grads)
    if training.skipped > max(before, default=0) and _ask(training, before):
        updates = _move(training, part, update, collect(training, phase))
    if updates is not None:
        _apply(training, updates)


def collect(training: Training, phase: Phase | Round, problem: Exception | None = None) -> Grads:
    """Return the gradients of all param groups, without the scale of the loss.

    Args: phase: of the step. problem: why this rank cannot take it. Raises: as `Gradients.collect`.
    """
    own = isinstance(phase, Round)
    found = training.gradients.collect(training.params, sends_gradients(phase), problem, own=own)
    return unscaled(found, *training.scale)


def _move(training: Training, phase: Phase | Part, update: Update, grads: Grads) -> Sequence[Moves] | None:
    """Move the states; return the updates of the params, None if nothing is left to add."""
    states, params = training.states, tuple(training.params)
    with training.frozen_params.during(
        phase.phase, training.gradients.absent, training.params, training.states, training.transforms
    ):
        given = grads
        grads = grads if update.clip.gradients is None else update.clip.gradients(grads, params)
        with update.clip.binding:
            staged = None if training.gradients.absent else update.in_place  # which moves all params
            if staged is not None and staged.fits(grads, states, params):
                step = staged.stage(grads, states, params).settled()
                if step.safe:
                    commit([step], states)
                    return None
            elif staged is not None:
                say_slow(training, phase, given)
            updates, _ = update.donated(grads, states, tuple([p.detach() for p in group] for group in params))
            return [NewParams(new) for new in updates.params] if isinstance(updates, NewParams) else tuple(updates)


def _ask(training: Training, before: list[int]) -> bool:
    """Compare with the other ranks after a skipped step; tell whether it is to be taken again, and count it if not."""
    names = [names_of(group) for group in training.groups]
    absent, again = training.gradients.absent, True
    try:
        again = training.gradients.agree_on_missing(training.axes, training.params, names)
        warn_of_thawed(training, absent - training.gradients.absent)
    finally:
        if again:  # the step was not skipped for its numbers, but to ask the other ranks
            for count, own in zip(training.skip_counters(), before, strict=True):
                count.fill_(own)
    return again


def _apply(training: Training, updates: Sequence[Moves]) -> None:
    """Add the updates to the params that are not held."""
    begin_writing()
    with step_range("apply"):
        for g, (params, moves) in enumerate(zip(training.params, updates, strict=True)):
            move(params, moves, {i for group, i in training.frozen_params.places if group == g})


def write(training: Training, phase: Phase, steps: Sequence[Staged]) -> None:
    """Write a step that was staged group by group, but for what is held. The axes must be bound."""
    with training.frozen_params.during(
        phase, training.gradients.absent, training.params, training.states, training.transforms
    ):
        params = training.params
        commit(steps, training.states, [params[g][i] for g, i in training.frozen_params.places])


def count(training: Training, phase: Phase | Round, skipped: int) -> None:
    """Count a step that was taken, and let a schedule that watches the training see it.

    Args: phase: of the step. skipped: how many steps had been skipped before it.
    """
    moved = training.skipped == skipped
    training.steps += 1
    if phase.phase is not Phase.LOCAL:
        training.skipped_in_a_row = 0 if moved else training.skipped_in_a_row + 1
    if isinstance(training.schedule, FreezeWhenStable) and phase is Phase.WARMUP:
        training.schedule.observe(training.steps - 1, training.second_moment_norm() if moved else None)


@torch.no_grad()
def stage_group(training: Training, index: int, phase: Phase, grads: list[Tensor]) -> Staged:
    """Take a step of a param group up to where it would be written. Nothing is changed.

    Args: index: of the group. phase: of the step. grads: one per parameter. The axes must be bound.
    """
    update = training.transforms[index].composed(phase)
    in_place = None if training.gradients.absent else update_of(training, phase).groups[index]  # as `take` does
    slow = partial(say_slow, training, phase, [grads], index)
    return stage(update, in_place, grads, training.states[index], training.params[index], slow)


def checked(update: UpdateFn) -> UpdateFn:
    """Return an update of lists of params that refuses what adding would broadcast, before anything is written.

    Raises: ValueError that names the first update of another shape than its parameter.
    """

    def step(grads: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        moves, after = update(grads, state, params)
        found = [getattr(u, "shape", None) for u in tree.leaves(moves)]
        wanted = [p.shape for p in tree.leaves(params)]
        if len(found) != len(wanted):
            raise ValueError(expected("updates", f"{len(wanted)}, one for each parameter", f"{len(found)}"))
        if found != wanted:
            place = next(i for i, shape in enumerate(found) if shape != wanted[i])
            shape, path = found[place], tree.paths(moves)[place]
            text = f"leaf {path!r} to have the shape of its parameter, {tuple(wanted[place])}"
            raise ValueError(expected("updates", text, f"{None if shape is None else tuple(shape)}"))
        return moves, after

    return step


def stage(
    update: UpdateFn,
    in_place: InPlace | None,
    grads: list[Tensor],
    state: Tree,
    params: list[Tensor],
    slow: Callable[[], None] = lambda: None,
) -> Staged:
    """Take the step of a param group up to where it would be written. Nothing is changed.

    Args: update: guarded, so that its state counts skipped steps. in_place: how it is staged where it fits. slow: is
        called where it does not. The others: its arguments.
    """
    if in_place is not None and in_place.fits(grads, state, params):
        found = in_place.stage(grads, state, params)
        if not found.on_host:  # whoever writes it asks the device once, for all groups
            return found
        if found.settled().safe:
            return found.settled()
    elif in_place is not None:
        slow()
    params = [p.detach() for p in params]
    moves, after = checked(update)(grads, state, params)

    def commit() -> None:
        found, _ = donate(lambda *_: (moves, after))(grads, state, params)
        move(params, found)

    return Staged(after.skipped is state.skipped or bool(after.skipped == state.skipped), commit)


def commit(steps: Sequence[Staged], state: Tree, still: Collection[Tensor] = ()) -> None:
    """Write staged steps, which make up a step of all param groups; or count it as skipped if one is not finite.

    Args: state: of all groups. still: parameters that are not to be moved. Without grad mode.
    """
    if not all(step.ok for step in steps):
        for skipped in roles.find(state, "skips"):
            skipped.add_(1)
        return
    before = [(p, p.clone()) for p in still]
    begin_writing()
    with step_range("apply"):
        for step in steps:
            step.commit()
    for p, old in before:
        p.copy_(old)


def move(params: Sequence[Tensor], moves: Moves, still: Collection[int] = ()) -> None:
    """Add updates to parameters, in the wider of the two dtypes, rounded once; or copy new ones, rounded.

    Args: still: the places of parameters that are not to be moved.
    """
    new = moves.params if isinstance(moves, NewParams) else moves
    pairs = [(p, u) for i, (p, u) in enumerate(zip(params, new, strict=True)) if i not in still]
    if isinstance(moves, NewParams):
        for p, x in pairs:
            p.copy_(x)
        return
    alike = [(p, u) for p, u in pairs if p.dtype == u.dtype]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for p, u in pairs:
        if p.dtype != u.dtype:
            p.copy_(p + u)
