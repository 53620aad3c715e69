"""Take a step in place where it can be staged, and by the donated update elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.donate import donate
from fn.adapters.interrupts import hold
from fn.base import UpdateFn
from fn.collectives.observe import step_range
from fn.transforms.in_place import InPlace, Staged

Tree = Any


def staged(update: InPlace, otherwise: UpdateFn, allowed: Callable[[], bool]) -> UpdateFn:
    """Return an update that moves the params itself where it can, and then returns None as their updates.

    Args: update: what can be staged. otherwise: the same, donated. allowed: whether the params may all be moved.
    """

    def step(grads: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        if not allowed() or not update.fits(grads, state, params):
            return otherwise(grads, state, params)
        found = update.stage(grads, state, params)
        if found.ok:
            hold()
            with step_range("apply"):
                found.commit()
        else:
            for skipped in tree.fields(state, "skipped"):
                skipped.add_(1)
        return None, state

    return step


def checked(update: UpdateFn) -> UpdateFn:
    """Return an update of lists of params that refuses what adding would broadcast, before anything is written.

    Raises: ValueError that names the first update of another shape than its parameter.
    """

    def step(grads: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        moves, after = update(grads, state, params)
        found = [getattr(u, "shape", None) for u in tree.leaves(moves)]
        wanted = [p.shape for p in tree.leaves(params)]
        if len(found) != len(wanted):
            raise ValueError(f"updates: are {len(found)}; allowed is one for each of the {len(wanted)} parameters")
        if found != wanted:
            place = next(i for i, shape in enumerate(found) if shape != wanted[i])
            shape, path = found[place], tree.paths(moves)[place]
            raise ValueError(
                f"updates: leaf {path!r} has the shape {None if shape is None else tuple(shape)}; allowed is that of "
                f"its parameter, {tuple(wanted[place])}"
            )
        return moves, after

    return step


def detached(update: UpdateFn) -> UpdateFn:
    """Return an update that sees params, lists of them in a tuple, without their history."""

    def step(grads: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        return update(grads, state, tuple([p.detach() for p in group] for group in params))

    return step


def stage(update: UpdateFn, grads: list[Tensor], state: Tree, params: list[Tensor]) -> Staged:
    """Take the step of a param group up to where it would be written. Nothing is changed.

    Args: update: guarded, so that its state counts skipped steps. The others: its arguments.
    """
    if isinstance(update, InPlace) and update.fits(grads, state, params):
        found = update.stage(grads, state, params)
        return found._replace(ok=bool(found.ok))  # here, where only the thread that communicates waits
    params = [p.detach() for p in params]
    moves, after = checked(update)(grads, state, params)

    def commit() -> None:
        found, _ = donate(lambda *_: (moves, after))(grads, state, params)
        move([*zip(params, found, strict=True)])

    return Staged(after.skipped is state.skipped or bool(after.skipped == state.skipped), commit)


@torch.no_grad()
def commit(steps: Sequence[Staged], state: Tree, still: Collection[Tensor]) -> None:
    """Write the steps of all param groups, or count the step as skipped if one of them is not finite.

    Args: state: of all groups. still: parameters that are not to be moved.
    """
    if not all(step.ok for step in steps):
        for skipped in tree.fields(state, "skipped"):
            skipped.add_(1)
        return
    before = [(p, p.clone()) for p in still]
    hold()
    with step_range("apply"):
        for step in steps:
            step.commit()
    for p, old in before:
        p.copy_(old)


def apply(
    groups: Sequence[Mapping[str, Any]], updates: Sequence[list[Tensor]] | None, still: Collection[tuple[int, int]]
) -> None:
    """Add the updates to the parameters of param groups; None: they moved already.

    Args: still: (group, parameter) by index that are not to be moved.
    """
    if updates is None:
        return
    hold()
    with step_range("apply"):
        for g, (group, moves) in enumerate(zip(groups, updates, strict=True)):
            pairs = enumerate(zip(group["params"], moves, strict=True))
            move([(p, u) for i, (p, u) in pairs if (g, i) not in still])


def move(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add updates to parameters, in the wider of the two dtypes, rounded once."""
    alike = [(p, u) for p, u in pairs if p.dtype == u.dtype]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for p, u in pairs:
        if p.dtype != u.dtype:
            p.copy_(p + u)
