"""Encoding with error feedback in two passes: codes first, the next error once it is certain that it is wanted.

A step that other ranks can still break must not change the errors. What was encoded is computed a second time, instead
of being kept, so that no second error is held while the step waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

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
