# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Momentum in signs with error feedback on a CPU, compiled by Numba: in one pass, or in two.

In two passes the codes come first, and the error when the step is written: what was encoded is then computed a second
time, by the same operations, instead of being kept. So a step that waits for other ranks holds no second error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels import reference
from fn.kernels.buffers import empty
from fn.kernels.numba_sign import finish, messages, norms_agree, shares, sums_of
from fn.kernels.numba_sign_loops import ZERO, compiled, mean_of_lanes, mean_of_one, mean_place, serve
from fn.kernels.numba_step import addresses, encode_averages, extents, lerp_weight
from fn.kernels.places import Places, places, plain, run
from fn.kernels.simd import (
    LANES,
    SOON,
    above_zero,
    add,
    below,
    divide,
    fused_multiply_add,
    get,
    get_int,
    load,
    mul,
    multiply_add,
    positive,
    prefetch,
    put,
    select,
    splat,
    square_root,
    store,
    sub,
)


@compiled
def feedback_places(
    low, high, places, table, segments, valid, n, past_cache,
    ps, mus, nus, gs, widths, sizes, small, weight, buffer, sent, bits, row_stride, stride, ranks, scales,
    eps, decay, lr, c1, c2, keep_zeros, scratch,
):  # fmt: skip
    """Write the errors of moving averages that were sent, and take the step of `onebit_places`."""
    zero, eps_, decay_, lr_, c1_, c2_ = splat(ZERO), splat(eps), splat(decay), splat(lr), splat(c1), splat(c2)
    weight_ = splat(weight)
    for k in range(low, high):
        r, place = k // places, table + 32 * (k % places)
        first, length, s, offset = get_int(place, 0), get_int(place, 1), get_int(place, 2), get_int(place, 3)
        here = r * segments + s
        start = r * get_int(widths, s) + offset
        count = max(min(get_int(sizes, s) - start, length), 0)
        p, mu, nu = get_int(ps, s) + 4 * start, get_int(mus, s) + 4 * start, get_int(nus, s) + 4 * start
        g, error, real = get_int(gs, s) + 4 * start, buffer + 4 * (r * n + first), get_int(valid, here) - offset
        theirs, factors = bits + r * row_stride, scales + 4 * (r * ranks * segments + s)
        if ranks > 2:
            mean_place(theirs, stride, ranks, factors, segments, scratch - 4 * first, first, length, length, False)
        theirs, scale, other = theirs + first // 8, get(factors, 0), get(factors, segments) if ranks == 2 else ZERO
        up, down, other_up, other_down = splat(scale), splat(-scale), splat(other), splat(-other)
        mine = get(sent, here)
        my_up, my_down = splat(mine), splat(-mine)
        whole = count - count % LANES
        for i in range(0, whole, LANES):
            prefetch(p, i + SOON)
            prefetch(g, i + SOON)
            prefetch(mu, i + SOON)
            prefetch(nu, i + SOON)
            prefetch(error, i + SOON)
            x, m = load(g, i), load(mu, i)
            b = add(multiply_add(weight_, sub(m, x), x if small else m), load(error, i))
            store(error, i, sub(b, select(positive(b), my_up, my_down)))
            v = load(nu, i)
            m = mean_of_lanes(theirs, stride, ranks, up, down, other_up, other_down, scratch, i)
            if keep_zeros:
                m = select(above_zero(v), m, zero)
            store(mu, i, m)
            u = divide(mul(m, c1_), add(mul(square_root(v), c2_), eps_))
            old = load(p, i)
            store(p, i, sub(old, mul(lr_, multiply_add(decay_, old, u))))
        for i in range(whole, count):
            x, m = get(g, i), get(mu, i)
            b = fused_multiply_add(weight, m - x, x if small else m) + get(error, i)
            put(error, i, b - (mine if b >= ZERO else -mine))
            v = get(nu, i)
            m = mean_of_one(theirs, stride, ranks, factors, segments, i)
            if keep_zeros and not v > ZERO:
                m = ZERO
            put(mu, i, m)
            old = get(p, i)
            u = (m * c1) / (np.float32(np.sqrt(v)) * c2 + eps)
            put(p, i, old - lr * (u + decay * old))
        for i in range(count, min(length, real)):  # padding that counts
            b = get(error, i)
            put(error, i, b - (mine if b >= ZERO else -mine))


@compiled
def serve_again(
    low, high, places, table, segments, valid, n, past_cache,
    received, row_stride, stride, ranks, scales, buffer, sent, scratch,
):  # fmt: skip
    """Write the error of the mean of W messages, which goes place by place through `scratch`."""
    zero = splat(ZERO)
    for k in range(low, high):
        r, place = k // places, table + 32 * (k % places)
        first, length, s, offset = get_int(place, 0), get_int(place, 1), get_int(place, 2), get_int(place, 3)
        here = r * segments + s
        real = get_int(valid, here) - offset
        mean, error, mine = scratch - 4 * first, buffer + 4 * r * n, get(sent, here)
        mean_place(received + r * row_stride, stride, ranks, scales + 4 * (r * ranks * segments + s), segments, mean,
                   first, length, real, False)  # fmt: skip
        up, down = splat(mine), splat(-mine)
        whole = length - length % LANES
        for i in range(first, first + whole, LANES):
            b = add(load(mean, i), load(error, i))
            store(error, i, sub(b, select(below(first + real - i), select(positive(b), up, down), zero)))
        for i in range(first + whole, first + length):
            b = get(mean, i) + get(error, i)
            put(error, i, b - (ZERO if i >= first + real else mine if b >= ZERO else -mine))


def _encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, b: Tensor | None,
    valid: Tensor, at: Places,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the bits and the squares of places; write what is encoded into b, if there is one."""
    bits = empty((buffer.shape[0], reference.bytes_for(at.n)), torch.uint8)
    squares = torch.empty((buffer.shape[0], len(at.table)), dtype=torch.float64)
    small, weight = lerp_weight(decay)
    ends, weight = ((grads, mu), -weight) if small else ((mu, grads), weight)  # from one end or from the other
    tables = *map(addresses, ends), *extents(mu, at)
    outs = [0 if t is None else t.data_ptr() for t in (buffer, sent, b, bits, squares)]
    run(encode_averages, at, valid, *(t.ctypes.data for t in tables), weight, *outs, scratch=8 * reference.NORM_BLOCK)
    return bits, squares


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference_step.momentum_encode`."""
    at = places(runs)
    if not at.aligned or not plain(mu, grads, (buffer, sent)):
        return NotImplemented
    valid, b = valid.contiguous(), empty((buffer.shape[0], at.n), torch.float32)
    bits, squares = _encode(mu, grads, decay, buffer, sent, b, valid, at)
    return (b, *finish(b, bits, squares, at, valid, runs))


def momentum_signs(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference_step.momentum_signs`."""
    at = places(runs)
    if not at.aligned or not plain(mu, grads, (buffer,)) or not norms_agree(at):
        return NotImplemented
    bits, squares = _encode(mu, grads, decay, buffer, torch.zeros(valid.shape), None, valid.contiguous(), at)
    return bits, sums_of(squares, runs)


def onebit_adam_feedback_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], grads: Sequence[Tensor], decay: float,
    buffer: Tensor, sent: Tensor, bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], eps: float,
    weight_decay: float, lr: float, mu_weight: float, nu_weight: float, keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference_step.onebit_adam_feedback_`."""
    at = places(runs)
    if not at.aligned or not plain(params, mu, nu, grads, (buffer, sent, scales)):
        return NotImplemented
    tables = addresses(params), addresses(mu), addresses(nu), addresses(grads), *extents(params, at)
    numbers = map(np.float32, (eps, weight_decay, lr, 1 / mu_weight, nu_weight**-0.5))
    mine = *lerp_weight(decay), buffer.data_ptr(), sent.data_ptr()
    (received, row_stride, stride), scales = messages(bits), shares(scales)
    message = received.data_ptr(), row_stride, stride, bits.shape[1], scales.data_ptr()
    ends = *(t.ctypes.data for t in tables), *mine, *message, *numbers, keep_zeros
    run(feedback_places, at, valid.contiguous(), *ends, scratch=4 * reference.NORM_BLOCK)
    return None


def serve_signs(bits: Tensor, scales: Tensor, buffer: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.serve_signs`."""
    at, scales = places(runs), shares(scales)
    if not at.aligned or not plain((scales, buffer)) or not norms_agree(at):
        return NotImplemented
    received, row_stride, stride = messages(bits)
    rows, ranks = bits.shape[:2]
    mine = empty((rows, reference.bytes_for(at.n)), torch.uint8)
    squares = torch.empty((rows, len(at.table)), dtype=torch.float64)
    message = received.data_ptr(), row_stride, stride, ranks, scales.data_ptr()
    sent = torch.zeros(valid.shape)
    outs = buffer.data_ptr(), sent.data_ptr(), 0, mine.data_ptr(), squares.data_ptr()
    run(serve, at, valid.contiguous(), *message, *outs, scratch=4 * reference.NORM_BLOCK)
    return mine, sums_of(squares, runs)


def serve_feedback_(
    buffer: Tensor, bits: Tensor, scales: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference.serve_feedback_`."""
    at, scales = places(runs), shares(scales)
    if not at.aligned or not plain((buffer, scales, sent)):
        return NotImplemented
    received, row_stride, stride = messages(bits)
    message = received.data_ptr(), row_stride, stride, bits.shape[1], scales.data_ptr()
    error = buffer.data_ptr(), sent.data_ptr()
    run(serve_again, at, valid.contiguous(), *message, *error, scratch=4 * reference.NORM_BLOCK, over=True)
    return None


_FOUND = (momentum_encode, momentum_signs, onebit_adam_feedback_, serve_signs, serve_feedback_)
KERNELS = {f.__name__: f for f in _FOUND}
