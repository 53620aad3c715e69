"""Clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fn import tree
from fn.arguments import check_number
from fn.base import Transform, UpdateFn
from fn.collectives.axis import AxisNames, names
from fn.collectives.primitives import pmean
from fn.errors import expected
from fn.facts import Averages, Facts
from fn.kernels import rules
from fn.kernels.lists import squared_norms
from fn.transforms.leafwise import apply

Tree = Any


class ClipByNorm(NamedTuple):
    """The rule u min(1, max_norm / |u|), with the norm over all leaves."""

    max_norm: float
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the clipped updates, and the state."""
        return self.run(updates, state, params)


def clip_by_global_norm(max_norm: float, axis: AxisNames | None = None) -> Transform:
    """Scale the updates down to a global norm of at most max_norm.

    Behind `average`, the warm-up clips the averaged gradient. In the compressed and the local phase the updates are
    each rank's own, and the norm of their mean is not known. Without `axis` each rank clips by its own norm. With
    `axis` all ranks of a compressed phase scale by the same factor, from the root of the mean squared norm: an upper
    bound of the norm of the mean, for one all-reduce of 4 bytes. A norm whose square overflows makes updates NaN, so
    that a guarded step is skipped.

        >>> import torch, fn
        >>> grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}                         # of norm 5
        >>> fn.clip_by_global_norm(1.0).update(fn.Phase.WARMUP)(grads, (), None)[0]
        {'a': tensor([0.6000]), 'b': tensor([0.8000])}

    Args: max_norm: positive. axis: the axis' name, or None.
    Raises: ValueError if max_norm is not positive.

    Paper: Pascanu et al., On the difficulty of training recurrent neural networks (arXiv 1211.5063), algorithm 1.
    """
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(expected("max_norm", "a number above 0", f"{max_norm}"))
    return clip_by(max_norm, axis, squared_norm)


def clip_by(max_norm: float, axis: AxisNames | None, square_of: Callable[[Tree], Tensor]) -> Transform:
    """Return `clip_by_global_norm` with a sum of squares of its own, such as one over the shards of tensors.

    Args: square_of: updates -> the sum of their squares, 0-d, in float32 or wider.
    """

    def by_rank(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        tree.check_real(updates, "updates")
        return scale(updates, square_of(updates)), state

    def shared(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        tree.check_real(updates, "updates")
        square = square_of(updates)
        return scale(updates, pmean(square, axis) if axis is not None else square), state

    def scale(updates: Tree, square: Tensor) -> Tree:
        factor = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        factor = factor + (square - square)  # NaN for what overflows, which would become zero, unnoticed
        return apply(rules.scaled, (updates,), factor, wide=True)  # rounded once: the norm stays what is asked for

    own, of_all = ClipByNorm(max_norm, by_rank), ClipByNorm(max_norm, shared)
    axes, name = () if axis is None else names(axis), ("clip_by_global_norm",)
    facts = Facts(axes, name, tree=name, averages=Averages())  # only a norm is averaged
    return Transform(lambda params: (), own, of_all, own, facts=facts)


def squared_norm(updates: Tree) -> Tensor:
    """Return the sum of squares over all leaves, 0-d, in float32 or wider."""
    return squared_norms(tree.leaves(updates)).sum()
