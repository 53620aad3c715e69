# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The kernels in Triton's language, for CUDA, ROCm and XPU; `triton` launches them.

One program works on one block of one row: at most BLOCK elements that do not cross segments. A block is a row
(first element, length, segment, offset in the segment) of an int64 table, see `blocks`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit


@jit
def block_of(table, valid, blocks, segments):
    """Return row, first element, length, index of the segment's scale, and how many elements are real."""
    k = tl.program_id(0).to(tl.int64)
    r = k // blocks
    entry = table + 4 * (k % blocks)
    here = r * segments + tl.load(entry + 2)
    return r, tl.load(entry), tl.load(entry + 1), here, tl.load(valid + here) - tl.load(entry + 3)


@jit
def encode_block(v, buffer, sent, out, bits, squares, r, first, length, here, real, n, FEEDBACK: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Add the error to v, write it, its bits and the square of its norm."""
    i = tl.arange(0, BLOCK)
    if FEEDBACK:
        old = tl.load(buffer + r * n + first + i, mask=i < length, other=0.0)
        scale = tl.load(sent + here)
        v = v + (old - tl.where(i < real, tl.where(old >= 0, scale, -scale), 0.0))
        tl.store(out + r * n + first + i, v, mask=i < length)
    ones = ((v >= 0) & (i < real) & (i < length)).to(tl.int32)
    packed = tl.sum(tl.reshape(ones, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
    j = tl.arange(0, BLOCK // 8)
    tl.store(bits + r * ((n + 7) // 8) + first // 8 + j, packed.to(tl.uint8), mask=8 * j < length)
    v = tl.where((i < real) & (i < length), v, 0.0)
    tl.store(squares + tl.program_id(0), tl.sum(v * v, axis=0).to(tl.float64))


@jit
def encode(x, buffer, sent, out, bits, squares, table, valid, n, blocks, segments, FEEDBACK: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Encode x (R, n), with feedback if so wanted."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + r * n + first + i, mask=i < length, other=0.0).to(tl.float32)
    encode_block(v, buffer, sent, out, bits, squares, r, first, length, here, real, n, FEEDBACK, BLOCK)


@jit
def mean_block(bits, scales, width, ranks, r, first, length, s, real, segments, BLOCK: tl.constexpr):
    """Return the sum over the ranks of scale * sign, zero behind the real elements; messages are so many bytes wide."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for w in range(ranks):
        byte = tl.load(bits + (r * ranks + w) * width + (first + i) // 8, mask=i < length, other=0).to(tl.int32)
        scale = tl.load(scales + (r * ranks + w) * segments + s)
        one = tl.where((byte >> ((first + i) % 8).to(tl.int32)) & 1 != 0, scale, -scale)
        total = tl.where(w == 0, one, total + one)
    return tl.where(i < real, total, 0.0)


@jit
def decode(bits, scales, out, table, valid, n, blocks, segments, width, ranks, BLOCK: tl.constexpr):
    """Write the sum over the ranks of scale * sign; bits (R, W, .), scales (R, W, S)."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    i = tl.arange(0, BLOCK)
    s = here - r * segments
    total = mean_block(bits, scales, width, ranks, r, first, length, s, real, segments, BLOCK)
    tl.store(out + r * n + first + i, total, mask=i < length)


@jit
def serve(received, scales, buffer, sent, out, bits, squares, table, valid, n, blocks, segments, width, ranks,
          BLOCK: tl.constexpr):  # fmt: skip
    """Encode with feedback the mean of W messages."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    s = here - r * segments
    v = mean_block(received, scales, width, ranks, r, first, length, s, real, segments, BLOCK)
    encode_block(v, buffer, sent, out, bits, squares, r, first, length, here, real, n, True, BLOCK)


@jit
def residual(b, scales, out, table, valid, n, blocks, segments, BLOCK: tl.constexpr):
    """Write b - scale sgn b for b (R, n)."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    i = tl.arange(0, BLOCK)
    v = tl.load(b + r * n + first + i, mask=i < length, other=0.0)
    scale = tl.load(scales + here)
    v = v - tl.where(i < real, tl.where(v >= 0, scale, -scale), 0.0)
    tl.store(out + r * n + first + i, v, mask=i < length)


@jit
def scale_of(v, limit):
    """Return what v is multiplied by before it is rounded: limit / max |v|, 1 where that would overflow."""
    peak = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)  # NaN is the largest
    scale = tl.div_rn(limit, peak)
    return tl.where(scale == float("inf"), 1.0, scale)


@jit
def code_of(v, limit):
    """Return v clamped and rounded half to even, 0 for NaN."""
    v = tl.where(v == v, v, 0.0)
    v = tl.minimum(tl.maximum(v, -limit), limit - 1.0)
    return ((v + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: its neighbours are the integers


@jit
def store_codes(codes, start, length, q, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write codes from an element on; of 4 bits two to a byte, the even one high."""
    if WIDTH == 8:
        i = tl.arange(0, BLOCK)
        tl.store(codes + start + i, q.to(tl.int8), mask=i < length)
    else:
        even, odd = tl.split(tl.reshape(q, (BLOCK // 2, 2)))
        j = tl.arange(0, BLOCK // 2)
        tl.store(codes + start // 2 + j, (((even & 15) << 4) | (odd & 15)).to(tl.uint8), mask=2 * j < length)


@jit
def quantize(x, codes, scales, table, valid, n, blocks, segments, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the codes of x (R, n), and the factors (R, S) that decode them."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    i = tl.arange(0, BLOCK)
    limit = 2.0 ** (WIDTH - 1) + tl.zeros((), tl.float32)
    v = tl.load(x + r * n + first + i, mask=(i < length) & (i < real), other=0.0).to(tl.float32)
    scale = scale_of(v, limit)
    store_codes(codes, r * n + first, length, code_of(v * scale, limit), WIDTH, BLOCK)
    tl.store(scales + here, tl.div_rn(1.0 + tl.zeros((), tl.float32), scale))


@jit
def quantize_feedback(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, table, valid, n, blocks,
                      segments, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Quantise x + error, and keep beta error + rest (what was lost) in 8 bits."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    i = tl.arange(0, BLOCK)
    one, limit = 1.0 + tl.zeros((), tl.float32), 2.0 ** (WIDTH - 1) + tl.zeros((), tl.float32)
    mask = (i < length) & (i < real)
    e = tl.load(error + r * n + first + i, mask=mask, other=0).to(tl.float32) * tl.load(error_scales + here)
    h = tl.where(mask, tl.load(x + r * n + first + i, mask=mask, other=0.0) + e, 0.0)
    scale = scale_of(h, limit)
    q = code_of(h * scale, limit)
    back = tl.div_rn(one, scale)
    store_codes(codes, r * n + first, length, q, WIDTH, BLOCK)
    tl.store(scales + here, back)
    e = tl.where(mask, beta * e + rest * (h - q.to(tl.float32) * back), 0.0)
    scale = scale_of(e, 128.0 * one)
    store_codes(kept, r * n + first, length, code_of(e * scale, 128.0 * one), 8, BLOCK)
    tl.store(kept_scales + here, tl.div_rn(one, scale))


@jit
def dequantize(codes, scales, out, table, valid, n, blocks, segments, width, ranks, share, WIDTH: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean over the ranks of code * scale; codes (R, W, .), scales (R, W, S)."""
    r, first, length, here, real = block_of(table, valid, blocks, segments)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for w in range(ranks):
        theirs = codes + (r * ranks + w) * width
        if WIDTH == 8:
            q = tl.load(theirs + first + i, mask=i < length, other=0).to(tl.int32)
        else:
            byte = tl.load(theirs + (first + i) // 2, mask=i < length, other=0).to(tl.int32)
            q = (((byte >> (4 - 4 * ((first + i) % 2).to(tl.int32))) & 15) ^ 8) - 8
        one = q.to(tl.float32) * tl.load(scales + (r * ranks + w) * segments + here - r * segments)
        total = tl.where(w == 0, one, total + one)
    tl.store(out + r * n + first + i, tl.where(i < real, total * share, 0.0), mask=i < length)
