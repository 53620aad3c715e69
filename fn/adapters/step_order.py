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

`write` ends a step that `Overlap` has taken up to where it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fn.adapters.alike_gradients import still_in_doubt
from fn.adapters.amp import unscaled
from fn.adapters.carried import added, due
from fn.adapters.clipping import Clipping, clipping
from fn.adapters.compiled import compile_update
from fn.adapters.donate import donate
from fn.adapters.interrupts import begin_writing
from fn.adapters.param_groups import names_of
from fn.adapters.staged import checked, commit, move
from fn.adapters.unmoved import warn_of_thawed
from fn.base import Phase, UpdateFn
from fn.collectives.observe import step_range
from fn.transforms.host_numbers import on_host
from fn.transforms.in_place import InPlace, Staged

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer

Tree = Any
Grads = tuple[list[Tensor], ...]


class Update(NamedTuple):
    """The update of a phase, of all param groups.

    clip: what the gradients go through first. donated: with the new state written back. in_place: to be staged; None if
    it cannot be.
    """

    clip: Clipping
    donated: UpdateFn
    in_place: InPlace | None


def update_of(optimizer: Optimizer, phase: Phase) -> Update:
    """Return the update of a phase, made once for the numbers that the param groups hold."""
    if phase not in optimizer._updates:
        pure = optimizer._joined().update(phase)
        clip = clipping(phase, optimizer._max_norm, next(iter(optimizer._axes), None), optimizer.states)
        donated = donate(checked(pure))
        donated = compile_update(donated) if optimizer._compile else donated
        in_place = pure if isinstance(pure, InPlace) and not optimizer._compile else None
        optimizer._updates[phase] = Update(clip, donated, in_place)
    return optimizer._updates[phase]


def take(optimizer: Optimizer, phase: Phase, problem: Exception | None) -> None:
    """Take a step from the gradients in `p.grad`. The axes must be bound.

    Args: problem: why this rank cannot take the step.
    """
    update, before = update_of(optimizer, phase), [int(on_host(count)) for count in optimizer._skip_counts()]
    grads = collect(optimizer, phase is not Phase.LOCAL, problem)
    if phase in optimizer._doubts:
        optimizer._doubts = still_in_doubt(optimizer._doubts, phase, grads, optimizer._axes)
    updates = _move(optimizer, phase, update, grads)
    if optimizer.skipped > max(before, default=0) and _ask(optimizer, before):
        updates = _move(optimizer, phase, update, collect(optimizer))
    if updates is not None:
        _apply(optimizer, updates)


def collect(optimizer: Optimizer, ask: bool = True, problem: Exception | None = None) -> Grads:
    """Return the gradients of all param groups, without the scale of the loss, with what is carried.

    Args and Raises: as `Gradients.collect`.
    """
    found = optimizer._gradients.collect(_params(optimizer), ask, problem)
    found = unscaled(found, getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
    return added(due(optimizer, optimizer.phase), found)


def _move(optimizer: Optimizer, phase: Phase, update: Update, grads: Grads) -> Sequence[list[Tensor]] | None:
    """Move the states; return the updates of the params, None if nothing is left to add."""
    states, params = optimizer.states, tuple(_params(optimizer))
    with optimizer._held.during(optimizer, phase):
        grads = update.clip.gradients(grads, params)
        with update.clip.binding:
            in_place = None if optimizer._gradients.absent else update.in_place  # which moves all params
            if in_place is not None and in_place.fits(grads, states, params):
                commit([in_place.stage(grads, states, params)], states)
                return None
            updates, _ = update.donated(grads, states, tuple([p.detach() for p in group] for group in params))
            return tuple(updates)


def _ask(optimizer: Optimizer, before: list[int]) -> bool:
    """Compare with the other ranks after a skipped step; tell whether it is to be taken again, and count it if not."""
    names = [names_of(group) for group in optimizer.param_groups]
    absent, again = optimizer._gradients.absent, True
    try:
        again = optimizer._gradients.settle(optimizer._axes, _params(optimizer), names)
        warn_of_thawed(optimizer, absent - optimizer._gradients.absent)
    finally:
        if again:  # the step was not skipped for its numbers, but to ask the other ranks
            for count, own in zip(optimizer._skip_counts(), before, strict=True):
                count.fill_(own)
    return again


def _apply(optimizer: Optimizer, updates: Sequence[list[Tensor]]) -> None:
    """Add the updates to the params that are not held."""
    begin_writing()
    with step_range("apply"):
        for g, (params, moves) in enumerate(zip(_params(optimizer), updates, strict=True)):
            pairs = enumerate(zip(params, moves, strict=True))
            move([(p, u) for i, (p, u) in pairs if (g, i) not in optimizer._held.places])


def write(optimizer: Optimizer, phase: Phase, steps: Sequence[Staged]) -> None:
    """Write a step that was staged group by group, but for what is held. The axes must be bound."""
    with optimizer._held.during(optimizer, phase):
        params = _params(optimizer)
        commit(steps, optimizer.states, [params[g][i] for g, i in optimizer._held.places])


def _params(optimizer: Optimizer) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups]
