# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The loops of the sign kernels on a CPU, compiled by Numba; `signs` calls them. Blocks: see `loops`.

A place has at most 4096 elements, over which squares are added in float32.
"""

from __future__ import annotations

import numpy as np

from fn.kernels.cpu.loops import ZERO, block_of, compiled, write
from fn.kernels.cpu.simd import (
    LANES,
    PREFETCH_NEAR,
    below,
    fused_multiply_add,
    get,
    get_byte,
    get_double,
    get_int,
    lane_sum,
    load,
    load_bits,
    multiply_add,
    prefetch,
    put,
    put_byte,
    put_double,
    select,
    splat,
    store_bits,
)


@compiled
def encode_block(x, mu, weight, buffer, out, bits, sent, first, length, valid, larger_than_cache):
    """Write b = x + (buffer - sent sgn buffer), unless out is 0, and its bits; return the square of the norm of b.

    Unless mu is 0, mu + weight (mu - x) takes the place of x, rounded once.

    The squares are added in LANES lanes, these in order, then the tail, of which torch's compiler takes the first
    four together: as `torch.linalg.vector_norm` does.
    """
    zero, up, down, factor = splat(ZERO), splat(sent), splat(-sent), splat(weight)
    squares = zero
    whole = length - length % LANES
    larger_than_cache = larger_than_cache and (out + 4 * first) % 32 == 0
    for i in range(first, first + whole, LANES):
        prefetch(x, i + PREFETCH_NEAR)
        if mu:
            prefetch(mu, i + PREFETCH_NEAR)
        if buffer:
            prefetch(buffer, i + PREFETCH_NEAR)
        real = below(first + valid - i)
        b = load(x, i)
        if mu:
            m = load(mu, i)
            b = multiply_add(factor, m - b, m)
        if buffer:
            old = load(buffer, i)
            b = b + (old - select(real, select(old >= zero, up, down), zero))
        if out:
            write(out, i, b, larger_than_cache)
        store_bits(bits, i, (b >= zero) & real)
        b = select(real, b, zero)
        squares = squares + b * b
    total = lane_sum(squares)
    byte, last = 0, ZERO
    for i in range(first + whole, first + length):
        value = get(x, i)
        if mu:
            m = get(mu, i)
            value = fused_multiply_add(weight, m - value, m)
        real = i < first + valid
        if buffer:
            old = get(buffer, i)
            value += old - (ZERO if not real else sent if old >= ZERO else -sent)
        if out:
            put(out, i, value)
        if real:
            byte |= (1 if value >= ZERO else 0) << (i % 8)
            fours = i < first + whole + (length % LANES) // 4 * 4
            total = total + value * value if fours else fused_multiply_add(value, value, total)
            last = value
        if i % 8 == 7 or i == first + length - 1:
            put_byte(bits, i // 8, byte)
            byte = 0
    norm = np.float64(np.sqrt(total) if length > 1 else last)
    return norm * norm


@compiled
def mean_of_one(bits, stride, ranks, scales, segments, i):
    """Return one element of the mean of W messages."""
    value = ZERO
    for r in range(ranks):
        scale = get(scales, r * segments)
        scale = scale if (get_byte(bits + r * stride, i // 8) >> (i % 8)) & 1 else -scale
        value = scale if r == 0 else value + scale
    return value


@compiled
def mean_block(bits, stride, ranks, scales, segments, out, first, length, valid, larger_than_cache):
    """Write the sum over the ranks of scale * sign; rank r's bits lie r * stride bytes behind."""
    zero = splat(ZERO)
    whole = length - length % LANES
    larger_than_cache = larger_than_cache and (out + 4 * first) % 32 == 0 and ranks == 1
    for r in range(ranks):
        scale, theirs = get(scales, r * segments), bits + r * stride
        up, down = splat(scale), splat(-scale)
        for i in range(first, first + whole, LANES):
            v = select(load_bits(theirs, i), up, down)
            if r > 0:
                v = load(out, i) + v
            if valid < length:
                v = select(below(first + valid - i), v, zero)
            write(out, i, v, larger_than_cache)
    for i in range(first + whole, first + length):
        put(out, i, mean_of_one(bits, stride, ranks, scales, segments, i) if i < first + valid else ZERO)


@compiled
def mean_of_lanes(bits, stride, ranks, up, down, other_up, other_down, scratch, i):
    """Return the mean of one or two messages; of more, what `mean_block` wrote into `scratch`."""
    if ranks > 2:
        return load(scratch, i)
    v = select(load_bits(bits, i), up, down)
    return v if ranks == 1 else v + select(load_bits(bits + stride, i), other_up, other_down)


@compiled
def residual_block(b, out, sent, first, length, valid, larger_than_cache):
    """Write b - sent sgn b, and b behind the valid elements."""
    zero, up, down = splat(ZERO), splat(sent), splat(-sent)
    whole = length - length % LANES
    larger_than_cache = larger_than_cache and (out + 4 * first) % 32 == 0
    for i in range(first, first + whole, LANES):
        v = load(b, i)
        real = below(first + valid - i)
        write(out, i, v - select(real, select(v >= zero, up, down), zero), larger_than_cache)
    for i in range(first + whole, first + length):
        value = get(b, i)
        put(out, i, value - (ZERO if i >= first + valid else sent if value >= ZERO else -sent))


@compiled
def encode(low, high, places, table, segments, valid, n, larger_than_cache, x, buffer, sent, out, bits, squares):
    """Encode x (R, n), with feedback if buffer is not 0; squares (R, places) float64 receives the squared norms."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        here = r * segments + s
        scale = get(sent, here) if buffer else ZERO
        row = 4 * r * n
        square = encode_block(
            x + row, 0, ZERO, buffer + row if buffer else buffer, out + row if out else out, bits + r * ((n + 7) // 8),
            scale, first, length, get_int(valid, here) - offset, larger_than_cache,
        )  # fmt: skip
        put_double(squares, k, square)


@compiled
def add_up(squares, lengths, rows, segments, sums):
    """Add the squared norms of places (R, places) up to those of segments (R, S), in the order of the places."""
    k = 0
    for i in range(rows * segments):
        total = 0.0
        for _ in range(get_int(lengths, i % segments)):
            total += get_double(squares, k)
            k += 1
        put_double(sums, i, total)


@compiled
def serve(
    low, high, places, table, segments, valid, n, larger_than_cache,
    received, row_stride, stride, ranks, scales, buffer, sent, out, bits, squares, scratch,
):  # fmt: skip
    """Encode with feedback the mean of W messages, which goes place by place through `scratch`. out can be 0."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        here = r * segments + s
        real = get_int(valid, here) - offset
        mean = scratch - 4 * first
        theirs = received + r * row_stride
        mean_block(theirs, stride, ranks, scales + 4 * (r * ranks * segments + s), segments, mean, first, length, real,
                   False)  # fmt: skip
        row = 4 * r * n
        square = encode_block(
            mean, 0, ZERO, buffer + row, out + row if out else out, bits + r * ((n + 7) // 8), get(sent, here), first,
            length, real, larger_than_cache
        )  # fmt: skip
        put_double(squares, k, square)


@compiled
def decode(
    low, high, places, table, segments, valid, n, larger_than_cache, bits, row_stride, stride, ranks, scales, out
):
    """Write the sum over the ranks of scale * sign; bits (R, W, .), scales (R, W, S)."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        real = get_int(valid, r * segments + s) - offset
        mean_block(bits + r * row_stride, stride, ranks, scales + 4 * (r * ranks * segments + s), segments,
                   out + 4 * r * n, first, length, real, larger_than_cache)  # fmt: skip


@compiled
def residual(low, high, places, table, segments, valid, n, larger_than_cache, b, scales, out):
    """Write b - scale sgn b for b (R, n)."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        here = r * segments + s
        row = 4 * r * n
        real = get_int(valid, here) - offset
        residual_block(b + row, out + row, get(scales, here), first, length, real, larger_than_cache)
