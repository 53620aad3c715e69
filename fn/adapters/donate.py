"""Run a pure update in the buffers of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.interrupts import hold
from fn.base import UpdateFn

Tree = Any


def donate(update: UpdateFn) -> UpdateFn:
    """Make a pure update write its new state back into the buffers of the old one.

    The returned function has the same signature and results, but the state that it returns *is* the state that it
    was given, with new contents: buffers keep their addresses from step to step. Under `torch.compile` the copies
    fuse into the update and nothing is allocated. An update that is a leaf of the old state is copied aside first.

    Raises: ValueError if the update changes the state's structure, a shape or a dtype; the state is then unchanged.
    """

    def donated(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        updates, after = update(updates, state, params)
        olds = tree.leaves(state)
        moved = _identities(olds)
        updates = tree.map(lambda u: u.clone() if _is_one_of(u, olds, moved) else u, updates)
        write_back(state, after)
        return updates, state

    return donated


def write_back(old: Tree, new: Tree) -> None:
    """Copy the leaves of `new` into those of `old`.

    A leaf of `new` that is an old leaf from another place is copied aside first, before that one is overwritten.
    Raises: ValueError if structure, shapes or dtypes differ; nothing is written then.
    """
    olds, structure = tree.flatten(old)
    news, found = tree.flatten(new)
    if structure != found:
        raise ValueError(f"update: changed the structure of the state from {structure} to {found}")
    moved = _identities(olds)
    pairs = [(o, n.clone() if _is_one_of(n, olds, moved) else n) for o, n in zip(olds, news, strict=True) if n is not o]
    for o, n in pairs:
        if o.shape != n.shape or o.dtype != n.dtype:
            raise ValueError(f"update: changed a leaf from {o.dtype} {tuple(o.shape)} to {n.dtype} {tuple(n.shape)}")
    if not torch.compiler.is_compiling():
        hold()
    for o, n in pairs:
        _at_least_1d(o).copy_(_at_least_1d(n))


def _at_least_1d(x: Tensor) -> Tensor:
    """Return a view of a 0-d tensor: what a compiled graph writes into one of float64 itself, torch (2.13) loses."""
    return x if x.dim() else x.view(1)


def _identities(leaves: list[Tensor]) -> frozenset[int]:
    """Return the ids of the leaves; nothing while a compiler traces, for which an id is no constant."""
    return frozenset() if torch.compiler.is_compiling() else frozenset(map(id, leaves))


def _is_one_of(leaf: Tensor, leaves: list[Tensor], identities: frozenset[int]) -> bool:
    return id(leaf) in identities if identities else any(leaf is other for other in leaves)
