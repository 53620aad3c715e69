# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Whole optimizer steps on a CPU, compiled by Numba: one pass over the gradients, one over moments and params.

The loops see a table of addresses per list of tensors. A place (see `loops`) is a block of one tensor, and of one
row of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fn.kernels.cpu.blocks import BlockTable, block_table, run, runs_of_tensors
from fn.kernels.cpu.loops import (
    ZERO,
    block_of,
    compiled,
    descended_lanes,
    descended_one,
    moved_lanes,
    moved_one,
    write,
)
from fn.kernels.cpu.sign_loops import mean_block, mean_of_lanes, mean_of_one
from fn.kernels.cpu.signs import divided, messages
from fn.kernels.cpu.simd import (
    LANES,
    PREFETCH_FAR,
    PREFETCH_NEAR,
    fused_multiply_add,
    get,
    get_int,
    larger,
    largest,
    load,
    magnitude,
    multiply_add,
    no_magnitude,
    prefetch,
    put,
    select,
    splat,
    store,
)
from fn.kernels.reference import NORM_BLOCK
from fn.kernels.reference.layout import plain


@compiled
def onebit_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache,
    ps, mus, nus, widths, sizes, copies, gs, small, weight, buffer, sent, bits, row_stride, stride, ranks, scales,
    eps, decay, lr, c1, c2, keep_zeros, scratch,
):  # fmt: skip
    """Decode the mean momentum of W messages and take 1-bit Adam's step with it. copies can be 0.

    Unless gs is None, whose machine code is another, write the errors of the moving averages that were sent, too.
    """
    zero, eps_, decay_, lr_, c1_, c2_ = splat(ZERO), splat(eps), splat(decay), splat(lr), splat(c1), splat(c2)
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        start = r * get_int(widths, s) + offset
        count = max(min(get_int(sizes, s) - start, length), 0)
        p, mu, nu = get_int(ps, s) + 4 * start, get_int(mus, s) + 4 * start, get_int(nus, s) + 4 * start
        theirs, factors = bits + r * row_stride, scales + 4 * (r * ranks * segments + s)
        if ranks > 2:
            mean_block(theirs, stride, ranks, factors, segments, scratch - 4 * first, first, length, length, False)
        theirs, scale, other = theirs + first // 8, get(factors, 0), get(factors, segments) if ranks == 2 else ZERO
        up, down, other_up, other_down = splat(scale), splat(-scale), splat(other), splat(-other)
        too = get_int(copies, s) + 4 * start if copies else 0
        nontemporal = gs is None and larger_than_cache and mu % 32 == 0
        too_nontemporal = larger_than_cache and too % 32 == 0
        if gs is not None:
            g, error, mine = get_int(gs, s) + 4 * start, buffer + 4 * (r * n + first), get(sent, r * segments + s)
            weight_, my_up, my_down = splat(weight), splat(mine), splat(-mine)
        whole = count - count % LANES
        for i in range(0, whole, LANES):
            prefetch(p, i + PREFETCH_NEAR)
            prefetch(nu, i + PREFETCH_NEAR)
            if not nontemporal:
                prefetch(mu, i + PREFETCH_NEAR)
            if gs is not None:
                prefetch(g, i + PREFETCH_NEAR)
                prefetch(error, i + PREFETCH_NEAR)
                x, m = load(g, i), load(mu, i)
                b = multiply_add(weight_, m - x, x if small else m) + load(error, i)
                store(error, i, b - select(b >= zero, my_up, my_down))
            v = load(nu, i)
            m = mean_of_lanes(theirs, stride, ranks, up, down, other_up, other_down, scratch, i)
            if keep_zeros:
                m = select(v > zero, m, zero)
            write(mu, i, m, nontemporal)
            new = descended_lanes(load(p, i), m, v, eps_, decay_, lr_, c1_, c2_)
            store(p, i, new)
            if too:
                write(too, i, new, too_nontemporal)
        for i in range(whole, count):
            if gs is not None:
                x, m = get(g, i), get(mu, i)
                b = fused_multiply_add(weight, m - x, x if small else m) + get(error, i)
                put(error, i, b - (mine if b >= ZERO else -mine))
            v = get(nu, i)
            m = mean_of_one(theirs, stride, ranks, factors, segments, i)
            if keep_zeros and not v > ZERO:
                m = ZERO
            put(mu, i, m)
            new = descended_one(get(p, i), m, v, eps, decay, lr, c1, c2)
            put(p, i, new)
            if too:
                put(too, i, new)
        if gs is not None:
            for i in range(count, min(length, get_int(valid, r * segments + s) - offset)):  # padding that counts
                b = get(error, i)
                put(error, i, b - (mine if b >= ZERO else -mine))


@compiled
def adamw_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache,
    ps, gs, mus, nus, small, weight, b2, rest2, eps, decay, lr, c1, c2, frozen,
):  # fmt: skip
    """Take AdamW's step, place by place."""
    weight_, b2_, rest2_, eps_, zero = splat(weight), splat(b2), splat(rest2), splat(eps), splat(ZERO)
    decay_, lr_, c1_, c2_ = splat(decay), splat(lr), splat(c1), splat(c2)
    for k in range(low, high):
        _, _, length, s, offset = block_of(k, places, table)
        start = 4 * offset
        p, g, mu, nu = get_int(ps, s) + start, get_int(gs, s) + start, get_int(mus, s) + start, get_int(nus, s) + start
        whole = length - length % LANES
        for i in range(0, whole, LANES):
            prefetch(p, i + PREFETCH_NEAR)
            prefetch(g, i + PREFETCH_NEAR)
            prefetch(mu, i + PREFETCH_NEAR)
            prefetch(nu, i + PREFETCH_NEAR)
            x, v = load(g, i), load(nu, i)
            m = moved_lanes(load(mu, i), x, small, weight_)
            if frozen:
                m = select(v > zero, m, zero)
            else:
                v = multiply_add(x * x, rest2_, b2_ * v)
                store(nu, i, v)
            store(mu, i, m)
            store(p, i, descended_lanes(load(p, i), m, v, eps_, decay_, lr_, c1_, c2_))
        for i in range(whole, length):
            x, v = get(g, i), get(nu, i)
            m = moved_one(get(mu, i), x, small, weight)
            if frozen:
                m = m if v > ZERO else ZERO
            else:
                v = b2 * v + x * x * rest2
                put(nu, i, v)
            put(mu, i, m)
            put(p, i, descended_one(get(p, i), m, v, eps, decay, lr, c1, c2))


@compiled
def adamw_into_blocks(
    low, high, places, table, segments, valid, n, larger_than_cache,
    news, rows, count, share, olds, peaks, small, weight, b2, rest2, eps, decay, lr, c1, c2,
):  # fmt: skip
    """Take the step of `adamw_blocks` with the mean of `count` gradients, elsewhere; note the largest magnitudes."""
    weight_, b2_, rest2_, eps_, share_ = splat(weight), splat(b2), splat(rest2), splat(eps), splat(share)
    decay_, lr_, c1_, c2_ = splat(decay), splat(lr), splat(c1), splat(c2)
    for k in range(low, high):
        _, first, length, _, _ = block_of(k, places, table)
        start = 4 * first
        p, mu, nu = get_int(olds, 0) + start, get_int(olds, 1) + start, get_int(olds, 2) + start
        to_p, to_mu, to_nu = get_int(news, 0) + start, get_int(news, 1) + start, get_int(news, 2) + start
        nontemporal = larger_than_cache and (to_p | to_mu | to_nu) % 32 == 0
        g, most_g, most_p = get_int(rows, 0) + start, no_magnitude(), no_magnitude()
        whole = length - length % LANES
        for i in range(0, whole, LANES):
            x = load(g, i)
            for r in range(1, count):
                x = x + load(get_int(rows, r) + start, i)
            x = x * share_
            m = moved_lanes(load(mu, i), x, small, weight_)
            v = multiply_add(x * x, rest2_, b2_ * load(nu, i))
            new = descended_lanes(load(p, i), m, v, eps_, decay_, lr_, c1_, c2_)
            write(to_p, i, new, nontemporal)
            write(to_mu, i, m, nontemporal)
            write(to_nu, i, v, nontemporal)
            most_g, most_p = larger(most_g, magnitude(x)), larger(most_p, magnitude(new))
        for i in range(whole, length):
            x = get(g, i)
            for r in range(1, count):
                x += get(get_int(rows, r) + start, i)
            x *= share
            m = moved_one(get(mu, i), x, small, weight)
            v = b2 * get(nu, i) + x * x * rest2
            new = descended_one(get(p, i), m, v, eps, decay, lr, c1, c2)
            put(to_p, i, new)
            put(to_mu, i, m)
            put(to_nu, i, v)
            most_g, most_p = larger(most_g, magnitude(splat(x))), larger(most_p, magnitude(splat(new)))
        put(peaks, 2 * k, largest(most_g))
        put(peaks, 2 * k + 1, largest(most_p))


@compiled
def magnitude_blocks(low, high, places, table, segments, valid, n, larger_than_cache, xs, peaks):
    """Note the largest magnitude of every place."""
    for k in range(low, high):
        _, _, length, s, offset = block_of(k, places, table)
        x = get_int(xs, s) + 4 * offset
        a, b, c, d = no_magnitude(), no_magnitude(), no_magnitude(), no_magnitude()
        whole = length - length % (4 * LANES)
        for i in range(0, whole, 4 * LANES):
            prefetch(x, i + PREFETCH_FAR)
            a, b = larger(a, magnitude(load(x, i))), larger(b, magnitude(load(x, i + LANES)))
            prefetch(x, i + 2 * LANES + PREFETCH_FAR)
            c, d = larger(c, magnitude(load(x, i + 2 * LANES))), larger(d, magnitude(load(x, i + 3 * LANES)))
        for i in range(whole, length):
            a = larger(a, magnitude(splat(get(x, i))))
        put(peaks, k, largest(larger(larger(a, b), larger(c, d))))


BLOCK = 1 << 16
"""Elements of a place where no norm is taken."""


def addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return the table of addresses."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def extents(tensors: Sequence[Tensor], at: BlockTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the widths of the segments and the sizes of the tensors, which can end before the valid elements do."""
    return at.widths, np.fromiter(map(Tensor.numel, tensors), np.int64, len(tensors))


def whole(rows: int, at: BlockTable) -> Tensor:
    """Return what stands for the lengths of segments where a loop does not look at them."""
    return torch.empty((rows, at.segments), dtype=torch.int64, device="cpu")


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
    """See `reference.onebit_adam_`."""
    if not plain(copies):
        return NotImplemented
    too = addresses(copies)
    nothing = None, None, None, None, None
    descent = eps, weight_decay, lr, mu_weight, nu_weight
    return _onebit(
        params, mu, nu, too.ctypes.data if copies else 0, nothing, bits, scales, valid, runs, descent, keep_zeros
    )


def onebit_adam_feedback_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], grads: Sequence[Tensor], decay: float,
    buffer: Tensor, sent: Tensor, bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], eps: float,
    weight_decay: float, lr: float, mu_weight: float, nu_weight: float, keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference.onebit_adam_feedback_`."""
    if not plain(grads, (buffer, sent)):
        return NotImplemented
    table = addresses(grads)
    feedback = table.ctypes.data, *lerp_weight(decay), buffer.data_ptr(), sent.data_ptr()
    descent = eps, weight_decay, lr, mu_weight, nu_weight
    return _onebit(params, mu, nu, 0, feedback, bits, scales, valid, runs, descent, keep_zeros)


def _onebit(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], copies: int, feedback: tuple[Any, ...],
    bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], descent: tuple[float, ...], keep_zeros: bool,
) -> Any:  # fmt: skip
    at = block_table(runs)
    if not at.aligned or not plain(params, mu, nu, (scales,)):
        return NotImplemented
    tables = addresses(params), addresses(mu), addresses(nu), *extents(params, at)
    (received, row_stride, stride), scales = messages(bits), divided(scales)
    message = received.data_ptr(), row_stride, stride, bits.shape[1], scales.data_ptr()
    ends = *(t.ctypes.data for t in tables), copies, *feedback, *message, *_numbers(*descent), keep_zeros
    run(onebit_blocks, at, valid.contiguous(), *ends, scratch=4 * NORM_BLOCK)
    return None


def _numbers(eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float) -> list[np.float32]:
    """Return eps, weight decay, learning rate and what `descended_lanes` multiplies by."""
    return [*map(np.float32, (eps, weight_decay, lr, 1 / mu_weight, nu_weight**-0.5))]


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.adamw_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    at = block_table(runs_of_tensors(params), BLOCK)
    tables = addresses(params), addresses(grads), addresses(mu), addresses(nu)
    numbers = np.float32(b2), np.float32(1 - b2), *_numbers(eps, weight_decay, lr, mu_weight, nu_weight)
    run(adamw_blocks, at, whole(1, at), *(t.ctypes.data for t in tables), *lerp_weight(b1), *numbers, frozen)
    return None


def adamw_into_(
    new: Sequence[Tensor], rows: Sequence[Tensor], old: Sequence[Tensor], b1: float, b2: float, eps: float,
    weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
) -> Any:  # fmt: skip
    """See `reference.adamw_into_`."""
    if not plain(new, rows, old):
        return NotImplemented
    at = block_table([1, new[0].numel()], BLOCK)
    peaks = torch.zeros((max(1, len(at.table)), 2), device="cpu")
    tables = addresses(new), addresses(rows), addresses(old)
    news, gradients, olds = (t.ctypes.data for t in tables)
    numbers = np.float32(b2), np.float32(1 - b2), *_numbers(eps, weight_decay, lr, mu_weight, nu_weight)
    ends = news, gradients, len(rows), np.float32(1.0 / len(rows)), olds, peaks.data_ptr()
    run(adamw_into_blocks, at, whole(1, at), *ends, *lerp_weight(b1), *numbers)
    return peaks.amax(0)


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference.largest_magnitude`."""
    if not grads or not plain(grads):
        return NotImplemented
    at = block_table(runs_of_tensors(grads), BLOCK)
    table, peaks = addresses(grads), torch.zeros(max(1, len(at.table)), device="cpu")
    run(magnitude_blocks, at, whole(1, at), table.ctypes.data, peaks.data_ptr())
    return peaks.amax()


_FOUND = (onebit_adam_, onebit_adam_feedback_, adamw_, adamw_into_, largest_magnitude)
KERNELS = {f.__name__: f for f in _FOUND}
