# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator"
"""The loops of the integer kernels on a CPU, compiled by Numba; `ints` calls them.

A place (see `loops`) is a whole segment, because it has one scale. All elements behind the valid ones count as
zero.
"""

from __future__ import annotations

import numpy as np

from fn.kernels.cpu.loops import ZERO, block_of, compiled, write
from fn.kernels.cpu.simd import (
    LANES,
    below,
    code,
    get,
    get_byte,
    get_int,
    larger,
    largest,
    load,
    load_bytes,
    load_nibbles,
    magnitude,
    no_magnitude,
    number,
    put,
    put_byte,
    select,
    splat,
    store,
    store_bytes,
    store_nibbles,
)

ONE = np.float32(1)


@compiled
def load_codes(codes, i, width):
    """Return codes i .. i + LANES as floats."""
    return number(load_nibbles(codes, i)) if width == 4 else number(load_bytes(codes, i))


@compiled
def store_codes(codes, i, v, width):
    """Write codes i .. i + LANES."""
    if width == 4:
        store_nibbles(codes, i, v)
    else:
        store_bytes(codes, i, v)


@compiled
def get_code(codes, i, width):
    """Return code i as a float."""
    if width == 8:
        return np.float32(np.int8(get_byte(codes, i)))
    nibble = (get_byte(codes, i // 2) >> (4 - 4 * (i % 2))) & 15
    return np.float32((nibble ^ 8) - 8)


@compiled
def put_code(codes, i, value, width):
    """Round, clamp and write code i; the even element of a pair comes first."""
    whole = min(np.int64(np.rint(value)), (8 if width == 4 else 128) - 1)
    if width == 8:
        put_byte(codes, i, whole & 255)
    elif i % 2 == 0:
        put_byte(codes, i // 2, (whole & 15) << 4)
    else:
        put_byte(codes, i // 2, get_byte(codes, i // 2) | (whole & 15))


@compiled
def raise_peak(peak, value):
    """Return the larger of a peak and |value|, NaN if one of them is."""
    size = abs(value)
    return size if size > peak or size != size else peak


@compiled
def scale_of(peak, width):
    """Return what elements are multiplied by before they are rounded: 1 where that would overflow."""
    scale = (np.float32(8) if width == 4 else np.float32(128)) / peak
    return ONE if scale == np.float32(np.inf) else scale


@compiled
def zero_block(codes, first, length, width):
    """Write zeros: the codes of a place that is not finite, whose factor says so."""
    for i in range(first * width // 8, ((first + length) * width + 7) // 8):
        put_byte(codes, i, 0)


@compiled
def quantize_block(x, codes, first, length, valid, width, peak):
    """Write the codes of a place whose largest magnitude is `peak`; return the factor that decodes them."""
    scale = scale_of(peak, width)
    if not np.isfinite(peak):
        zero_block(codes, first, length, width)
        return ONE / scale
    factor, zero, limit = splat(scale), splat(ZERO), 8 if width == 4 else 128
    whole = length - length % LANES
    if valid >= length:
        for i in range(first, first + whole, LANES):
            store_codes(codes, i, code(load(x, i) * factor, limit), width)
    else:
        for i in range(first, first + whole, LANES):
            v = select(below(first + valid - i), load(x, i), zero)
            store_codes(codes, i, code(v * factor, limit), width)
    for i in range(first + whole, first + length):
        put_code(codes, i, get(x, i) * scale if i < first + valid else ZERO, width)
    return ONE / scale


@compiled
def peak_block(x, first, length, valid):
    """Return the largest magnitude of a place."""
    zero, sizes = splat(ZERO), no_magnitude()
    whole = length - length % LANES
    if valid >= length:
        for i in range(first, first + whole, LANES):
            sizes = larger(sizes, magnitude(load(x, i)))
    else:
        for i in range(first, first + whole, LANES):
            sizes = larger(sizes, magnitude(select(below(first + valid - i), load(x, i), zero)))
    peak = largest(sizes)
    for i in range(first + whole, first + length):
        peak = raise_peak(peak, get(x, i) if i < first + valid else ZERO)
    return peak


@compiled
def compensate_block(x, error, scale, h, first, length, valid):
    """Write h = x + error, zero behind the valid elements; return its largest magnitude."""
    zero, sizes, factor = splat(ZERO), no_magnitude(), splat(scale)
    whole, full = length - length % LANES, valid >= length
    for i in range(first, first + whole, LANES):
        v = load(x, i) + load_codes(error, i, 8) * factor
        if not full:
            v = select(below(first + valid - i), v, zero)
        sizes = larger(sizes, magnitude(v))
        store(h, i, v)
    peak = largest(sizes)
    for i in range(first + whole, first + length):
        value = get(x, i) + get_code(error, i, 8) * scale if i < first + valid else ZERO
        peak = raise_peak(peak, value)
        put(h, i, value)
    return peak


@compiled
def damp_block(h, codes, peak, error, scale, beta, first, length, valid, width):
    """Write the codes of h, and replace h by beta error + (1 - beta) (h - decoded).

    Args: peak: the largest magnitude of h. Returns: the factor that decodes, and the largest magnitude of the new h.
    """
    up = scale_of(peak, width)
    sent = ONE / up
    zero, sizes, factor, back, limit = splat(ZERO), no_magnitude(), splat(scale), splat(sent), 8 if width == 4 else 128
    keep, take, raised = splat(np.float32(beta)), splat(np.float32(1.0 - beta)), splat(up)
    whole, full, finite = length - length % LANES, valid >= length, np.isfinite(peak)
    if not finite:
        zero_block(codes, first, length, width)
        return sent, np.float32(np.nan)
    for i in range(first, first + whole, LANES):
        v = load(h, i)
        q = code(v * raised, limit)
        store_codes(codes, i, q, width)
        v = keep * (load_codes(error, i, 8) * factor) + take * (v - number(q) * back)
        if not full:
            v = select(below(first + valid - i), v, zero)
        sizes = larger(sizes, magnitude(v))
        store(h, i, v)
    peak = largest(sizes)
    for i in range(first + whole, first + length):
        put_code(codes, i, get(h, i) * up, width)
        lost = get(h, i) - get_code(codes, i, width) * sent
        value = np.float32(beta) * (get_code(error, i, 8) * scale) + np.float32(1.0 - beta) * lost
        value = value if i < first + valid else ZERO
        peak = raise_peak(peak, value)
        put(h, i, value)
    return sent, peak


@compiled
def quantize(low, high, places, table, segments, valid, n, larger_than_cache, x, codes, scales, width):
    """Write the codes of x (R, n), and the factors (R, S) that decode them."""
    for k in range(low, high):
        r, first, length, s, _ = block_of(k, places, table)
        here, row, out = r * segments + s, x + 4 * r * n, codes + r * (n * width // 8)
        real = get_int(valid, here)
        peak = peak_block(row, first, length, real)
        put(scales, here, quantize_block(row, out, first, length, real, width, peak))


@compiled
def quantize_feedback(
    low, high, places, table, segments, valid, n, larger_than_cache,
    x, error, error_scales, beta, codes, scales, kept, kept_scales, width, scratch,
):  # fmt: skip
    """Quantise x + error, and keep the moving average of what was lost in 8 bits; h lives in `scratch`."""
    for k in range(low, high):
        r, first, length, s, _ = block_of(k, places, table)
        here, old, out, h = r * segments + s, error + r * n, codes + r * (n * width // 8), scratch - 4 * first
        real, scale = get_int(valid, here), get(error_scales, here)
        peak = compensate_block(x + 4 * r * n, old, scale, h, first, length, real)
        sent, peak = damp_block(h, out, peak, old, scale, beta, first, length, real, width)
        put(scales, here, sent)
        put(kept_scales, here, quantize_block(h, kept + r * n, first, length, real, 8, peak))


@compiled
def dequantize(
    low, high, places, table, segments, valid, n, larger_than_cache, codes, row_stride, stride, ranks, scales, width,
    out,
):  # fmt: skip
    """Write the mean over the ranks of code * scale; codes (R, W, .), scales (R, W, S)."""
    share, zero = np.float32(1.0 / ranks), splat(ZERO)
    for k in range(low, high):
        r, first, length, s, _ = block_of(k, places, table)
        real, theirs, to = get_int(valid, r * segments + s), codes + r * row_stride, out + 4 * r * n
        factors = scales + 4 * (r * ranks * segments + s)
        whole, full = length - length % LANES, real >= length
        streams = larger_than_cache and (to + 4 * first) % 32 == 0 and ranks == 1
        for w in range(ranks):
            factor = splat(get(factors, w * segments))
            for i in range(first, first + whole, LANES):
                v = load_codes(theirs + w * stride, i, width) * factor
                if w > 0:
                    v = load(to, i) + v
                if ranks > 1 and w == ranks - 1:
                    v = v * splat(share)
                if not full:
                    v = select(below(first + real - i), v, zero)
                write(to, i, v, streams)
        for i in range(first + whole, first + length):
            value = get_code(theirs, i, width) * get(factors, 0)
            for w in range(1, ranks):
                value += get_code(theirs + w * stride, i, width) * get(factors, w * segments)
            put(to, i, value * share if i < first + real else ZERO)
