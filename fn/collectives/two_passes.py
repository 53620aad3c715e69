"""Encoding with error feedback in two passes: codes first, the next error once it is certain that it is wanted.

A step that other ranks can still break must not change the errors. What was encoded is computed a second time, instead
of being kept, so that no second error is held while the step waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fn import tree

Tree = Any


class Sent(NamedTuple):
    """What a kernel writes the next error over an error from: error (R, n), the scales (R, S) that were sent, place."""

    error: Tensor
    scales: Tensor
    valid: Tensor
    runs: list[int]


class Later(NamedTuple):
    """What `Fused` does, in two passes, for errors that are vectors.

    accepts: error -> whether it is a vector on a device that has kernels for this.
    averages: (mu, grads, decay, error=, rows=R) -> payload of `Fused.averages`, and what its next error is formed from
        by the kernel that takes the step.
    serve: (payload of W rows, error) -> payload of their mean.
    keep: (payload of W rows, error, payload of their mean): write the next error of `serve` over the error.
    """

    accepts: Callable[[Tree], bool]
    averages: Callable[..., tuple[Tree, Sent]]
    serve: Callable[[Tree, Tensor], Tree]
    keep: Callable[[Tree, Tensor, Tree], None]


def successor(old: Tree, new: Tree) -> Callable[[], None]:
    """Return what lets a state be the next one, by giving its tensors the memory of the new ones.

    Raises: ValueError now, before anything is written, if structure, a shape or a dtype differs.
    """
    olds, structure = tree.flatten(old)
    news, found = tree.flatten(new)
    if structure != found:
        leaves = f"{tree.paths(old)} into {tree.paths(new)}"
        raise ValueError(f"state: an update turned the leaves {leaves}; allowed are those of init, in the same trees")
    for o, n in zip(olds, news, strict=True):
        if o.shape != n.shape or o.dtype != n.dtype:
            change = f"from {o.dtype} {tuple(o.shape)} to {n.dtype} {tuple(n.shape)}"
            raise ValueError(f"state: an update changed a leaf {change}; allowed are the form and the dtype of init")

    def write() -> None:
        for o, n in zip(olds, news, strict=True):
            if o is not n:
                o.set_(n)

    return write


def nothing() -> None:
    """Write nothing."""
