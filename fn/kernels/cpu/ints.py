# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator"
"""The kernels of integers and of 8-bit floats on a CPU, bit for bit the reference, but for float64. Loops first.

A block is a whole segment, because it has one scale. What codes are is said by `width`: 4 or 8 bits of an integer, or
E4M3 or E5M2. No product and sum become one operation here: they would round
once, where the reference rounds twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.cpu.blocks import STEP, WHOLE_SEGMENTS, BlockTable, block_table, run
from fn.kernels.cpu.intrinsics import bits_of, floats, ints, magnitude, octets, of_magnitude
from fn.kernels.cpu.loops import INFINITY, ONE, ZERO, block_of, compiled, limit, pad, streams, write
from fn.kernels.cpu.signs import messages
from fn.kernels.cpu.steps import larger_magnitude
from fn.kernels.memory_pool import empty
from fn.kernels.rules import code_scale, damped, shortened

ROUNDER = np.float32(1.5 * 2**23)
"""The floats around it are the integers, so that adding it rounds half to even."""


E4M3, E5M2 = 43, 52
"""The formats of 8-bit floating numbers, where integers have their bits."""


@compiled()
def scale_of(peak, width):
    """Return what elements are multiplied by before they are rounded."""
    if width == E4M3:
        top = np.float32(448)
    elif width == E5M2:
        top = np.float32(57344)
    else:
        top = np.float32(8) if width == 4 else np.float32(128)
    return code_scale(peak, top, ONE, INFINITY)


@compiled()
def bytes_of(count, width):
    """Return the bytes that the codes of `count` elements take."""
    return count // 2 if width == 4 else count


@compiled()
def rounded(x, top):
    """Return the nearest whole number, at most top. |x| must be at most top + 1, up to rounding."""
    return min((x + ROUNDER) - ROUNDER, top)


@compiled()
def put_fp8(x, codes, scale, count, mantissa, first):
    """Write 8-bit floating numbers: a sign, an exponent that begins at 2**first, and so many bits behind the first."""
    value, to = floats(x), octets(codes)
    least, anchor = np.float32(2.0**first), np.float32(1.5 * 2.0 ** (23 - mantissa))
    drop, below = 23 - mantissa, (126 + first) << mantissa
    for j in range(count):
        y = value[j] * scale
        short = of_magnitude(magnitude(shortened(y, least, anchor)))
        # A number below `least` is a few of its steps. Behind `least` they are the bits of the mantissa.
        small = short < least
        code = (magnitude(short + least if small else short) >> drop) - below - ((1 << mantissa) if small else 0)
        to[j] = np.int8(code | ((bits_of(y) >> 24) & 128))


@compiled()
def get_fp8(codes, factor, out, count, add, mantissa, first):
    """Write number times factor, or add it."""
    code, to = octets(codes), floats(out)
    least = np.float32(2.0**first)
    drop, below = 23 - mantissa, (126 + first) << mantissa
    for j in range(count):
        size = np.int32(code[j]) & 127
        small = size < 1 << mantissa
        number = of_magnitude(np.int32((size + below + ((1 << mantissa) if small else 0)) << drop))
        number -= least if small else ZERO
        value = (-number if code[j] < 0 else number) * factor
        to[j] = to[j] + value if add else value


@compiled()
def put_codes(x, codes, scale, width, count):
    """Write the codes of `count` elements, an even number of them if two are in a byte."""
    value, to = floats(x), octets(codes)
    if width == E4M3:
        put_fp8(x, codes, scale, count, 3, -6)
    elif width == E5M2:
        put_fp8(x, codes, scale, count, 2, -14)
    elif width == 8:
        for j in range(count):
            to[j] = np.int8(rounded(value[j] * scale, np.float32(127)))
    else:
        for j in range(count // 2):
            high = np.int32(rounded(value[2 * j] * scale, np.float32(7)))
            low = np.int32(rounded(value[2 * j + 1] * scale, np.float32(7)))
            to[j] = np.int8((high << 4) | (low & 15))


@compiled()
def get_codes(codes, factor, out, width, count, add):
    """Write code times factor, or add it."""
    code, to = octets(codes), floats(out)
    if width == E4M3:
        get_fp8(codes, factor, out, count, add, 3, -6)
    elif width == E5M2:
        get_fp8(codes, factor, out, count, add, 2, -14)
    elif width == 8:
        for j in range(count):
            value = np.float32(code[j]) * factor
            to[j] = to[j] + value if add else value
    else:
        for j in range((count + 1) // 2):
            both = np.int32(code[j])
            high, low = np.float32(np.int32(both >> 4)) * factor, np.float32(np.int32(((both & 15) ^ 8) - 8)) * factor
            to[2 * j], to[2 * j + 1] = (to[2 * j] + high, to[2 * j + 1] + low) if add else (high, low)


@compiled()
def quantize_segment(x, codes, width, length, peak):
    """Write the codes of a segment whose largest magnitude is `peak`; return the factor that decodes them."""
    scale, to = scale_of(peak, width), octets(codes)
    # Otherwise the codes are zero, and the factor that is returned makes NaN of them.
    if np.isfinite(peak):
        put_codes(x, codes, scale, width, length)
    else:
        for j in range(bytes_of(length, width)):
            to[j] = 0
    return ONE / scale


@compiled()
def peak_of(x, count):
    """Return the largest magnitude, NaN if one of them is."""
    return of_magnitude(larger_magnitude(magnitude(ZERO), x, count))


@compiled()
def quantize_blocks(low, high, grid, x, codes, scales, width, scratch):
    """Write the codes of x (R, n), and the factors (R, S) that decode them."""
    for k in range(low, high):
        r, first, length, s, _ = block_of(grid, k)
        here, row = r * grid.segments + s, x + 4 * (r * grid.n + first)
        real = limit(ints(grid.valid)[here], length)
        # Codes are of whole segments, and behind its real elements the input need not be zero.
        if real < length:
            write(scratch, row, real, False)
            pad(scratch, real, length)
            row = scratch
        to = codes + bytes_of(r * grid.n + first, width)
        floats(scales)[here] = quantize_segment(row, to, width, length, peak_of(row, length))


@compiled()
def compensate(x, error, factor, h, count):
    """Write h = x + error."""
    value, e, to = floats(x), octets(error), floats(h)
    for j in range(count):
        to[j] = value[j] + np.float32(e[j]) * factor


@compiled()
def damp(h, sent, error, factor, beta, rest, count):
    """Write over h the next error; `sent` is what h was decoded as."""
    value, d, e = floats(h), floats(sent), octets(error)
    for j in range(count):
        value[j] = damped(np.float32(e[j]) * factor, value[j] - d[j], beta, rest)


@compiled()
def feedback_blocks(
    low, high, grid, x, error, error_scales, beta, rest, codes, scales, kept, kept_scales, width, scratch
):
    """Quantise x + error, and keep the moving average of what was lost in 8 bits; h lives in `scratch`."""
    h = scratch + 4 * STEP
    for k in range(low, high):
        r, first, length, s, _ = block_of(grid, k)
        here, place = r * grid.segments + s, r * grid.n + first
        real, old = limit(ints(grid.valid)[here], length), floats(error_scales)[here]
        compensate(x + 4 * place, error + place, old, h, real)
        pad(h, real, length)
        to = codes + bytes_of(place, width)
        factor = quantize_segment(h, to, width, length, peak_of(h, length))
        # The codes of h are written. Now the next error takes its place, piece by piece.
        for i in range(0, real, STEP):
            count = min(STEP, real - i)
            get_codes(to + bytes_of(i, width), factor, scratch, width, count, False)
            damp(h + 4 * i, scratch, error + place + i, old, beta, rest, count)
        floats(scales)[here] = factor
        floats(kept_scales)[here] = quantize_segment(h, kept + place, 8, length, peak_of(h, length))


@compiled()
def decode_blocks(low, high, grid, codes, row_stride, stride, ranks, scales, width, share, out, scratch):
    """Write the mean over the ranks of code * scale; codes (R, W, .), scales (R, W, S)."""
    mean = floats(scratch)
    for k in range(low, high):
        r, first, length, s, _ = block_of(grid, k)
        real, to = ints(grid.valid)[r * grid.segments + s], out + 4 * (r * grid.n + first)
        theirs, factors = codes + r * row_stride, floats(scales + 4 * (r * ranks * grid.segments + s))
        nontemporal = streams(grid, to)
        for i in range(0, length, STEP):
            count = min(STEP, length - i)
            for w in range(ranks):
                here = theirs + w * stride + bytes_of(first + i, width)
                get_codes(here, factors[w * grid.segments], scratch, width, count, w > 0)
            if ranks > 1:
                for j in range(count):
                    mean[j] *= share
            pad(scratch, limit(real - i, count), count)
            write(to + 4 * i, scratch, count, nontemporal)


def _table(runs: Sequence[int], width: int) -> BlockTable | None:
    at = block_table(runs, WHOLE_SEGMENTS)
    return at if width != 4 or at.even else None


def _codes(rows: int, valid: Tensor, n: int, width: int) -> list[Tensor]:
    """Return memory for codes and scales."""
    codes = empty((rows, n // 2 if width == 4 else n), torch.int8 if width == 8 else torch.uint8, valid.device)
    return [codes, torch.ones(valid.shape, dtype=torch.float32, device="cpu")]


def _room(at: BlockTable) -> int:
    """Return bytes for the longest segment, and a piece."""
    return 4 * (int(at.table[:, 1].max(initial=0)) + STEP + 16)


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.codes.quantize`."""
    at = _table(runs, width)
    if at is None or x.dtype == torch.float64:
        return NotImplemented
    x = x.contiguous() if x.dtype == torch.float32 else empty(x.shape, torch.float32, x.device).copy_(x)
    found = _codes(x.shape[0], valid, at.n, width)
    run(quantize_blocks, at, valid, x, *found, width, scratch=_room(at))
    return tuple(found)


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.codes.quantize_feedback`."""
    at = _table(runs, width)
    if at is None or x.dtype != torch.float32 or error_scales.dtype != torch.float32:
        return NotImplemented
    given = [t.contiguous() for t in (x, error, error_scales)]
    found = [t for bits in (width, 8) for t in _codes(x.shape[0], valid, at.n, bits)]
    run(feedback_blocks, at, valid, *given, float(beta), float(1.0 - beta), *found, width, scratch=_room(at))
    return tuple(found)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.codes.dequantize_mean`."""
    at = _table(runs, width)
    if at is None or scales.dtype != torch.float32:
        return NotImplemented
    out = empty((codes.shape[0], at.n), torch.float32, codes.device)
    run(decode_blocks, at, valid, *messages(codes, scales), width, 1.0 / codes.shape[1], out, scratch=4 * STEP)
    return out


def quantize_fp8(x: Tensor, valid: Tensor, runs: Sequence[int], mantissa: int) -> Any:
    """See `reference.codes.quantize_fp8`."""
    return quantize(x, valid, runs, E4M3 if mantissa == 3 else E5M2)


def dequantize_fp8(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], mantissa: int) -> Any:
    """See `reference.codes.dequantize_fp8`."""
    return dequantize_mean(codes, scales, valid, runs, E4M3 if mantissa == 3 else E5M2)


KERNELS = (quantize, quantize_feedback, dequantize_mean, quantize_fp8, dequantize_fp8)
