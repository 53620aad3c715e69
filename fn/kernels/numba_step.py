# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Whole optimizer steps on a CPU, compiled by Numba: one pass over the gradients, one over moments and params.

The loops see a table of addresses per list of tensors. A place (see `places`) is a block of at most 4096 elements of
one tensor, and of one row of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fn.kernels.numba_sign import messages, shares
from fn.kernels.numba_sign_loops import ZERO, compiled, encode_place, mean_of_lanes, mean_of_one, mean_place, write
from fn.kernels.places import Places, places, plain, run, runs_of_tensors
from fn.kernels.reference import NORM_BLOCK
from fn.kernels.simd import (
    AHEAD,
    LANES,
    SOON,
    above_zero,
    add,
    divide,
    get,
    get_int,
    is_normal,
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

SMALLEST = np.finfo(np.float32).smallest_normal


@compiled
def padded_into(out, first, x, count, length):
    """Write `count` elements of x, from `first`, and zeros up to `length`."""
    for i in range(first, first + count):
        put(out, i, get(x, i))
    for i in range(first + count, first + length):
        put(out, i, ZERO)


@compiled
def encode_averages(
    low, high, places, table, segments, valid, n, past_cache,
    mus, gs, widths, sizes, weight, buffer, sent, out, bits, squares, scratch,
):  # fmt: skip
    """Encode with feedback the moving averages of tensors, as `encode_place`; ends are padded in `scratch`."""
    for k in range(low, high):
        r, place = k // places, table + 32 * (k % places)
        first, length, s, offset = get_int(place, 0), get_int(place, 1), get_int(place, 2), get_int(place, 3)
        here = r * segments + s
        start = r * get_int(widths, s) + offset
        count = max(min(get_int(sizes, s) - start, length), 0)
        mu, g = get_int(mus, s) + 4 * (start - first), get_int(gs, s) + 4 * (start - first)
        if count < length:
            padded = scratch - 4 * first
            padded_into(padded, first, mu, count, length)
            padded_into(padded + 4 * length, first, g, count, length)
            mu, g = padded, padded + 4 * length
        row = 4 * r * n
        square = encode_place(g, mu, weight, buffer + row, out + row if out else out, bits + r * ((n + 7) // 8),
                              get(sent, here), first, length, get_int(valid, here) - offset, past_cache)  # fmt: skip
        put_double(squares, k, square)


@compiled
def onebit_places(
    low, high, places, table, segments, valid, n, past_cache,
    ps, mus, nus, widths, sizes, copies, bits, row_stride, stride, ranks, scales, eps, decay, lr, c1, c2, keep_zeros,
    scratch,
):  # fmt: skip
    """Decode the mean momentum of W messages and take 1-bit Adam's step with it. copies can be 0."""
    zero, eps_, decay_, lr_, c1_, c2_ = splat(ZERO), splat(eps), splat(decay), splat(lr), splat(c1), splat(c2)
    for k in range(low, high):
        r, place = k // places, table + 32 * (k % places)
        first, length, s, offset = get_int(place, 0), get_int(place, 1), get_int(place, 2), get_int(place, 3)
        start = r * get_int(widths, s) + offset
        count = max(min(get_int(sizes, s) - start, length), 0)
        p, mu, nu = get_int(ps, s) + 4 * start, get_int(mus, s) + 4 * start, get_int(nus, s) + 4 * start
        theirs, factors = bits + r * row_stride, scales + 4 * (r * ranks * segments + s)
        if ranks > 2:
            mean_place(theirs, stride, ranks, factors, segments, scratch - 4 * first, first, length, length, False)
        theirs, scale, other = theirs + first // 8, get(factors, 0), get(factors, segments) if ranks == 2 else ZERO
        up, down, other_up, other_down = splat(scale), splat(-scale), splat(other), splat(-other)
        too = get_int(copies, s) + 4 * start if copies else 0
        aside, too_aside = past_cache and mu % 32 == 0, past_cache and too % 32 == 0
        whole = count - count % LANES
        for i in range(0, whole, LANES):
            prefetch(p, i + SOON)
            prefetch(nu, i + SOON)
            if not aside:
                prefetch(mu, i + SOON)
            v = load(nu, i)
            m = mean_of_lanes(theirs, stride, ranks, up, down, other_up, other_down, scratch, i)
            if keep_zeros:
                m = select(above_zero(v), m, zero)
            write(mu, i, m, aside)
            u = divide(mul(m, c1_), add(mul(square_root(v), c2_), eps_))
            old = load(p, i)
            new = sub(old, mul(lr_, multiply_add(decay_, old, u)))
            store(p, i, new)
            if too:
                write(too, i, new, too_aside)
        for i in range(whole, count):
            v = get(nu, i)
            m = mean_of_one(theirs, stride, ranks, factors, segments, i)
            if keep_zeros and not v > ZERO:
                m = ZERO
            put(mu, i, m)
            old = get(p, i)
            u = (m * c1) / (np.float32(np.sqrt(v)) * c2 + eps)
            put(p, i, old - lr * (u + decay * old))
            if too:
                put(too, i, get(p, i))


@compiled
def adamw_places(
    low, high, places, table, segments, valid, n, past_cache,
    ps, gs, mus, nus, small, weight, b2, rest2, eps, decay, lr, c1, c2, frozen,
):  # fmt: skip
    """Take AdamW's step, place by place.

    A momentum below the smallest normal number becomes zero. Where gradients stay zero, as those of rare words do, it
    would otherwise come to rest at 5.6e-45, and some processors take many times as long for such numbers.
    """
    weight_, b2_, rest2_, eps_, zero = splat(weight), splat(b2), splat(rest2), splat(eps), splat(ZERO)
    decay_, lr_, c1_, c2_ = splat(decay), splat(lr), splat(c1), splat(c2)
    for k in range(low, high):
        place = table + 32 * k
        length, s, offset = get_int(place, 1), get_int(place, 2), get_int(place, 3)
        start = 4 * offset
        p, g, mu, nu = get_int(ps, s) + start, get_int(gs, s) + start, get_int(mus, s) + start, get_int(nus, s) + start
        whole = length - length % LANES
        for i in range(0, whole, LANES):
            prefetch(p, i + SOON)
            prefetch(g, i + SOON)
            prefetch(mu, i + SOON)
            prefetch(nu, i + SOON)
            x, m = load(g, i), load(mu, i)
            m = multiply_add(weight_, sub(m, x), x if small else m)
            m = select(is_normal(m), m, zero)
            v = load(nu, i)
            if frozen:
                m = select(above_zero(v), m, zero)
            else:
                v = multiply_add(mul(x, x), rest2_, mul(b2_, v))
                store(nu, i, v)
            store(mu, i, m)
            u = divide(mul(m, c1_), add(mul(square_root(v), c2_), eps_))
            old = load(p, i)
            store(p, i, sub(old, mul(lr_, multiply_add(decay_, old, u))))
        for i in range(whole, length):
            x, m = get(g, i), get(mu, i)
            m = (x if small else m) + weight * (m - x)
            m = ZERO if abs(m) < SMALLEST else m
            v = get(nu, i)
            if frozen:
                m = m if v > ZERO else ZERO
            else:
                v = b2 * v + x * x * rest2
                put(nu, i, v)
            put(mu, i, m)
            old = get(p, i)
            u = (m * c1) / (np.float32(np.sqrt(v)) * c2 + eps)
            put(p, i, old - lr * (u + decay * old))


@compiled
def adamw_into_places(
    low, high, places, table, segments, valid, n, past_cache,
    news, rows, count, share, olds, peaks, small, weight, b2, rest2, eps, decay, lr, c1, c2,
):  # fmt: skip
    """Take the step of `adamw_places` with the mean of `count` gradients, elsewhere; note the largest magnitudes."""
    weight_, b2_, rest2_, eps_, share_ = splat(weight), splat(b2), splat(rest2), splat(eps), splat(share)
    zero = splat(ZERO)
    decay_, lr_, c1_, c2_ = splat(decay), splat(lr), splat(c1), splat(c2)
    for k in range(low, high):
        place = table + 32 * k
        length, start = get_int(place, 1), 4 * get_int(place, 0)
        p, mu, nu = get_int(olds, 0) + start, get_int(olds, 1) + start, get_int(olds, 2) + start
        to_p, to_mu, to_nu = get_int(news, 0) + start, get_int(news, 1) + start, get_int(news, 2) + start
        aside = past_cache and (to_p | to_mu | to_nu) % 32 == 0
        first, most_g, most_p = get_int(rows, 0) + start, no_magnitude(), no_magnitude()
        whole = length - length % LANES
        for i in range(0, whole, LANES):
            x = load(first, i)
            for r in range(1, count):
                x = add(x, load(get_int(rows, r) + start, i))
            x = mul(x, share_)
            m, v, old = load(mu, i), load(nu, i), load(p, i)
            m = multiply_add(weight_, sub(m, x), x if small else m)
            m = select(is_normal(m), m, zero)
            v = multiply_add(mul(x, x), rest2_, mul(b2_, v))
            u = divide(mul(m, c1_), add(mul(square_root(v), c2_), eps_))
            new = sub(old, mul(lr_, multiply_add(decay_, old, u)))
            write(to_p, i, new, aside)
            write(to_mu, i, m, aside)
            write(to_nu, i, v, aside)
            most_g, most_p = larger(most_g, magnitude(x)), larger(most_p, magnitude(new))
        for i in range(whole, length):
            x = get(first, i)
            for r in range(1, count):
                x += get(get_int(rows, r) + start, i)
            x *= share
            m, v, old = get(mu, i), get(nu, i), get(p, i)
            m = (x if small else m) + weight * (m - x)
            m = ZERO if abs(m) < SMALLEST else m
            v = b2 * v + x * x * rest2
            u = (m * c1) / (np.float32(np.sqrt(v)) * c2 + eps)
            new = old - lr * (u + decay * old)
            put(to_p, i, new)
            put(to_mu, i, m)
            put(to_nu, i, v)
            most_g, most_p = larger(most_g, magnitude(splat(x))), larger(most_p, magnitude(splat(new)))
        put(peaks, 2 * k, largest(most_g))
        put(peaks, 2 * k + 1, largest(most_p))


@compiled
def magnitude_places(low, high, places, table, segments, valid, n, past_cache, xs, peaks):
    """Note the largest magnitude of every place."""
    for k in range(low, high):
        place = table + 32 * k
        length, s, offset = get_int(place, 1), get_int(place, 2), get_int(place, 3)
        x = get_int(xs, s) + 4 * offset
        a, b, c, d = no_magnitude(), no_magnitude(), no_magnitude(), no_magnitude()
        whole = length - length % (4 * LANES)
        for i in range(0, whole, 4 * LANES):
            prefetch(x, i + AHEAD)
            a, b = larger(a, magnitude(load(x, i))), larger(b, magnitude(load(x, i + LANES)))
            prefetch(x, i + 2 * LANES + AHEAD)
            c, d = larger(c, magnitude(load(x, i + 2 * LANES))), larger(d, magnitude(load(x, i + 3 * LANES)))
        for i in range(whole, length):
            a = larger(a, magnitude(splat(get(x, i))))
        put(peaks, k, largest(larger(larger(a, b), larger(c, d))))


BLOCK = 1 << 16
"""Elements of a place where no norm is taken."""


def addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return the table of addresses."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def extents(tensors: Sequence[Tensor], at: Places) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the widths of the segments and the sizes of the tensors, which can end before the valid elements do."""
    return at.widths, np.fromiter(map(Tensor.numel, tensors), np.int64, len(tensors))


def whole(rows: int, at: Places) -> Tensor:
    """Return what stands for the lengths of segments where a loop does not look at them."""
    return torch.empty((rows, at.segments), dtype=torch.int64)


def lerp_weight(decay: float) -> tuple[bool, np.float32]:
    """Return which end `torch.lerp` starts from, and the weight of the other."""
    decay = float(decay)  # it may be a 0-d tensor
    small = decay < 0.5
    return small, np.float32(decay if small else np.float32(decay) - np.float32(1))


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
    keep_zeros: bool, copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference_step.onebit_adam_`."""
    at = places(runs)
    if not at.aligned or not plain(params, mu, nu, (scales,), copies):
        return NotImplemented
    tables, too = (addresses(params), addresses(mu), addresses(nu), *extents(params, at)), addresses(copies)
    numbers = map(np.float32, (eps, weight_decay, lr, 1 / mu_weight, nu_weight**-0.5))
    (received, row_stride, stride), scales = messages(bits), shares(scales)
    message = received.data_ptr(), row_stride, stride, bits.shape[1], scales.data_ptr()
    ends = *(t.ctypes.data for t in tables), too.ctypes.data if copies else 0, *message, *numbers, keep_zeros
    run(onebit_places, at, valid.contiguous(), *ends, scratch=4 * NORM_BLOCK)
    return None


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference_step.adamw_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    at = places(runs_of_tensors(params), BLOCK)
    tables = addresses(params), addresses(grads), addresses(mu), addresses(nu)
    numbers = map(np.float32, (b2, 1 - b2, eps, weight_decay, lr, 1 / mu_weight, nu_weight**-0.5))
    run(adamw_places, at, whole(1, at), *(t.ctypes.data for t in tables), *lerp_weight(b1), *numbers, frozen)
    return None


def adamw_into_(
    new: Sequence[Tensor], rows: Sequence[Tensor], old: Sequence[Tensor], b1: float, b2: float, eps: float,
    weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
) -> Any:  # fmt: skip
    """See `reference_step.adamw_into_`."""
    if not plain(new, rows, old):
        return NotImplemented
    at = places([1, new[0].numel()], BLOCK)
    peaks = torch.zeros((max(1, len(at.table)), 2))
    tables = addresses(new), addresses(rows), addresses(old)
    news, gradients, olds = (t.ctypes.data for t in tables)
    numbers = map(np.float32, (b2, 1 - b2, eps, weight_decay, lr, 1 / mu_weight, nu_weight**-0.5))
    ends = news, gradients, len(rows), np.float32(1.0 / len(rows)), olds, peaks.data_ptr()
    run(adamw_into_places, at, whole(1, at), *ends, *lerp_weight(b1), *numbers)
    return peaks.amax(0)


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference_step.largest_magnitude`."""
    if not grads or not plain(grads):
        return NotImplemented
    at = places(runs_of_tensors(grads), BLOCK)
    table, peaks = addresses(grads), torch.zeros(max(1, len(at.table)))
    run(magnitude_places, at, whole(1, at), table.ctypes.data, peaks.data_ptr())
    return peaks.amax()


KERNELS = {f.__name__: f for f in (onebit_adam_, adamw_, adamw_into_, largest_magnitude)}
