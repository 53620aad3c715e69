# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Momentum to direction on a CPU: one pass instead of six, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.buffers import empty
from fn.kernels.numba_sign_loops import ZERO, compiled
from fn.kernels.simd import (
    LANES,
    above_zero,
    add,
    divide,
    get,
    load,
    put,
    select,
    splat,
    square_root,
    store,
    sub,
)


@compiled
def write_direction(n, x, nu, eps, kept, out):
    """Write x where nu > 0 and x - x elsewhere, and that over sqrt(nu) + eps."""
    wide = splat(eps)
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        m, v = load(x, i), load(nu, i)
        m = select(above_zero(v), m, sub(m, m))
        store(kept, i, m)
        store(out, i, divide(m, add(square_root(v), wide)))
    for i in range(whole, n):
        value, square = get(x, i), get(nu, i)
        value = value if square > ZERO else value - value
        put(kept, i, value)
        put(out, i, value / (np.float32(np.sqrt(square)) + eps))


def direction(x: Tensor, nu: Tensor, eps: float) -> Any:
    """See `reference.direction`."""
    if x.dtype != torch.float32 or nu.dtype != torch.float32:
        return NotImplemented
    x, nu = x.contiguous(), nu.contiguous()
    kept, out = empty(x.shape, torch.float32), empty(x.shape, torch.float32)
    write_direction(x.numel(), x.data_ptr(), nu.data_ptr(), np.float32(eps), kept.data_ptr(), out.data_ptr())
    return kept, out


KERNELS = {"direction": direction}
