"""Run a pure update in the buffers of its arguments."""

from __future__ import annotations

from typing import Any

from fn import tree
from fn.arguments import check_function
from fn.base import UpdateFn
from fn.compiling import own_code
from fn.inplace.memory import aside, check_apart, copy_plan

Tree = Any


def donate(update: UpdateFn) -> UpdateFn:
    """Make a pure update write its new state back into the buffers of the old one.

    The returned function has the same signature and results, but the state that it returns *is* the state that it
    was given, with new contents: buffers keep their addresses from step to step. Under `torch.compile` the copies
    fuse into the update and nothing is allocated. An update that is a leaf of the old state is copied aside first.

    Raises: ValueError if the update changes the state's structure, a shape or a dtype, or if a leaf of the state lies
        in the memory of another one or of the params (not seen where a compiler traces); the state is then unchanged.

    >>> import torch, fn
    >>> tx = fn.adamw(0.1)
    >>> params = {"w": torch.zeros(2)}
    >>> state = tx.init(params)
    >>> update = fn.donate(tx.update(fn.Phase.WARMUP))
    >>> updates, after = update({"w": torch.tensor([1.0, -2.0])}, state, params)
    >>> after is state, [round(x, 4) for x in updates["w"].tolist()]
    (True, [-0.1, 0.1])
    """
    check_function("update", update, "the update of a transform, such as tx.update(fn.Phase.WARMUP)")

    def donated(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        check_apart(state, params)
        updates, after = update(updates, state, params)
        # Before the state is written, which would change an update that is a leaf of it.
        updates = tree.map_lists(lambda lists: aside(lists[0], tree.leaves(state)), [updates])
        write_back(state, after)
        return updates, state

    return own_code(donated)


def write_back(old: Tree, new: Tree) -> None:
    """Copy the leaves of `new` into those of `old`, as `copy_plan` says.

    Raises: ValueError if structure, shapes or dtypes differ, or if a leaf cannot be written; nothing is written then.
    """
    copy_plan(old, new)()
