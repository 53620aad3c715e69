"""A combinator that compares the ranks' hyper-parameters at init."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fn import tree
from fn.base import Transform
from fn.collectives.agreement import check_agreement, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames
from fn.kernels.table import cells

Tree = Any


def agreed(inner: Transform, axis: AxisNames | None, *, kernel: str | None = None) -> Transform:
    """Compare shapes, dtypes, hyper-parameters and codec over the ranks of an axis when a state is made.

    Args: inner: the transform. axis: the axis' name, or None for no comparison. kernel: one that all ranks have or
        none has, because what a step sends depends on it.
    Raises: ValueError from `init`, on every rank, that names the first rank and field that differ.
    """
    if axis is None:
        return inner

    def init(params: Tree) -> Tree:
        if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(params)):  # a model or a generator, for one
            tree.check_real(params, "params")
        device = device_of(params)
        fields = {**describe_leaves(params), **describe(inner)}
        if kernel is not None:
            there = "there" if cells(kernel, device.type) else f"missing for {device.type!r}"
            fields[f"kernel {kernel!r}, on which depends what a step sends,"] = there
        check_agreement(axis, fields, device)
        return inner.init(params)

    return inner._replace(init=init)
