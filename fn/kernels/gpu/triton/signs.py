# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The sign kernels of the Triton row: in Triton's language first, then the functions of the table that launch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fn.kernels.gpu.triton.blocks import (
    BLOCK,
    block_of,
    cut,
    encode_compensated,
    evenly,
    grouped,
    jit,
    kernel,
    launch,
    load,
    mean_of,
    messages,
    octets,
    ones,
    outputs,
    scale_of,
    scales_of_block,
    store,
    sums_of,
    write_codes,
)
from fn.kernels.gpu.triton.rules import residual
from fn.kernels.layout import plain
from fn.kernels.tracing import cached_plan


@jit
def encode_block(x, buffer, sent, out, bits, squares, length, real, FEEDBACK: tl.constexpr, GROUP: tl.constexpr,
                 FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode x, plus the residual error if there is feedback."""
    i = octets(BLOCK)
    if FEEDBACK:
        encode_compensated(load(x, i, length, FULL), buffer, sent, out, bits, squares, i, length, real, FULL, GROUP,
                           BLOCK)  # fmt: skip
    else:
        write_codes(load(x, i, length, FULL), i, length, real, bits, squares, GROUP, BLOCK)


@kernel
def encode_kernel(x, buffer, sent, out, bits, squares, table, valid, firsts, n, blocks, segments, per_row,
                  FEEDBACK: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Encode x (R, n), with feedback if so wanted."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    scale, per_row = scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP)
    real, own = tl.load(valid + r * segments + s) - offset, r * per_row + scale
    to, squares = bits + r * ((n + 7) // 8) + first // 8, squares + (own if GROUP else tl.program_id(0))
    block = x + position, buffer + position, sent + own, out + position, to, squares, length, real
    if length == BLOCK:
        encode_block(*block, FEEDBACK, GROUP, True, BLOCK)
    else:
        encode_block(*block, FEEDBACK, GROUP, False, BLOCK)


@jit
def decode_block(bits, scales, width, ranks, per_row, share, out, length, real, GROUP: tl.constexpr, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean."""
    i = octets(BLOCK)
    store(out, i, mean_of(bits, scales, width, ranks, per_row, share, i, length, real, GROUP, BLOCK), length, FULL)


@kernel
def decode_kernel(bits, scales, out, table, valid, firsts, n, blocks, segments, per_row, width, ranks, share,
                  GROUP: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write share times the sum over the ranks of scale * sign; bits (R, W, .), scales (R, W, B)."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    scale, per_row = scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP)
    real = tl.load(valid + r * segments + s) - offset
    bits += r * ranks * width + first // 8
    scales += r * ranks * per_row + scale
    block = bits, scales, width, ranks, per_row, share, out + position, length, real
    if length == BLOCK:
        decode_block(*block, GROUP, True, BLOCK)
    else:
        decode_block(*block, GROUP, False, BLOCK)


@jit
def serve_block(received, scales, width, ranks, per_row, share, buffer, sent, out, bits, squares, length, real,
                GROUP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode the mean plus the residual error."""
    i = octets(BLOCK)
    x = mean_of(received, scales, width, ranks, per_row, share, i, length, real, GROUP, BLOCK)
    encode_compensated(x, buffer, sent, out, bits, squares, i, length, real, FULL, GROUP, BLOCK)


@kernel
def serve_kernel(received, scales, buffer, sent, out, bits, squares, table, valid, firsts, n, blocks, segments, per_row,
                 width, ranks, share, GROUP: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode the mean of W messages plus a residual error: what is left of a buffer that was sent."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    scale, per_row = scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP)
    real, own = tl.load(valid + r * segments + s) - offset, r * per_row + scale
    received += r * ranks * width + first // 8
    scales += r * ranks * per_row + scale
    to, squares = bits + r * ((n + 7) // 8) + first // 8, squares + (own if GROUP else tl.program_id(0))
    mean = received, scales, width, ranks, per_row, share
    block = buffer + position, sent + own, out + position, to, squares, length, real
    if length == BLOCK:
        serve_block(*mean, *block, GROUP, True, BLOCK)
    else:
        serve_block(*mean, *block, GROUP, False, BLOCK)


@jit
def residual_block(b, scales, out, length, real, GROUP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write what was not delivered."""
    i = octets(BLOCK) if GROUP else tl.arange(0, BLOCK)
    x = load(b, i, length, FULL)
    store(out, i, tl.where(i < real, residual(x, scale_of(scales, length, GROUP, BLOCK), 0.0), x), length, FULL)


@kernel
def residual_kernel(b, scales, out, table, valid, firsts, n, blocks, segments, per_row, GROUP: tl.constexpr,
                    ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write b - scale sgn b for b (R, n)."""
    r, _, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    scale, per_row = scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP)
    real, own = tl.load(valid + r * segments + s) - offset, r * per_row + scale
    if length == BLOCK:
        residual_block(b + position, scales + own, out + position, length, real, GROUP, True, BLOCK)
    else:
        residual_block(b + position, scales + own, out + position, length, real, GROUP, False, BLOCK)


# the functions of the table


def _encode(
    x: Tensor, error: tuple[Tensor, Tensor] | None, valid: Tensor, runs: Sequence[int], block: int,
    out: Tensor | None = None, *, sums: bool = True,
) -> Any:  # fmt: skip
    valid, runs, group = grouped(valid, runs, block)
    row = cut(runs, x.device, group=group)
    if not row.host.aligned or any(t.dtype == torch.float64 for t in (x, *(error or ()))):
        return NotImplemented
    rows, x = x.shape[0], x.contiguous()
    buffer, sent = (t.to(torch.float32).contiguous() for t in error or (x.new_empty(1), x.new_empty(1)))
    if out is None:
        out = torch.empty((rows, row.host.n) if error else (1,), dtype=torch.float32, device=x.device)
    bits, squares = outputs(rows, row)
    args = x, buffer, sent, out, bits, squares, *row.scales(valid)
    constants = {"FEEDBACK": error is not None, "GROUP": group, "ALIGNED": row.host.whole, "BLOCK": BLOCK}
    launch(encode_kernel, x, rows * row.blocks, *args, **constants)
    return out, bits, sums_of(squares, row) if sums else None


@cached_plan
def _whole(rows: int, n: int, device: torch.device) -> Tensor:
    """Return the lengths (R, 1) of rows of one segment, all of it real."""
    return torch.full((rows, 1), n, dtype=torch.int64, device=device)


def pack_bits(x: Tensor) -> Tensor:
    """See `reference.codes.pack_bits`."""
    # A float64 number below the smallest float32 would be rounded to zero, and its sign be lost.
    x = x if x.dtype != torch.float64 else torch.where(x >= 0, 1.0, -1.0).to(torch.float32)
    bits: Tensor = _encode(x, None, _whole(x.shape[0], x.shape[1], x.device), (1, x.shape[1]), 0, sums=False)[1]
    return bits


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """See `reference.codes.unpack_bits`."""
    rows, device = bits.shape[0], bits.device
    # (R, bytes) -> (R, 1, bytes): a mean of one message
    message = bits[:, None], ones(rows, device)[:, None, None]
    signs: Tensor = sign_decode_mean(*message, _whole(rows, n, device), (1, n), 0)
    return signs.to(dtype)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_encode`."""
    encoded = _encode(x, None, valid, runs, block)
    return encoded if encoded is NotImplemented else encoded[1:]


def sign_encode_feedback(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> Any:
    """See `reference.codes.sign_encode_feedback`."""
    return _encode(x, (buffer, sent), valid, runs, block)


def sign_encode_feedback_(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> Any:
    """See `reference.codes.sign_encode_feedback_`."""
    if not plain((x,)):
        return NotImplemented
    encoded = _encode(x, (buffer, sent), valid, runs, block, x)
    return encoded if encoded is NotImplemented else encoded[1:]


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_residual_`."""
    done = _residual(b, scales, valid, runs, block, b) if b.is_contiguous() else NotImplemented
    return done if done is NotImplemented else None


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_residual`."""
    return _residual(b, scales, valid, runs, block, torch.empty(b.shape, dtype=torch.float32, device=b.device))


def _residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int, out: Tensor) -> Any:
    valid, runs, group = grouped(valid, runs, block)
    row = cut(runs, b.device, group=group)
    if b.dtype != torch.float32 or scales.dtype != torch.float32:
        return NotImplemented
    args = b.contiguous(), scales.contiguous(), out, *row.scales(valid)
    constants = {"GROUP": group, "ALIGNED": row.host.whole, "BLOCK": BLOCK}
    launch(residual_kernel, b, b.shape[0] * row.blocks, *args, **constants)
    return out


def sign_serve(
    bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> Any:
    """See `reference.codes.sign_serve`."""
    valid, runs, group = grouped(valid, runs, block)
    row = cut(runs, bits.device, group=group)
    if not row.host.aligned or any(t.dtype != torch.float32 for t in (scales, buffer, sent)):
        return NotImplemented
    b = torch.empty(buffer.shape, dtype=torch.float32, device=bits.device)
    codes, squares = outputs(bits.shape[0], row)
    bits = evenly(bits)
    inputs = bits, scales.contiguous(), buffer.contiguous(), sent.contiguous()
    args = *inputs, b, codes, squares, *row.scales(valid), *messages(bits)
    constants = {"GROUP": group, "ALIGNED": row.host.whole, "BLOCK": BLOCK}
    launch(serve_kernel, bits, bits.shape[0] * row.blocks, *args, **constants)
    return b, codes, sums_of(squares, row)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Any:
    """See `reference.codes.sign_decode_mean`."""
    valid, runs, group = grouped(valid, runs, block)
    row = cut(runs, bits.device, group=group)
    if not row.host.aligned or scales.dtype != torch.float32:
        return NotImplemented
    out = torch.empty((bits.shape[0], row.host.n), dtype=torch.float32, device=bits.device)
    bits = evenly(bits)
    args = bits, scales.contiguous(), out, *row.scales(valid), *messages(bits)
    constants = {"GROUP": group, "ALIGNED": row.host.whole, "BLOCK": BLOCK}
    launch(decode_kernel, bits, bits.shape[0] * row.blocks, *args, **constants)
    return out


KERNELS = (pack_bits, unpack_bits, sign_encode, sign_encode_feedback, sign_encode_feedback_, sign_residual,
           sign_residual_, sign_serve, sign_decode_mean)  # fmt: skip
