"""0/1 Adam's variance steps and local steps in place, beside the pure link of `zero_one`."""

from __future__ import annotations

from typing import Any

import torch

from fn import tree
from fn.base import Transform
from fn.collectives.axis import AxisNames
from fn.transforms.adam_in_place import Descent, averaged, squares_are_finite
from fn.transforms.finite import SkipState
from fn.transforms.in_place import InPlace, Staged, has_kernel, same_shapes
from fn.transforms.zero_one import ZeroOneAdamState, largest

Tree = Any


def with_zero_one_in_place(tx: Transform, axis: AxisNames, h: Descent) -> Transform:
    """Let the variance steps and the local steps of a chain (average, anchored 0/1 Adam) be staged.

    Over several axes they stay the pure ones.
    """
    if not isinstance(axis, str):
        return tx

    def fits(updates: Tree, state: SkipState, params: Tree) -> bool:
        link: ZeroOneAdamState = state.inner[1]
        lists = [tree.leaves(t) for t in (params, updates, link.mu, link.nu, link.anchor)]
        return h.eps > 0 and same_shapes(lists) and has_kernel("adamw_", lists)

    def descend(link: ZeroOneAdamState, params: Tree, grads: list[torch.Tensor], *, frozen: bool) -> None:
        lists = [tree.leaves(params), grads, tree.leaves(link.mu), tree.leaves(link.nu)]
        decay = 0.0 if frozen else h.weight_decay  # that of local steps comes with the synchronisation
        torch.ops.fn.adamw_(*lists, h.b1, h.b2, h.eps, decay, float(h.lr), 1.0, 1.0, frozen)
        link.step.add_(1)

    def variance(updates: Tree, state: SkipState, params: Tree) -> Staged:
        link: ZeroOneAdamState = state.inner[1]
        grads, ok = averaged(tree.leaves(updates), axis)
        peak = largest(grads)

        def commit() -> None:
            descend(link, params, grads, frozen=False)
            torch._foreach_copy_(tree.leaves(link.anchor), tree.leaves(params))
            link.peak.copy_(peak)

        return Staged(ok, commit)

    def local(updates: Tree, state: SkipState, params: Tree) -> Staged:
        link: ZeroOneAdamState = state.inner[1]
        grads = tree.leaves(updates)
        ok = squares_are_finite(grads)

        def commit() -> None:
            if ok:
                descend(link, params, grads, frozen=True)
            else:  # this rank's own: no message tells the others
                link.dropped.add_(1)
                link.step.add_(1)
            link.elapsed.add_(h.lr)

        return Staged(True, commit)

    return tx._replace(
        warmup_update=InPlace(tx.warmup_update, fits, variance), local_update=InPlace(tx.local_update, fits, local)
    )
