# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""LAMB's and 1-bit LAMB's steps on a CPU, compiled by Numba: one pass over moments, with sums, and one over params."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.numba_int_loops import raise_peak
from fn.kernels.numba_sign_loops import ZERO, compiled
from fn.kernels.numba_step import SMALLEST, addresses, lerp_weight, whole
from fn.kernels.places import Places, places, plain, run, runs_of_tensors
from fn.kernels.simd import (
    LANES,
    SOON,
    above_zero,
    add,
    divide,
    get,
    get_int,
    is_normal,
    lane_sum,
    larger,
    largest,
    load,
    magnitude,
    mul,
    multiply_add,
    no_magnitude,
    prefetch,
    put,
    put_double,
    select,
    splat,
    square_root,
    store,
    sub,
)


@compiled
def moments_places(
    low, high, places, table, segments, valid, n, past_cache,
    ps, gs, mus, nus, small, weight, b2, rest2, eps, decay, sums,
):  # fmt: skip
    """Move Adam's moments and add up squares, place by place; sums (places, 3) float64.

    A momentum below the smallest normal number becomes zero, as in `adamw_places`.
    """
    weight_, b2_, rest2_, eps_, decay_ = splat(weight), splat(b2), splat(rest2), splat(eps), splat(decay)
    for k in range(low, high):
        place = table + 32 * k
        length, s, start = get_int(place, 1), get_int(place, 2), 4 * get_int(place, 3)
        p, g, mu, nu = get_int(ps, s) + start, get_int(gs, s) + start, get_int(mus, s) + start, get_int(nus, s) + start
        ofp, ofu, ofm, zero = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        full = length - length % LANES
        for i in range(0, full, LANES):
            prefetch(p, i + SOON)
            prefetch(g, i + SOON)
            prefetch(mu, i + SOON)
            prefetch(nu, i + SOON)
            x, m, v, old = load(g, i), load(mu, i), load(nu, i), load(p, i)
            m = multiply_add(weight_, sub(m, x), x if small else m)
            m = select(is_normal(m), m, zero)
            v = multiply_add(mul(x, x), rest2_, mul(b2_, v))
            store(mu, i, m)
            store(nu, i, v)
            u = multiply_add(decay_, old, divide(m, add(square_root(v), eps_)))
            ofp, ofu, ofm = multiply_add(old, old, ofp), multiply_add(u, u, ofu), multiply_add(m, m, ofm)
        a, b, c = lane_sum(ofp), lane_sum(ofu), lane_sum(ofm)
        for i in range(full, length):
            x, m, old = get(g, i), get(mu, i), get(p, i)
            m = (x if small else m) + weight * (m - x)
            m = ZERO if abs(m) < SMALLEST else m
            v = b2 * get(nu, i) + x * x * rest2
            put(mu, i, m)
            put(nu, i, v)
            u = m / (np.float32(np.sqrt(v)) + eps) + decay * old
            a, b, c = a + old * old, b + u * u, c + m * m
        put_double(sums, 3 * k, np.float64(a))
        put_double(sums, 3 * k + 1, np.float64(b))
        put_double(sums, 3 * k + 2, np.float64(c))


@compiled
def fresh_places(
    low, high, places, table, segments, valid, n, past_cache,
    ps, xs, mus, nus, freshes, shrink, b1, rest1, b2, rest2, eps, decay, keep_zeros, sums,
):  # fmt: skip
    """Take the momentum and move the second moment that goes on, place by place; sums (places, 3) float64."""
    b1_, rest1_, b2_, rest2_, eps_ = splat(b1), splat(rest1), splat(b2), splat(rest2), splat(eps)
    decay_, zero = splat(decay), splat(ZERO)
    for k in range(low, high):
        place = table + 32 * k
        length, s, start = get_int(place, 1), get_int(place, 2), 4 * get_int(place, 3)
        p, x, mu, nu = get_int(ps, s) + start, get_int(xs, s) + start, get_int(mus, s) + start, get_int(nus, s) + start
        fresh, factor = get_int(freshes, s) + start, get(shrink, s)
        factor_, sizes, ofq, ofu = splat(factor), no_magnitude(), zero, zero
        full = length - length % LANES
        for i in range(0, full, LANES):
            prefetch(p, i + SOON)
            prefetch(x, i + SOON)
            prefetch(mu, i + SOON)
            prefetch(nu, i + SOON)
            prefetch(fresh, i + SOON)
            m, v, old = divide(load(x, i), factor_), load(nu, i), load(p, i)
            if keep_zeros:
                m = select(above_zero(v), m, zero)
            g = divide(sub(m, mul(b1_, load(mu, i))), rest1_)
            f = multiply_add(mul(g, g), rest2_, mul(b2_, load(fresh, i)))
            store(mu, i, m)
            store(fresh, i, f)
            root = add(square_root(v), eps_)
            sizes = larger(sizes, magnitude(divide(root, add(square_root(f), eps_))))
            q = divide(m, root)
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
        put_double(sums, 3 * k, np.float64(peak))
        put_double(sums, 3 * k + 1, np.float64(b))
        put_double(sums, 3 * k + 2, np.float64(c))


@compiled
def step_places(
    low, high, places, table, segments, valid, n, past_cache, ps, mus, nus, rates, eps, decay
):  # fmt: skip
    """Take the step of every tensor at its own rate, place by place."""
    eps_, decay_ = splat(eps), splat(decay)
    for k in range(low, high):
        place = table + 32 * k
        length, s, start = get_int(place, 1), get_int(place, 2), 4 * get_int(place, 3)
        p, mu, nu, rate = get_int(ps, s) + start, get_int(mus, s) + start, get_int(nus, s) + start, get(rates, s)
        rate_ = splat(rate)
        full = length - length % LANES
        for i in range(0, full, LANES):
            prefetch(p, i + SOON)
            prefetch(mu, i + SOON)
            prefetch(nu, i + SOON)
            old = load(p, i)
            u = multiply_add(decay_, old, divide(load(mu, i), add(square_root(load(nu, i)), eps_)))
            store(p, i, sub(old, mul(rate_, u)))
        for i in range(full, length):
            old = get(p, i)
            u = get(mu, i) / (np.float32(np.sqrt(get(nu, i))) + eps) + decay * old
            put(p, i, old - rate * u)


def _places(tensors: Sequence[Tensor]) -> Places:
    return places(runs_of_tensors(tensors))


def _per_tensor(sums: Tensor, at: Places, *, peaks: bool) -> Tensor:
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
    """See `reference_lamb.lamb_moments_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    at = _places(params)
    tables = addresses(params), addresses(grads), addresses(mu), addresses(nu)
    numbers = *lerp_weight(b1), *map(np.float32, (b2, 1 - b2, eps, weight_decay))
    sums = torch.zeros((len(at.table), 3), dtype=torch.float64)
    run(moments_places, at, whole(1, at), *(t.ctypes.data for t in tables), *numbers, sums.data_ptr())
    return _per_tensor(sums, at, peaks=False)


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor],
    nu: Sequence[Tensor], fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float,
    keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference_lamb.onebit_lamb_moments_`."""
    lists = params, averages, mu, nu, fresh
    if not plain(*lists, (scaling,)):
        return NotImplemented
    at = _places(params)
    tables = [addresses(tensors) for tensors in lists]
    numbers = map(np.float32, (b1, 1 - b1, b2, 1 - b2, eps, weight_decay))
    sums = torch.zeros((len(at.table), 3), dtype=torch.float64)
    ends = scaling.data_ptr(), *numbers, keep_zeros, sums.data_ptr()
    run(fresh_places, at, whole(1, at), *(t.ctypes.data for t in tables), *ends)
    return _per_tensor(sums, at, peaks=True)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float,
) -> Any:  # fmt: skip
    """See `reference_lamb.lamb_step_`."""
    if not plain(params, mu, nu, (rates,)):
        return NotImplemented
    at = _places(params)
    tables = addresses(params), addresses(mu), addresses(nu)
    numbers = np.float32(eps), np.float32(weight_decay)
    run(step_places, at, whole(1, at), *(t.ctypes.data for t in tables), rates.data_ptr(), *numbers)
    return None


KERNELS = {f.__name__: f for f in (lamb_moments_, onebit_lamb_moments_, lamb_step_)}
