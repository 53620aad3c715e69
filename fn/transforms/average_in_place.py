"""The steps in place of a warm-up: gradients are averaged as by the pure `average`, then the step is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fn import tree
from fn.collectives import primitives
from fn.collectives.axis import AxisNames, axis_size
from fn.collectives.compressed_in_place import nothing, successor
from fn.collectives.hierarchy import Codecs
from fn.kernels import ops
from fn.transforms import layout as layouts
from fn.transforms.average import average
from fn.transforms.finite import SkipState
from fn.transforms.in_place import Staged

Tree = Any


def stage_warmup(
    axis: AxisNames | None, codec: Codecs | None, write: Callable[[Any, list[Tensor], list[Tensor]], None]
) -> Callable[[Tree, SkipState, Tree], Staged]:
    """Return how the warm-up of a chain (average, a link of moments, ...) is staged.

    Args: axis, codec: as for `average`. write: (the state of the link, params, mean gradients) writes the step.
    """
    link = average(axis, codec)

    def mean_of(grads: list[Tensor], state: Tree) -> tuple[list[Tensor], list[Tensor], Callable[[], None]]:
        """Return the mean gradients, the memory that they are in, and what writes the errors."""
        if codec is not None:
            mean, after = link.warmup_update(grads, state, grads)
            return mean, mean, successor(state, after)
        if axis is None or axis_size(axis) == 1:
            return grads, grads, nothing
        (bucket,) = layouts.buckets(grads, 1, 1, "flat")
        joined = primitives.pmean(layouts.join(grads, bucket), axis)
        return layouts.split(joined, bucket), [joined], nothing

    def stage(updates: Tree, state: SkipState, params: Tree) -> Staged:
        mean, memory, keep = mean_of(tree.leaves(updates), state.inner[0])

        def commit() -> None:
            write(state.inner[1], tree.leaves(params), mean)
            keep()

        return Staged(squares_are_finite(memory), commit)

    return stage


def squares_are_finite(leaves: list[Tensor]) -> bool | Tensor:
    """Return whether the square of every element is finite, 0-d bool."""
    finite: bool | Tensor = not leaves or ops.direct("largest_magnitude", leaves).square().isfinite()
    return finite
