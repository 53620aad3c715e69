"""Clipping by the global norm over all param groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from fn import tree
from fn.base import Phase, chain, check_number
from fn.collectives.axis import ALONE, Axis, Binding
from fn.errors import expected
from fn.transforms.average import CodedAverageState, average
from fn.transforms.clip import clip_by_global_norm
from fn.transforms.sharded import ShardedState

Tree = Any


def check_max_norm(max_norm: float | None, axes: Sequence[str]) -> None:
    """Refuse a norm that gradients cannot be clipped by. Raises: TypeError if it is no number; ValueError."""
    if max_norm is None:
        return
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(expected("max_norm", "a number above 0", f"{max_norm}"))
    if len(axes) > 1:
        raise ValueError(expected("max_norm", "None where the axes are two or more", f"{max_norm} on {list(axes)}"))


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Refuse the norm that a trainer clips each rank's own gradients by, before anything is trained.

    Args: max_grad_norm: the trainer's setting; None and 0 are not to clip.
    Raises: ValueError that says how to clip.
    """
    if max_grad_norm:
        cure = f"set it to 0, and clip by the norm of all ranks: fn.Optimizer(..., max_norm={max_grad_norm}) with "
        cure += "keep_local(model) in the place of overlap"
        wanted = "0, for a trainer clips the gradients of each rank by a norm of their own"
        raise ValueError(expected("max_grad_norm", wanted, f"{max_grad_norm}", cure))


class Clipping(NamedTuple):
    """How gradients are clipped.

    gradients: (gradients, params) of all groups -> the gradients clipped; None: they stay. binding: of the update that
    follows.
    """

    gradients: Callable[[Tree, Tree], Tree] | None
    binding: AbstractContextManager[Any]


def clipping(phase: Phase, max_norm: float | None, axis: str | None, state: Tree) -> Clipping:
    """Return how gradients are clipped by their global norm before an update.

    In the warm-up the gradients are averaged first, those of all groups in one message, and their norm is that of the
    averaged gradient. The update is then that of one rank on the mean gradient; a sharded one, in which every rank has
    a piece of its own, averages the mean once more, which costs its bytes again. In the compressed phase the averaged
    gradient is not known before it has been sent; all ranks scale by one factor, from the root of the mean squared
    norm, which is an upper bound of the norm of the mean. It is a 4-byte message ahead of the others. So it is in a
    warm-up in codes.

    Args: phase: of the update. max_norm: positive; None: gradients stay as they are. axis: the ranks. state: of the
        transform; it tells whether the warm-up is in codes, and whether it is sharded.
    """
    if max_norm is None:
        return Clipping(None, nullcontext())
    if phase is Phase.WARMUP and tree.instances(state, CodedAverageState):
        phase = Phase.COMPRESSED
    clip = chain(average(axis), clip_by_global_norm(max_norm, axis)).update(phase)
    alone = Binding({})
    sharded = bool(tree.instances(state, ShardedState))  # the norm of a shard is of all ranks
    if axis is not None and phase is Phase.WARMUP and not sharded:
        alone = Binding({axis: Axis(1, torch.tensor(0, dtype=torch.int64, device="cpu"), ALONE)})
    return Clipping(lambda grads, params: clip(grads, ((), ()), params)[0], alone)
