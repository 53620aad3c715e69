"""A scale that depends on the shape of a matrix: `scale_by_shape`."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fn import tree
from fn.base import Transform, stateless

Tree = Any


def scale_by_shape() -> Transform:
    """Multiply the updates of a matrix of n rows and m columns by sqrt(n / m), so that one rate fits all shapes.

    A tensor of more dimensions is the matrix of its first dimension and the rest. Others pass as they are.

    Paper: Ahn et al., Dion (arXiv 2504.05295), section 3.2; n / m is fan-out / fan-in of a linear layer's weight.
    """

    def scaled(x: Tensor) -> Tensor:
        if x.ndim < 2 or not x.numel():
            return x
        return x * math.sqrt(x.shape[0] / math.prod(x.shape[1:]))

    return stateless(lambda updates, params: tree.map(scaled, updates))
