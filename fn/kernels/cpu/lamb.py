# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""LAMB's and 1-bit LAMB's steps on a CPU, compiled by Numba: one pass over moments, with sums, and one over params."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.cpu.blocks import BlockTable, block_table, run, runs_of_tensors
from fn.kernels.cpu.int_loops import raise_peak
from fn.kernels.cpu.loops import ZERO, block_of, compiled, moved_lanes, moved_one
from fn.kernels.cpu.simd import (
    LANES,
    PREFETCH_NEAR,
    get,
    get_int,
    lane_sum,
    larger,
    largest,
    load,
    magnitude,
    multiply_add,
    no_magnitude,
    prefetch,
    put,
    put_double,
    select,
    splat,
    square_root,
    store,
)
from fn.kernels.cpu.steps import addresses, lerp_weight, whole
from fn.kernels.reference.layout import plain


@compiled
def update_lanes(p, m, v, eps, decay):
    """Return LAMB's direction, decay included."""
    return multiply_add(decay, p, m / (square_root(v) + eps))


@compiled
def update_one(p, m, v, eps, decay):
    """Return for one element what `update_lanes` does."""
    return m / (np.float32(np.sqrt(v)) + eps) + decay * p


@compiled
def put_sums(sums, k, a, b, c):
    """Write row k of sums (places, 3)."""
    put_double(sums, 3 * k, np.float64(a))
    put_double(sums, 3 * k + 1, np.float64(b))
    put_double(sums, 3 * k + 2, np.float64(c))


@compiled
def moments_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache,
    ps, gs, mus, nus, small, weight, b2, rest2, eps, decay, sums,
):  # fmt: skip
    """Move Adam's moments and add up squares, place by place; sums (places, 3) float64."""
    weight_, b2_, rest2_, eps_, decay_ = splat(weight), splat(b2), splat(rest2), splat(eps), splat(decay)
    for k in range(low, high):
        _, _, length, s, offset = block_of(k, places, table)
        start = 4 * offset
        p, g, mu, nu = get_int(ps, s) + start, get_int(gs, s) + start, get_int(mus, s) + start, get_int(nus, s) + start
        ofp, ofu, ofm = splat(ZERO), splat(ZERO), splat(ZERO)
        full = length - length % LANES
        for i in range(0, full, LANES):
            prefetch(p, i + PREFETCH_NEAR)
            prefetch(g, i + PREFETCH_NEAR)
            prefetch(mu, i + PREFETCH_NEAR)
            prefetch(nu, i + PREFETCH_NEAR)
            x, old = load(g, i), load(p, i)
            m = moved_lanes(load(mu, i), x, small, weight_)
            v = multiply_add(x * x, rest2_, b2_ * load(nu, i))
            store(mu, i, m)
            store(nu, i, v)
            u = update_lanes(old, m, v, eps_, decay_)
            ofp, ofu, ofm = multiply_add(old, old, ofp), multiply_add(u, u, ofu), multiply_add(m, m, ofm)
        a, b, c = lane_sum(ofp), lane_sum(ofu), lane_sum(ofm)
        for i in range(full, length):
            x, old = get(g, i), get(p, i)
            m = moved_one(get(mu, i), x, small, weight)
            v = b2 * get(nu, i) + x * x * rest2
            put(mu, i, m)
            put(nu, i, v)
            u = update_one(old, m, v, eps, decay)
            a, b, c = a + old * old, b + u * u, c + m * m
        put_sums(sums, k, a, b, c)


@compiled
def fresh_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache,
    ps, xs, mus, nus, freshes, shrink, b1, rest1, b2, rest2, eps, decay, keep_zeros, sums,
):  # fmt: skip
    """Take the momentum and move the second moment that goes on, place by place; sums (places, 3) float64."""
    b1_, rest1_, b2_, rest2_, eps_ = splat(b1), splat(rest1), splat(b2), splat(rest2), splat(eps)
    decay_, zero = splat(decay), splat(ZERO)
    for k in range(low, high):
        _, _, length, s, offset = block_of(k, places, table)
        start = 4 * offset
        p, x, mu, nu = get_int(ps, s) + start, get_int(xs, s) + start, get_int(mus, s) + start, get_int(nus, s) + start
        fresh, factor = get_int(freshes, s) + start, get(shrink, s)
        factor_, sizes, ofq, ofu = splat(factor), no_magnitude(), zero, zero
        full = length - length % LANES
        for i in range(0, full, LANES):
            prefetch(p, i + PREFETCH_NEAR)
            prefetch(x, i + PREFETCH_NEAR)
            prefetch(mu, i + PREFETCH_NEAR)
            prefetch(nu, i + PREFETCH_NEAR)
            prefetch(fresh, i + PREFETCH_NEAR)
            m, v, old = load(x, i) / factor_, load(nu, i), load(p, i)
            if keep_zeros:
                m = select(v > zero, m, zero)
            g = (m - b1_ * load(mu, i)) / rest1_
            f = multiply_add(g * g, rest2_, b2_ * load(fresh, i))
            store(mu, i, m)
            store(fresh, i, f)
            root = square_root(v) + eps_
            sizes = larger(sizes, magnitude(root / (square_root(f) + eps_)))
            q = m / root
            u = multiply_add(decay_, old, q)
            ofq, ofu = multiply_add(q, q, ofq), multiply_add(u, u, ofu)
        peak, b, c = largest(sizes), lane_sum(ofq), lane_sum(ofu)
        for i in range(full, length):
            m, v, old = get(x, i) / factor, get(nu, i), get(p, i)
            if keep_zeros and not v > ZERO:
                m = ZERO
            g = (m - b1 * get(mu, i)) / rest1
            f = b2 * get(fresh, i) + g * g * rest2
            put(mu, i, m)
            put(fresh, i, f)
            root = np.float32(np.sqrt(v)) + eps
            peak = raise_peak(peak, root / (np.float32(np.sqrt(f)) + eps))
            q = m / root
            u = q + decay * old
            b, c = b + q * q, c + u * u
        put_sums(sums, k, peak, b, c)


@compiled
def step_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache, ps, mus, nus, rates, eps, decay
):  # fmt: skip
    """Take the step of every tensor at its own rate, place by place."""
    eps_, decay_ = splat(eps), splat(decay)
    for k in range(low, high):
        _, _, length, s, offset = block_of(k, places, table)
        start = 4 * offset
        p, mu, nu, rate = get_int(ps, s) + start, get_int(mus, s) + start, get_int(nus, s) + start, get(rates, s)
        rate_ = splat(rate)
        full = length - length % LANES
        for i in range(0, full, LANES):
            prefetch(p, i + PREFETCH_NEAR)
            prefetch(mu, i + PREFETCH_NEAR)
            prefetch(nu, i + PREFETCH_NEAR)
            old = load(p, i)
            store(p, i, old - rate_ * update_lanes(old, load(mu, i), load(nu, i), eps_, decay_))
        for i in range(full, length):
            old = get(p, i)
            put(p, i, old - rate * update_one(old, get(mu, i), get(nu, i), eps, decay))


def _block_table(tensors: Sequence[Tensor]) -> BlockTable:
    return block_table(runs_of_tensors(tensors))


def _per_tensor(sums: Tensor, at: BlockTable, *, peaks: bool) -> Tensor:
    """Return the sums (S, 3) of tensors from those of places; peaks: the first one is a largest number."""
    owner = torch.from_numpy(np.ascontiguousarray(at.table[:, 2]))
    found = sums.new_zeros(at.segments, 3).index_add_(0, owner, sums)
    if peaks:
        found[:, 0] = sums.new_zeros(at.segments).scatter_reduce_(0, owner, sums[:, 0], "amax")
    return found


def lamb_moments_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float,
) -> Any:  # fmt: skip
    """See `reference.lamb_moments_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    at = _block_table(params)
    tables = addresses(params), addresses(grads), addresses(mu), addresses(nu)
    numbers = *lerp_weight(b1), *map(np.float32, (b2, 1 - b2, eps, weight_decay))
    sums = torch.zeros((len(at.table), 3), dtype=torch.float64, device="cpu")
    run(moments_blocks, at, whole(1, at), *(t.ctypes.data for t in tables), *numbers, sums.data_ptr())
    return _per_tensor(sums, at, peaks=False)


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor],
    nu: Sequence[Tensor], fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float,
    keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference.onebit_lamb_moments_`."""
    lists = params, averages, mu, nu, fresh
    if not plain(*lists, (scaling,)):
        return NotImplemented
    at = _block_table(params)
    tables = [addresses(tensors) for tensors in lists]
    numbers = map(np.float32, (b1, 1 - b1, b2, 1 - b2, eps, weight_decay))
    sums = torch.zeros((len(at.table), 3), dtype=torch.float64, device="cpu")
    ends = scaling.data_ptr(), *numbers, keep_zeros, sums.data_ptr()
    run(fresh_blocks, at, whole(1, at), *(t.ctypes.data for t in tables), *ends)
    return _per_tensor(sums, at, peaks=True)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float,
) -> Any:  # fmt: skip
    """See `reference.lamb_step_`."""
    if not plain(params, mu, nu, (rates,)):
        return NotImplemented
    at = _block_table(params)
    tables = addresses(params), addresses(mu), addresses(nu)
    numbers = np.float32(eps), np.float32(weight_decay)
    run(step_blocks, at, whole(1, at), *(t.ctypes.data for t in tables), rates.data_ptr(), *numbers)
    return None


KERNELS = {f.__name__: f for f in (lamb_moments_, onebit_lamb_moments_, lamb_step_)}
