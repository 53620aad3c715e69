"""The average of gradients that the staged steps of a warm-up begin with, beside the pure `average`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fn.collectives import primitives
from fn.collectives.axis import AxisNames, axis_size
from fn.collectives.hierarchy import Codecs
from fn.kernels import ops
from fn.transforms import layout as layouts
from fn.transforms.average import average
from fn.transforms.in_place import successor

Tree = Any


class Mean(NamedTuple):
    """Averaged gradients. ok: they and their squares are finite, 0-d bool. keep: write the errors, if there are any."""

    grads: list[Tensor]
    ok: bool | Tensor
    keep: Callable[[], None]


def averaging(axis: AxisNames | None, codec: Codecs | None) -> Callable[[list[Tensor], Tree], Mean]:
    """Return (gradients, the state of `average`) -> their mean over the ranks of an axis, as `average` has it."""
    link = average(axis, codec)

    def exact(leaves: list[Tensor], state: Tree) -> Mean:
        if axis is None or axis_size(axis) == 1:
            return Mean(leaves, squares_are_finite(leaves), lambda: None)
        (bucket,) = layouts.buckets(leaves, 1, 1, "flat")
        mean = primitives.pmean(layouts.join(leaves, bucket), axis)
        return Mean(layouts.part(mean, bucket), squares_are_finite([mean]), lambda: None)

    def coded(leaves: list[Tensor], state: Tree) -> Mean:
        grads, after = link.warmup_update(leaves, state, leaves)
        return Mean(grads, squares_are_finite(grads), successor(state, after))

    return exact if codec is None else coded


def squares_are_finite(leaves: list[Tensor]) -> bool | Tensor:
    """Return whether the square of every element is finite, 0-d bool."""
    finite: bool | Tensor = not leaves or ops.direct("largest_magnitude", leaves).square().isfinite()
    return finite
