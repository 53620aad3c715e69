# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The integer kernels in Triton's language; `triton_int` launches them.

Blocks of a codec are small, so that a program works on COUNT of them at a time, as rows of (COUNT, BLOCK).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fn.kernels.gpu.triton_rules import code_scale, damped, quotient
from fn.kernels.gpu.triton_tiles import kernel

jit: Any = triton.jit


@jit
def blocks_of(table, valid, n, blocks, segments, total, ALIGNED: tl.constexpr, COUNT: tl.constexpr):
    """Return, of each block of a program: whether there is one, row, place, length, scale, and how much is real."""
    k = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    there = k < total
    r = k // blocks
    entry = table + 4 * (k - r * blocks)
    here = r * segments + tl.load(entry + 2, mask=there, other=0)
    length = tl.load(entry + 1, mask=there, other=0)
    real = tl.load(valid + here, mask=there, other=0) - tl.load(entry + 3, mask=there, other=0)
    place = r * n + tl.load(entry, mask=there, other=0)
    if ALIGNED:
        place = tl.multiple_of(place, 8)
    return there, r, place, length, here, tl.minimum(real, length)


@jit
def load(x, i, inside, FULL: tl.constexpr):
    """Return elements as float32, zero where they are not inside."""
    found = tl.load(x + i) if FULL else tl.load(x + i, mask=inside, other=0)
    return found.to(tl.float32)


@jit
def scale_of(x, top):
    """Return, of every block, what x is multiplied by before it is rounded."""
    peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # as integers, of which a NaN is the largest
    return code_scale(peak.to(tl.float32, bitcast=True), top, 1.0, float("inf"))


@jit
def code_of(x, top):
    """Return x clamped and rounded half to even, 0 for NaN."""
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -top), top - 1.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: its neighbours are the integers


@jit
def store_codes(codes, place, length, q, WIDTH: tl.constexpr, FULL: tl.constexpr, COUNT: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Write codes; of 4 bits two to a byte, the even one high."""
    if WIDTH == 8:
        i = tl.arange(0, BLOCK)[None, :]
        if FULL:
            tl.store(codes + place[:, None] + i, q.to(tl.int8))
        else:
            tl.store(codes + place[:, None] + i, q.to(tl.int8), mask=i < length[:, None])
    else:
        even, odd = tl.split(tl.reshape(q, (COUNT, BLOCK // 2, 2)))
        byte = (((even & 15) << 4) | (odd & 15)).to(tl.uint8)
        i = tl.arange(0, BLOCK // 2)[None, :]
        if FULL:
            tl.store(codes + (place // 2)[:, None] + i, byte)
        else:
            tl.store(codes + (place // 2)[:, None] + i, byte, mask=2 * i < length[:, None])


@jit
def quantize_blocks(x, codes, scales, there, place, length, here, real, WIDTH: tl.constexpr, FULL: tl.constexpr,
                    COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the codes and factors of blocks."""
    i, one = tl.arange(0, BLOCK)[None, :], 1.0 + tl.zeros((), tl.float32)
    top = one * 2.0 ** (WIDTH - 1)
    value = load(x, place[:, None] + i, i < real[:, None], FULL)
    scale = scale_of(value, top)
    store_codes(codes, place, length, code_of(value * scale[:, None], top), WIDTH, FULL, COUNT, BLOCK)
    tl.store(scales + here, quotient(one, scale), mask=there)


@kernel
def quantize(x, codes, scales, table, valid, n, blocks, segments, total, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
             COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the codes of x (R, n), and the factors (R, S) that decode them."""
    there, _, place, length, here, real = blocks_of(table, valid, n, blocks, segments, total, ALIGNED, COUNT)
    if tl.min(real) == BLOCK:
        quantize_blocks(x, codes, scales, there, place, length, here, real, WIDTH, True, COUNT, BLOCK)
    else:
        quantize_blocks(x, codes, scales, there, place, length, here, real, WIDTH, False, COUNT, BLOCK)


@jit
def feedback_blocks(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, there, place, length, here,
                    real, WIDTH: tl.constexpr, FULL: tl.constexpr, COUNT: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Write the codes of blocks plus their errors, and those of the next errors."""
    i, one = tl.arange(0, BLOCK)[None, :], 1.0 + tl.zeros((), tl.float32)
    top, inside, at = one * 2.0 ** (WIDTH - 1), i < real[:, None], place[:, None] + i
    e = load(error, at, inside, FULL) * tl.load(error_scales + here, mask=there, other=0.0)[:, None]
    e = tl.where(inside, e, 0.0)
    h = load(x, at, inside, FULL) + e
    scale = scale_of(h, top)
    q = code_of(h * scale[:, None], top)
    back = quotient(one, scale)
    store_codes(codes, place, length, q, WIDTH, FULL, COUNT, BLOCK)
    tl.store(scales + here, back, mask=there)
    e = tl.where(inside, damped(e, h - q.to(tl.float32) * back[:, None], beta, rest), 0.0)
    scale = scale_of(e, 128.0 * one)
    store_codes(kept, place, length, code_of(e * scale[:, None], 128.0 * one), 8, FULL, COUNT, BLOCK)
    tl.store(kept_scales + here, quotient(one, scale), mask=there)


@kernel
def quantize_feedback(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, table, valid, n, blocks,
                      segments, total, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """Quantise x + error, and keep beta error + rest (what was lost) in 8 bits."""
    there, _, place, length, here, real = blocks_of(table, valid, n, blocks, segments, total, ALIGNED, COUNT)
    if tl.min(real) == BLOCK:
        feedback_blocks(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, there, place, length,
                        here, real, WIDTH, True, COUNT, BLOCK)  # fmt: skip
    else:
        feedback_blocks(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, there, place, length,
                        here, real, WIDTH, False, COUNT, BLOCK)  # fmt: skip


@jit
def load_codes(codes, byte, length, WIDTH: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the codes of blocks, which begin at a byte, as float32."""
    if WIDTH == 8:
        i = tl.arange(0, BLOCK)[None, :]
        code = load(codes, byte[:, None] + i, i < length[:, None], FULL)
    else:
        i = tl.arange(0, BLOCK // 2)[None, :]
        pair = load(codes, byte[:, None] + i, 2 * i < length[:, None], FULL).to(tl.int32)
        code = (tl.interleave((pair >> 4) ^ 8, (pair & 15) ^ 8) - 8).to(tl.float32)
    return code


@jit
def mean_blocks(codes, scales, out, byte, factor, place, length, real, segments, width, ranks, share,
                WIDTH: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Write the means of blocks; byte, factor: where the first rank's are."""
    i = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((COUNT, BLOCK), tl.float32)
    for w in range(ranks):
        start = byte + w * width.to(tl.int64)
        if ALIGNED:
            start = tl.multiple_of(start, WIDTH)
        q = load_codes(codes, start, length, WIDTH, FULL, BLOCK)
        one = q * tl.load(scales + factor, mask=length > 0, other=0.0)[:, None]
        total = tl.where(w == 0, one, total + one)
        factor += segments
    total = tl.where(i < real[:, None], total * share, 0.0)
    if FULL:
        tl.store(out + place[:, None] + i, total)
    else:
        tl.store(out + place[:, None] + i, total, mask=i < length[:, None])


@kernel
def dequantize(codes, scales, out, table, valid, n, blocks, segments, width, ranks, share, total,
               WIDTH: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean over the ranks of code * scale; codes (R, W, .), scales (R, W, S)."""
    _, r, place, length, here, real = blocks_of(table, valid, n, blocks, segments, total, ALIGNED, COUNT)
    byte = r * ranks * width + (place - r * n) // (8 // WIDTH)
    factor = r * ranks * segments + here - r * segments
    if tl.min(real) == BLOCK:
        mean_blocks(codes, scales, out, byte, factor, place, length, real, segments, width, ranks, share, WIDTH, True,
                    ALIGNED, COUNT, BLOCK)  # fmt: skip
    else:
        mean_blocks(codes, scales, out, byte, factor, place, length, real, segments, width, ranks, share, WIDTH, False,
                    ALIGNED, COUNT, BLOCK)  # fmt: skip
