"""Transforms for some leaves of a tree only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fn import tree
from fn.base import Phase, Transform, UpdateFn, has_phase

Tree = Any


def mask(inner: Transform, mask: Tree | Callable[[Tree], Tree]) -> Transform:
    """Apply a transform to the leaves where the mask is true; the others pass as they are.

    Args:
        inner: the transform; it sees the list of the chosen leaves.
        mask: a tree of bools like the params, or a function from params to such a tree.
    Returns: a transform with the phases and the state of `inner`.
    Raises: TypeError if a leaf of the mask is not a bool; ValueError if it has another structure than the params.

    Example, no weight decay on vectors: `mask(add_decayed_weights(0.1), lambda p: tree.map(lambda x: x.ndim > 1, p))`.
    """

    def chosen(params: Tree) -> list[bool]:
        found = mask(params) if callable(mask) else mask
        if tree.flatten(found)[1] != tree.flatten(params)[1]:
            raise ValueError("mask: has another structure than the params")
        bad = [path for path, leaf in zip(tree.paths(found), tree.leaves(found), strict=True) if type(leaf) is not bool]
        if bad:
            raise TypeError(f"mask: leaf {bad[0]!r} is not a bool; allowed are True and False")
        return tree.leaves(found)

    def pick(t: Tree, chosen: list[bool]) -> list[Any]:
        return [leaf for leaf, keep in zip(tree.leaves(t), chosen, strict=True) if keep]

    def init(params: Tree) -> Tree:
        return inner.init(pick(params, chosen(params)))

    def masked(phase: Phase) -> UpdateFn:
        found: UpdateFn = getattr(inner, f"{phase.value}_update")
        if not has_phase(inner, phase):
            return found

        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            keep = chosen(params)
            new, state = found(pick(updates, keep), state, pick(params, keep))
            leaves, structure = tree.flatten(updates)
            rest = iter(new)
            return tree.unflatten(structure, [next(rest) if k else u for u, k in zip(leaves, keep, strict=True)]), state

        return update

    return Transform(init, *(masked(phase) for phase in Phase))
