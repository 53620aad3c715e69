"""Clipping by the global norm over all param groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fn import tree
from fn.base import Phase, UpdateFn, chain, check_number
from fn.collectives.axis import ALONE, Axis, Binding
from fn.transforms.average import average
from fn.transforms.clip import clip_by_global_norm
from fn.transforms.in_place import InPlace, Staged

Tree = Any


def check_max_norm(max_norm: float | None, axes: Sequence[str]) -> None:
    """Refuse a norm that gradients cannot be clipped by. Raises: TypeError if it is no number; ValueError."""
    if max_norm is None:
        return
    check_number("max_norm", max_norm)
    if not max_norm > 0 or len(axes) > 1:
        raise ValueError(f"max_norm: is {max_norm} on the axes {list(axes)}; allowed is more than 0 on one axis")


def clipped(update: UpdateFn, phase: Phase, max_norm: float, axis: str | None, state: Tree) -> UpdateFn:
    """Clip gradients by their global norm before an update.

    In the warm-up the gradients are averaged first, those of all groups in one message, and their norm is that of the
    averaged gradient. The update is then that of one rank on the mean gradient; only that of shards stays one of all
    ranks, which average once more what they hold alike. In the compressed phase the averaged gradient is not known
    before it has been sent; all ranks scale by one factor, from the root of the mean squared norm, which is an upper
    bound of the norm of the mean. It is a 4-byte message ahead of the others. So it is in a warm-up in codes.

    An update that is compiled is compiled before: the clipping binds the axis anew, which no compiler can trace.

    Args: update: of a transform over all groups. phase: of the update. max_norm: positive. axis: the ranks. state: of
        the transform; it tells whether the warm-up is in codes, and whether it holds shards.
    """
    if phase is Phase.WARMUP and tree.fields(state, "gradient_errors"):
        phase = Phase.COMPRESSED
    links = chain(average(axis), clip_by_global_norm(max_norm, axis))
    averaged = phase is Phase.WARMUP and not tree.fields(state, "place")
    alone = Binding({axis: Axis(1, torch.tensor(0), ALONE)} if axis is not None and averaged else {})

    def clip(updates: Tree, params: Tree) -> Tree:
        return links.update(phase)(updates, ((), ()), params)[0]

    def clip_and_update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        grads = clip(updates, params)
        with alone:
            return update(grads, state, params)

    if not isinstance(update, InPlace):
        return clip_and_update

    def fits(updates: Tree, state: Tree, params: Tree) -> bool:
        with alone:
            return update.fits(updates, state, params)

    def clip_and_stage(updates: Tree, state: Tree, params: Tree) -> Staged:
        grads = clip(updates, params)
        with alone:
            return update.stage(grads, state, params)

    return InPlace(clip_and_update, fits, clip_and_stage)
