"""Take a step in place where it can be staged, and by the donated update elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fn import tree
from fn.base import UpdateFn
from fn.transforms.in_place import InPlace

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
            found.commit()
        else:
            for skipped in tree.fields(state, "skipped"):
                skipped.add_(1)
        return None, state

    return step
