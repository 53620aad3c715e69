# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The kernels of integers and of 8-bit floats of the Triton row: in Triton's language first, then what launches them.

Blocks of a codec are small, so that a program works on COUNT of them at a time, as rows of (COUNT, BLOCK). What codes
are is said by WIDTH: 4 or 8 bits of an integer, or 43 or 52 for E4M3 and E5M2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from fn.kernels.cpu.blocks import WHOLE_SEGMENTS
from fn.kernels.gpu.triton.blocks import Cut, cut, jit, kernel, launch, load, store
from fn.kernels.gpu.triton.rules import code_scale, damped, quotient, shortened

LARGEST = 1 << 15
"""Elements that one program may hold: a larger segment is left to the next row."""

FORMATS = {3: 43, 2: 52}
"""WIDTH of 8-bit floating numbers, by the bits of their mantissa."""

TOGETHER = 1 << 11
"""Elements of small blocks that a program takes together."""


@jit
def blocks_of(table, valid, n, blocks, segments, total, ALIGNED: tl.constexpr, COUNT: tl.constexpr):
    """Return, of each block of a program: whether it exists, row, position, length, scale, and how much is real."""
    k = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    exists = k < total
    r = k // blocks
    entry = table + 4 * (k - r * blocks)
    rs = r * segments + tl.load(entry + 2, mask=exists, other=0)
    length = tl.load(entry + 1, mask=exists, other=0)
    real = tl.load(valid + rs, mask=exists, other=0) - tl.load(entry + 3, mask=exists, other=0)
    position = r * n + tl.load(entry, mask=exists, other=0)
    if ALIGNED:
        position = tl.multiple_of(position, 8)
    return exists, r, position, length, rs, tl.minimum(real, length)


@jit
def scale_of(x, top):
    """Return, of every block, what x is multiplied by before it is rounded."""
    peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # as integers, of which a NaN is the largest
    return code_scale(peak.to(tl.float32, bitcast=True), top, 1.0, float("inf"))


@jit
def largest_of(WIDTH: tl.constexpr):
    """Return what the largest number of a block becomes."""
    LARGEST: tl.constexpr = 448.0 if WIDTH == 43 else (57344.0 if WIDTH == 52 else 2.0 ** (WIDTH - 1))
    return LARGEST + tl.zeros((), tl.float32)


@jit
def fp8_of(x, top, WIDTH: tl.constexpr):
    """Return 8-bit floating numbers: a sign, an exponent that begins at LEAST, and BITS behind the first.

    It takes no conversion of Triton's, which knows e4m3 from sm_89 on.
    """
    BITS: tl.constexpr = 3 if WIDTH == 43 else 2
    LEAST: tl.constexpr = 2.0**-6 if WIDTH == 43 else 2.0**-14
    BELOW: tl.constexpr = (120 << 3) if WIDTH == 43 else (112 << 2)
    x = tl.minimum(tl.maximum(x, -top), top)
    short = tl.abs(shortened(x, LEAST, 1.5 * 2.0 ** (23 - BITS)))
    small = short < LEAST  # a few of its steps: behind LEAST they are the bits of the mantissa
    code = (tl.where(small, short + LEAST, short).to(tl.int32, bitcast=True) >> (23 - BITS)) - BELOW
    return (code - tl.where(small, 1 << BITS, 0)) | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@jit
def of_fp8(code, WIDTH: tl.constexpr):
    """Return the numbers of codes that are below 2**8."""
    BITS: tl.constexpr = 3 if WIDTH == 43 else 2
    LEAST: tl.constexpr = 2.0**-6 if WIDTH == 43 else 2.0**-14
    BELOW: tl.constexpr = (120 << 3) if WIDTH == 43 else (112 << 2)
    size = code & 127
    small = size < (1 << BITS)
    number = ((size + BELOW + tl.where(small, 1 << BITS, 0)) << (23 - BITS)).to(tl.float32, bitcast=True)
    number = number - tl.where(small, LEAST, 0.0)
    return tl.where(code >= 128, -number, number)


@jit
def code_of(x, top):
    """Return x clamped and rounded half to even, 0 for NaN."""
    # What a NaN becomes as an integer differs between devices. The factor makes NaN of the block.
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -top), top - 1.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: its neighbours are the integers


@jit
def store_codes(codes, position, length, q, WIDTH: tl.constexpr, FULL: tl.constexpr, COUNT: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Write codes; of 4 bits two to a byte, the even one high. Lengths are even then."""
    if WIDTH != 4:
        store(codes + position[:, None], tl.arange(0, BLOCK)[None, :], q, length[:, None], FULL)
    else:
        # (COUNT, BLOCK) -> (COUNT, BLOCK / 2, 2) -> (COUNT, BLOCK / 2) twice
        even, odd = tl.split(tl.reshape(q, (COUNT, BLOCK // 2, 2)))
        i, byte = tl.arange(0, BLOCK // 2)[None, :], ((even & 15) << 4) | (odd & 15)
        store(codes + (position // 2)[:, None], i, byte, (length // 2)[:, None], FULL)


@jit
def quantize_blocks(x, codes, scales, exists, position, length, rs, real, WIDTH: tl.constexpr, FULL: tl.constexpr,
                    COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the codes and factors of blocks."""
    i, one = tl.arange(0, BLOCK)[None, :], 1.0 + tl.zeros((), tl.float32)
    top = largest_of(WIDTH)
    value = load(x + position[:, None], i, real[:, None], FULL)
    scale = scale_of(value, top)
    scaled = value * scale[:, None]
    q = code_of(scaled, top) if WIDTH <= 8 else fp8_of(tl.where(scale[:, None] > 0.0, scaled, 0.0), top, WIDTH)
    store_codes(codes, position, length, q, WIDTH, FULL, COUNT, BLOCK)
    tl.store(scales + rs, quotient(one, scale), mask=exists)


@kernel
def quantize_kernel(x, codes, scales, table, valid, n, blocks, segments, total, WIDTH: tl.constexpr,
                    ALIGNED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the codes of x (R, n), and the factors (R, S) that decode them."""
    exists, _, position, length, rs, real = blocks_of(table, valid, n, blocks, segments, total, ALIGNED, COUNT)
    if tl.min(real) == BLOCK:
        quantize_blocks(x, codes, scales, exists, position, length, rs, real, WIDTH, True, COUNT, BLOCK)
    else:
        quantize_blocks(x, codes, scales, exists, position, length, rs, real, WIDTH, False, COUNT, BLOCK)


@jit
def feedback_blocks(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, exists, position, length, rs,
                    real, WIDTH: tl.constexpr, FULL: tl.constexpr, COUNT: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Write the codes of blocks plus their residual errors, and those of the next errors."""
    i, one = tl.arange(0, BLOCK)[None, :], 1.0 + tl.zeros((), tl.float32)
    # What is behind `real` must be zero in h and in the error: peaks are taken over whole blocks.
    top, inside = one * 2.0 ** (WIDTH - 1), i < real[:, None]
    e = load(error + position[:, None], i, real[:, None], FULL)
    e = tl.where(inside, e * tl.load(error_scales + rs, mask=exists, other=0.0)[:, None], 0.0)
    h = load(x + position[:, None], i, real[:, None], FULL) + e
    scale = scale_of(h, top)
    q = code_of(h * scale[:, None], top)
    back = quotient(one, scale)
    store_codes(codes, position, length, q, WIDTH, FULL, COUNT, BLOCK)
    tl.store(scales + rs, back, mask=exists)
    e = tl.where(inside, damped(e, h - q.to(tl.float32) * back[:, None], beta, rest), 0.0)
    scale = scale_of(e, 128.0 * one)
    store_codes(kept, position, length, code_of(e * scale[:, None], 128.0 * one), 8, FULL, COUNT, BLOCK)
    tl.store(kept_scales + rs, quotient(one, scale), mask=exists)


@kernel
def quantize_feedback_kernel(x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, table, valid, n,
                             blocks, segments, total, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
                             BLOCK: tl.constexpr):  # fmt: skip
    """Quantise x + error, and keep beta error + rest (what was lost) in 8 bits."""
    exists, _, position, length, rs, real = blocks_of(table, valid, n, blocks, segments, total, ALIGNED, COUNT)
    inputs, results = (x, error, error_scales, beta, rest), (codes, scales, kept, kept_scales)
    if tl.min(real) == BLOCK:
        feedback_blocks(*inputs, *results, exists, position, length, rs, real, WIDTH, True, COUNT, BLOCK)
    else:
        feedback_blocks(*inputs, *results, exists, position, length, rs, real, WIDTH, False, COUNT, BLOCK)


@jit
def load_codes(codes, byte, length, WIDTH: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the codes of blocks, which begin at a byte, as float32."""
    if WIDTH > 8:
        code = load(codes + byte[:, None], tl.arange(0, BLOCK)[None, :], length[:, None], FULL)
        code = of_fp8(code.to(tl.int32), WIDTH)
    elif WIDTH == 8:
        code = load(codes + byte[:, None], tl.arange(0, BLOCK)[None, :], length[:, None], FULL)
    else:
        i = tl.arange(0, BLOCK // 2)[None, :]
        pair = load(codes + byte[:, None], i, (length // 2)[:, None], FULL).to(tl.int32)
        # (COUNT, BLOCK / 2) twice -> (COUNT, BLOCK); ^ 8 and - 8 give 4 bits their sign
        code = (tl.interleave((pair >> 4) ^ 8, (pair & 15) ^ 8) - 8).to(tl.float32)
    return code


@jit
def mean_blocks(codes, scales, out, byte, factor, position, length, real, segments, width, ranks, share,
                WIDTH: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Write the means of blocks; byte, factor: where the first rank's are."""
    i = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((COUNT, BLOCK), tl.float32)
    for w in range(ranks):
        # Messages of a step can be more than 2**31 bytes.
        start = byte + w * width.to(tl.int64)
        if ALIGNED:
            start = tl.multiple_of(start, 4 if WIDTH == 4 else 8)
        q = load_codes(codes, start, length, WIDTH, FULL, BLOCK)
        decoded = q * tl.load(scales + factor, mask=length > 0, other=0.0)[:, None]
        # The first is taken as it is: 0 + -0 would be 0, where the reference begins with -0.
        total = tl.where(w == 0, decoded, total + decoded)
        factor += segments
    total = tl.where(i < real[:, None], total * share, 0.0)
    store(out + position[:, None], i, total, length[:, None], FULL)


@kernel
def dequantize_kernel(codes, scales, out, table, valid, n, blocks, segments, width, ranks, share, total,
                      WIDTH: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean over the ranks of code * scale; codes (R, W, .), scales (R, W, S)."""
    _, r, position, length, rs, real = blocks_of(table, valid, n, blocks, segments, total, ALIGNED, COUNT)
    byte = r * ranks * width + (position - r * n) // (2 if WIDTH == 4 else 1)
    factor = r * ranks * segments + rs - r * segments
    means = codes, scales, out, byte, factor, position, length, real, segments, width, ranks, share
    if tl.min(real) == BLOCK:
        mean_blocks(*means, WIDTH, True, ALIGNED, COUNT, BLOCK)
    else:
        mean_blocks(*means, WIDTH, False, ALIGNED, COUNT, BLOCK)


# the functions of the table


def _codes(x: Tensor, n: int, width: int) -> Tensor:
    dtype = torch.int8 if width == 8 else torch.uint8
    return torch.empty((x.shape[0], n // 2 if width == 4 else n), dtype=dtype, device=x.device)


def _factors(row: Cut, valid: Tensor) -> Tensor:
    """Return memory for the factors of segments, 1 where no block writes any."""
    make = torch.empty if row.host.widths.all() else torch.ones
    return make(valid.shape, dtype=torch.float32, device=valid.device)


def _launch(kernel: Any, row: Cut, valid: Tensor, width: int, args: Sequence[Any], message: Sequence[Any] = ()) -> None:
    """Launch a kernel on all blocks of the rows of `valid`, several a program where they are small."""
    total = valid.shape[0] * row.blocks
    count = max(1, TOGETHER // row.block)
    constants = {"WIDTH": width, "ALIGNED": row.host.whole, "COUNT": count, "BLOCK": row.block}
    launch(kernel, valid, -(-total // count), *args, *row.segments(valid), *message, total, **constants)


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.codes.quantize`."""
    row = cut(runs, x.device, WHOLE_SEGMENTS)
    if x.dtype == torch.float64 or row.block > LARGEST or (width == 4 and not row.host.even):
        return NotImplemented
    codes, scales = _codes(x, row.host.n, width), _factors(row, valid)
    _launch(quantize_kernel, row, valid, width, (x.contiguous(), codes, scales))
    return codes, scales


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.codes.quantize_feedback`."""
    row = cut(runs, x.device, WHOLE_SEGMENTS)
    if x.dtype != torch.float32 or error_scales.dtype != torch.float32 or row.block > LARGEST:
        return NotImplemented
    if width == 4 and not row.host.even:
        return NotImplemented
    results = [memory for bits in (width, 8) for memory in (_codes(x, row.host.n, bits), _factors(row, valid))]
    # 1 - beta is rounded once, from float64, as in the reference: the kernel would take it of a rounded beta.
    factors = float(np.float32(beta)), float(np.float32(1.0 - beta))
    args = x.contiguous(), error.contiguous(), error_scales.contiguous(), *factors, *results
    _launch(quantize_feedback_kernel, row, valid, width, args)
    return tuple(results)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.codes.dequantize_mean`."""
    row, (rows, ranks, stride) = cut(runs, codes.device), codes.shape
    if scales.dtype != torch.float32 or (width == 4 and not row.host.even):
        return NotImplemented
    out = torch.empty((rows, row.host.n), dtype=torch.float32, device=codes.device)
    args = codes.contiguous(), scales.contiguous(), out
    _launch(dequantize_kernel, row, valid, width, args, (stride, ranks, float(np.float32(1.0 / ranks))))
    return out


def quantize_fp8(x: Tensor, valid: Tensor, runs: Sequence[int], mantissa: int) -> Any:
    """See `reference.codes.quantize_fp8`."""
    return quantize(x, valid, runs, FORMATS[mantissa])


def dequantize_fp8(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], mantissa: int) -> Any:
    """See `reference.codes.dequantize_fp8`."""
    return dequantize_mean(codes, scales, valid, runs, FORMATS[mantissa])


KERNELS = (quantize, quantize_feedback, dequantize_mean, quantize_fp8, dequantize_fp8)
