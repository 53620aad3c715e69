"""Steps up to where they would be written, and the writing: a step that fails leaves everything as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.donate import donate
from fn.adapters.interrupts import begin_writing
from fn.base import UpdateFn
from fn.collectives.observe import step_range
from fn.inplace.protocol import InPlace, Staged

Tree = Any


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


def stage(
    update: UpdateFn, in_place: InPlace | None, grads: list[Tensor], state: Tree, params: list[Tensor]
) -> Staged:
    """Take the step of a param group up to where it would be written. Nothing is changed.

    Args: update: guarded, so that its state counts skipped steps. in_place: how it is staged where it fits. The others:
        its arguments.
    """
    if in_place is not None and in_place.fits(grads, state, params):
        found = in_place.stage(grads, state, params).settled()  # here, where only the thread that communicates waits
        if found.safe:
            return found
    params = [p.detach() for p in params]
    moves, after = checked(update)(grads, state, params)

    def commit() -> None:
        found, _ = donate(lambda *_: (moves, after))(grads, state, params)
        move([*zip(params, found, strict=True)])

    return Staged(after.skipped is state.skipped or bool(after.skipped == state.skipped), commit)


def commit(steps: Sequence[Staged], state: Tree, still: Collection[Tensor] = ()) -> None:
    """Write staged steps, which make up a step of all param groups; or count it as skipped if one is not finite.

    Args: state: of all groups. still: parameters that are not to be moved. Without grad mode.
    """
    if not all(step.ok for step in steps):
        for skipped in tree.fields(state, "skipped"):
            skipped.add_(1)
        return
    before = [(p, p.clone()) for p in still]
    begin_writing()
    with step_range("apply"):
        for step in steps:
            step.commit()
    for p, old in before:
        p.copy_(old)


def move(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add updates to parameters, in the wider of the two dtypes, rounded once."""
    alike = [(p, u) for p, u in pairs if p.dtype == u.dtype]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for p, u in pairs:
        if p.dtype != u.dtype:
            p.copy_(p + u)
