# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The sign kernels on a CPU. Loops first, then the cells of the table that call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels import layout
from fn.kernels.cpu.blocks import STEP, WHOLE, add_up, block_table, has_loops_for, run, scales_of
from fn.kernels.cpu.intrinsics import add_signed, doubles, floats, ints, octets, prefetch, put_sign_byte, put_signed
from fn.kernels.cpu.loops import PREFETCH, ZERO, block_of, compiled, limit, pad, scale_of, streams, write
from fn.kernels.layout import plain, plan_of_blocks
from fn.kernels.memory_pool import empty
from fn.kernels.rules import compensated, lerp, residual

SCRATCH = 8 * STEP
"""Bytes of two pieces."""


@compiled("contract", "reassoc")
def sum_of_squares(x, count):
    """Return the sum of squares of a piece, in float64: so it hardly depends on the order."""
    total = 0.0
    for j in range(count):
        total += np.float64(x[j]) * np.float64(x[j])
    return total


@compiled()
def pack(b, bits, real, count, soon, too):
    """Write the bits of a piece, 0 behind the real elements; return the sum of their squares.

    soon, too: addresses of pieces whose successors are asked for on the way, a line at a time.
    """
    x, to, one, other = floats(b), octets(bits), floats(soon), floats(too)
    for k in range(real // 8):
        prefetch(one, PREFETCH + 8 * k)
        prefetch(other, PREFETCH + 8 * k)
        put_sign_byte(to, k, x, 8 * k)
    for k in range(real // 8, (count + 7) // 8):
        byte = 0
        for j in range(8 * k, min(8 * k + 8, real)):
            byte |= (1 if x[j] >= ZERO else 0) << (j - 8 * k)
        to[k] = byte
    return sum_of_squares(x, real)


@compiled()
def compensate(x, buffer, scale, b, real, count):
    """Write x plus the residual of a buffer, plus the buffer itself behind the real elements."""
    new, old, out = floats(x), floats(buffer), floats(b)
    for j in range(real):
        out[j] = compensated(new[j], old[j], scale, ZERO)
    for j in range(real, count):
        out[j] = new[j] + old[j]


@compiled()
def leave(b, scale, out, real, count):
    """Write the residual of b, and b behind the real elements."""
    x, to = floats(b), floats(out)
    for j in range(real):
        to[j] = residual(x[j], scale, ZERO)
    for j in range(real, count):
        to[j] = x[j]


@compiled()
def unpack_mean(bits, stride, ranks, scales, scales_of_row, out, real, count):
    """Write the sum over the ranks of scale * sign, zero behind the real elements; `out` has whole bytes of room."""
    x = floats(out)
    for w in range(ranks):
        scale, theirs = floats(scales)[w * scales_of_row], octets(bits + w * stride)
        if w == 0:
            for k in range((count + 7) // 8):
                put_signed(x, 8 * k, theirs, k, scale)
        else:
            for k in range((count + 7) // 8):
                add_signed(x, 8 * k, theirs, k, scale)
    pad(out, real, count)


@compiled("contract")
def average(mu, g, decay, out, have, count):
    """Write the moving average, and zeros behind the end of a tensor."""
    m, x, to = floats(mu), floats(g), floats(out)
    for j in range(have):
        to[j] = lerp(x[j], m[j], decay)
    pad(out, have, count)


@compiled()
def encode_blocks(low, high, grid, x, averages, received, buffer, sent, out, bits, squares, scratch):
    """Encode one of three: x (R, n), moving averages of tensors, the mean of W messages.

    What is not encoded is 0. With feedback if buffer is not 0: what is encoded then goes to `out`. squares: (R, B)
    float64 of blocks with a scale each; where segments have one (R, blocks), of the places that are added up later.
    """
    mus, gs, widths, sizes, decay = averages
    codes, row_stride, stride, ranks, scales = received
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        real, total = ints(grid.valid)[r * grid.segments + s] - offset, 0.0
        to, row = bits + r * ((grid.n + 7) // 8), 4 * (r * grid.n + first)
        nontemporal = streams(grid, out + row)
        for i in range(0, length, grid.step):
            at, byte, count = row + 4 * i, (first + i) // 8, min(grid.step, length - i)
            inside, own = limit(real - i, count), scale_of(grid, s, offset + i)
            if mus:
                start = r * ints(widths)[s] + offset + i
                soon, too, b = ints(mus)[s] + 4 * start, ints(gs)[s] + 4 * start, scratch
                # `inside` counts valid elements of the row, `sizes` those of the tensor, which may be fewer.
                average(soon, too, decay, b, limit(ints(sizes)[s] - start, count), count)
            elif codes:
                theirs, factors = codes + r * row_stride + byte, scales + 4 * (r * ranks * grid.scales + own)
                soon, too, b = buffer + at, buffer + at, scratch
                unpack_mean(theirs, stride, ranks, factors, grid.scales, b, inside, count)
            else:
                soon, too, b = x + at, buffer + at if buffer else x + at, x + at
            if buffer:
                compensate(b, buffer + at, floats(sent)[r * grid.scales + own], scratch + 4 * STEP, inside, count)
                b = scratch + 4 * STEP
                write(out + at, b, count, nontemporal)
            norm = pack(b, to + byte, inside, count, soon, too)
            total += norm
            if grid.shift != WHOLE:
                doubles(squares)[r * grid.scales + own] = norm
        if grid.shift == WHOLE:
            doubles(squares)[k] = total


@compiled()
def decode_blocks(low, high, grid, received, row_stride, stride, ranks, scales, out, scratch):
    """Write the sum over the ranks of scale * sign; received (R, W, .), scales (R, W, B)."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        real, row = ints(grid.valid)[r * grid.segments + s] - offset, 4 * (r * grid.n + first)
        theirs, nontemporal = received + r * row_stride, streams(grid, out + row)
        for i in range(0, length, grid.step):
            own, count = scale_of(grid, s, offset + i), min(grid.step, length - i)
            factors = scales + 4 * (r * ranks * grid.scales + own)
            inside, at = limit(real - i, count), theirs + (first + i) // 8
            unpack_mean(at, stride, ranks, factors, grid.scales, scratch, inside, count)
            write(out + row + 4 * i, scratch, count, nontemporal)


@compiled()
def residual_blocks(low, high, grid, b, scales, out, scratch):
    """Write b - scale sgn b for b (R, n), which out may be."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        real, row = ints(grid.valid)[r * grid.segments + s] - offset, 4 * (r * grid.n + first)
        nontemporal = streams(grid, out + row)
        for i in range(0, length, grid.step):
            at, count = row + 4 * i, min(grid.step, length - i)
            scale = floats(scales)[r * grid.scales + scale_of(grid, s, offset + i)]
            leave(b + at, scale, scratch, limit(real - i, count), count)
            write(out + at, scratch, count, nontemporal)


def _single(*tensors: Tensor) -> list[Tensor] | None:
    """Return the tensors as contiguous float32, or None if one of them is float64."""
    if any(t.dtype == torch.float64 for t in tensors):
        return None
    return [t.to(torch.float32).contiguous() for t in tensors]


def encode(
    rows: int, valid: Tensor, runs: Sequence[int], block: int, error: tuple[Tensor | None, Tensor | None],
    out: Tensor | None, *, x: Tensor | None = None,
    averages: tuple[Any, ...] = (None, None, None, None, 0.0), received: tuple[Any, ...] = (None, 0, 0, 0, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the bits and the sums of x, of averages or of the mean of messages, see `encode_blocks`.

    Args: error: a buffer and the scales it was sent with. out: what is encoded is written there, which may be x.
    """
    at, scales = block_table(runs), scales_of(tuple(runs), block)
    bits = empty((rows, layout.bytes_for(at.n)), torch.uint8, valid.device)
    squares = torch.empty((rows, scales.total if block else len(at.table)), dtype=torch.float64, device="cpu")
    run(encode_blocks, at, valid, x, averages, received, *error, out, bits, squares, scratch=SCRATCH,
        over=out is x is not None, scales=scales)  # fmt: skip
    return bits, squares if block else add_up(squares, runs)


def _with_loops(valid: Tensor, runs: Sequence[int], block: int) -> tuple[Tensor, Sequence[int], int]:
    """Return valid, runs and a block that there are loops for: blocks of other sizes are segments."""
    return (valid, runs, block) if has_loops_for(block) else (*plan_of_blocks(valid, tuple(runs), block), 0)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_encode`."""
    valid, runs, block = _with_loops(valid, runs, block)
    found = _single(x)
    if found is None or not block_table(runs).aligned:
        return NotImplemented
    return encode(x.shape[0], valid, runs, block, (None, None), None, x=found[0])


def sign_encode_feedback(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> Any:
    """See `reference.codes.sign_encode_feedback`."""
    valid, runs, block = _with_loops(valid, runs, block)
    found = _single(x, buffer, sent)
    if found is None or not block_table(runs).aligned:
        return NotImplemented
    x, buffer, sent = found
    b = empty(x.shape, torch.float32, x.device)
    return (b, *encode(x.shape[0], valid, runs, block, (buffer, sent), b, x=x))


def sign_encode_feedback_(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> Any:
    """See `reference.codes.sign_encode_feedback_`."""
    valid, runs, block = _with_loops(valid, runs, block)
    if not plain((x, buffer, sent)) or not block_table(runs).aligned:
        return NotImplemented
    return encode(x.shape[0], valid, runs, block, (buffer, sent), x, x=x)


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_residual`."""
    valid, runs, block = _with_loops(valid, runs, block)
    found = _single(b, scales)
    if found is None:
        return NotImplemented
    out = empty(b.shape, torch.float32, b.device)
    places = scales_of(tuple(runs), block)
    run(residual_blocks, block_table(runs), valid, *found, out, scratch=SCRATCH, scales=places)
    return out


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_residual_`."""
    valid, runs, block = _with_loops(valid, runs, block)
    if not plain((b, scales)):
        return NotImplemented
    places = scales_of(tuple(runs), block)
    run(residual_blocks, block_table(runs), valid, b, scales, b, scratch=SCRATCH, over=True, scales=places)
    return None


def messages(bits: Tensor, scales: Tensor) -> tuple[Any, ...]:
    """Return what loops take of W messages: bits, their strides, W and scales.

    Args: bits (R, W, bytes); scales (R, W, B), as each adds to the sum.
    """
    # Codes are views of messages. Rows may lie apart, which strides say, but bytes of one row may not.
    bits = bits if bits.stride(-1) == 1 or bits.shape[-1] <= 1 else bits.contiguous()
    return bits, *bits.stride()[:2], bits.shape[1], scales.contiguous()


def divided(scales: Tensor) -> Tensor:
    """Return scales (R, W, B) of W messages as what each adds to their mean."""
    return scales if scales.shape[1] == 1 else scales * (1.0 / scales.shape[1])


def sign_serve(
    bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> Any:
    """See `reference.codes.sign_serve`."""
    valid, runs, block = _with_loops(valid, runs, block)
    at, found = block_table(runs), _single(divided(scales), buffer, sent)
    if found is None or not at.aligned:
        return NotImplemented
    scales, buffer, sent = found
    b = empty((bits.shape[0], at.n), torch.float32, bits.device)
    return (b, *encode(bits.shape[0], valid, runs, block, (buffer, sent), b, received=messages(bits, scales)))


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_decode_mean`."""
    valid, runs, block = _with_loops(valid, runs, block)
    at, found = block_table(runs), _single(divided(scales))
    if found is None or not at.aligned:
        return NotImplemented
    out = empty((bits.shape[0], at.n), torch.float32, bits.device)
    places = scales_of(tuple(runs), block)
    run(decode_blocks, at, valid, *messages(bits, found[0]), out, scratch=SCRATCH, scales=places)
    return out


KERNELS = (sign_encode, sign_encode_feedback, sign_encode_feedback_, sign_residual, sign_residual_, sign_serve,
           sign_decode_mean)  # fmt: skip
