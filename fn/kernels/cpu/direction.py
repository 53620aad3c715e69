# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""From momentum to steps on a CPU, compiled by Numba: Adam's direction, and the drift that 0/1 Adam sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.cpu.blocks import block_table, run
from fn.kernels.cpu.loops import ZERO, block_of, compiled, write
from fn.kernels.cpu.simd import (
    LANES,
    PREFETCH_NEAR,
    get,
    get_int,
    load,
    multiply_add,
    prefetch,
    put,
    select,
    splat,
    square_root,
    store,
)
from fn.kernels.cpu.steps import addresses, extents, lerp_weight, whole
from fn.kernels.memory_pool import empty
from fn.kernels.reference.layout import plain


@compiled
def drift_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache,
    ps, anchors, mus, gs, nus, widths, sizes, small, weight, eps, lr, out,
):  # fmt: skip
    """Write the drift of tensors into rows, place by place."""
    weight_, eps_, lr_, zero = splat(weight), splat(eps), splat(lr), splat(ZERO)
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        start = r * get_int(widths, s) + offset
        count = max(min(get_int(sizes, s) - start, length), 0)
        p, anchor, mu = get_int(ps, s) + 4 * start, get_int(anchors, s) + 4 * start, get_int(mus, s) + 4 * start
        g, nu, to = get_int(gs, s) + 4 * start, get_int(nus, s) + 4 * start, out + 4 * (r * n + first)
        full = count - count % LANES
        nontemporal = larger_than_cache and to % 32 == 0
        for i in range(0, full, LANES):
            prefetch(p, i + PREFETCH_NEAR)
            prefetch(anchor, i + PREFETCH_NEAR)
            prefetch(g, i + PREFETCH_NEAR)
            prefetch(mu, i + PREFETCH_NEAR)
            prefetch(nu, i + PREFETCH_NEAR)
            x, m, v = load(g, i), load(mu, i), load(nu, i)
            m = select(v > zero, multiply_add(weight_, m - x, x if small else m), zero)
            write(to, i, (load(p, i) - load(anchor, i)) * (square_root(v) + eps_) - lr_ * m, nontemporal)
        for i in range(full, count):
            x, m, v = get(g, i), get(mu, i), get(nu, i)
            m = (x if small else m) + weight * (m - x) if v > ZERO else ZERO
            put(to, i, (get(p, i) - get(anchor, i)) * (np.float32(np.sqrt(v)) + eps) - lr * m)
        for i in range(count, length):
            put(to, i, ZERO)


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.drift`."""
    lists = params, anchors, mu, grads, nu
    if not plain(*lists):
        return NotImplemented
    at = block_table(runs)
    tables = *map(addresses, lists), *extents(params, at)
    out = empty((rows, at.n), torch.float32)
    numbers = *lerp_weight(decay), np.float32(eps), np.float32(lr)
    run(drift_blocks, at, whole(rows, at), *(t.ctypes.data for t in tables), *numbers, out.data_ptr())
    return out


@compiled
def write_direction(n, x, nu, eps, kept, out):
    """Write x where nu > 0 and x - x elsewhere, and that over sqrt(nu) + eps."""
    zero, eps_ = splat(ZERO), splat(eps)
    full = n - n % LANES
    for i in range(0, full, LANES):
        m, v = load(x, i), load(nu, i)
        m = select(v > zero, m, m - m)
        store(kept, i, m)
        store(out, i, m / (square_root(v) + eps_))
    for i in range(full, n):
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


KERNELS = {"drift": drift, "direction": direction}
