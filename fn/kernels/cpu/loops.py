# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the loops on a CPU, compiled by Numba, have in common.

They see addresses, not arrays. A row is a list of places: blocks of elements that do not cross segments, as rows
(first element, length, segment, offset in the segment) of an int64 table, see `places`. Each loop works on the places
low .. high of all rows, so several threads can share the work, and results do not depend on how.

A place is worked through in lanes, LANES elements at a time, and what is left one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from fn.kernels.cpu.simd import get_int, is_normal, multiply_add, select, splat, square_root, store, stream

compiled: Any = njit(nogil=True, cache=True, error_model="numpy")

ZERO = np.float32(0)
SMALLEST = np.finfo(np.float32).smallest_normal


@compiled
def block_of(k, places, table):
    """Return the row of place k of all rows, its first element, its length, its segment and its offset in that."""
    place = table + 32 * (k % places)
    return k // places, get_int(place, 0), get_int(place, 1), get_int(place, 2), get_int(place, 3)


@compiled
def write(address, i, v, larger_than_cache):
    """Store a vector, past the cache if so wanted."""
    if larger_than_cache:
        stream(address, i, v)
    else:
        store(address, i, v)


@compiled
def moved_lanes(m, x, small, weight):
    """Return the moving average of m and x as `torch.lerp` takes it (see `lerp_weight`), zero where it is not normal.

    Where gradients stay zero, as those of rare words do, a momentum would otherwise come to rest at 5.6e-45, and some
    processors take many times as long for such numbers.
    """
    m = multiply_add(weight, m - x, x if small else m)
    return select(is_normal(m), m, splat(ZERO))


@compiled
def moved_one(m, x, small, weight):
    """Return for one element what `moved_lanes` does."""
    m = (x if small else m) + weight * (m - x)
    return ZERO if abs(m) < SMALLEST else m


@compiled
def descended_lanes(p, m, v, eps, decay, lr, c1, c2):
    """Return params after AdamW's step; c1, c2: what m and the root of v are multiplied by to correct their biases."""
    return p - lr * multiply_add(decay, p, m * c1 / (square_root(v) * c2 + eps))


@compiled
def descended_one(p, m, v, eps, decay, lr, c1, c2):
    """Return for one element what `descended_lanes` does."""
    return p - lr * (m * c1 / (np.float32(np.sqrt(v)) * c2 + eps) + decay * p)
