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
    add_up,
    block_of,
    cut,
    encode_compensated,
    evenly,
    jit,
    kernel,
    launch,
    load,
    mean_of,
    messages,
    octets,
    ones,
    outputs,
    store,
    write_codes,
)
from fn.kernels.gpu.triton.rules import residual
from fn.kernels.layout import plain
from fn.kernels.tracing import cached_plan


@jit
def encode_block(x, buffer, sent, out, bits, squares, length, real, FEEDBACK: tl.constexpr, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Encode x, plus the residual error if there is feedback."""
    i = octets(BLOCK)
    if FEEDBACK:
        encode_compensated(load(x, i, length, FULL), buffer, sent, out, bits, squares, i, length, real, FULL, BLOCK)
    else:
        write_codes(load(x, i, length, FULL), i, length, real, bits, squares, BLOCK)


@kernel
def encode_kernel(x, buffer, sent, out, bits, squares, table, valid, n, blocks, segments, FEEDBACK: tl.constexpr,
                  ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode x (R, n), with feedback if so wanted."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    rs = r * segments + s
    real = tl.load(valid + rs) - offset
    to = bits + r * ((n + 7) // 8) + first // 8
    block = x + position, buffer + position, sent + rs, out + position, to, squares, length, real
    if length == BLOCK:
        encode_block(*block, FEEDBACK, True, BLOCK)
    else:
        encode_block(*block, FEEDBACK, False, BLOCK)


@jit
def decode_block(bits, scales, width, ranks, segments, share, out, length, real, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean."""
    i = octets(BLOCK)
    store(out, i, mean_of(bits, scales, width, ranks, segments, share, i, length, real, BLOCK), length, FULL)


@kernel
def decode_kernel(bits, scales, out, table, valid, n, blocks, segments, width, ranks, share, ALIGNED: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Write share times the sum over the ranks of scale * sign; bits (R, W, .), scales (R, W, S)."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    real = tl.load(valid + r * segments + s) - offset
    bits += r * ranks * width + first // 8
    scales += r * ranks * segments + s
    block = bits, scales, width, ranks, segments, share, out + position, length, real
    if length == BLOCK:
        decode_block(*block, True, BLOCK)
    else:
        decode_block(*block, False, BLOCK)


@jit
def serve_block(received, scales, width, ranks, segments, share, buffer, sent, out, bits, squares, length, real,
                FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode the mean plus the residual error."""
    i = octets(BLOCK)
    x = mean_of(received, scales, width, ranks, segments, share, i, length, real, BLOCK)
    encode_compensated(x, buffer, sent, out, bits, squares, i, length, real, FULL, BLOCK)


@kernel
def serve_kernel(received, scales, buffer, sent, out, bits, squares, table, valid, n, blocks, segments, width, ranks,
                 share, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode the mean of W messages plus a residual error: what is left of a buffer that was sent."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    rs = r * segments + s
    real = tl.load(valid + rs) - offset
    received += r * ranks * width + first // 8
    scales += r * ranks * segments + s
    to = bits + r * ((n + 7) // 8) + first // 8
    mean = received, scales, width, ranks, segments, share
    if length == BLOCK:
        serve_block(*mean, buffer + position, sent + rs, out + position, to, squares, length, real, True, BLOCK)
    else:
        serve_block(*mean, buffer + position, sent + rs, out + position, to, squares, length, real, False, BLOCK)


@jit
def residual_block(b, scale, out, length, real, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write what was not delivered."""
    i = tl.arange(0, BLOCK)
    x = load(b, i, length, FULL)
    store(out, i, tl.where(i < real, residual(x, tl.load(scale), 0.0), x), length, FULL)


@kernel
def residual_kernel(b, scales, out, table, valid, n, blocks, segments, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write b - scale sgn b for b (R, n)."""
    r, _, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    rs = r * segments + s
    real = tl.load(valid + rs) - offset
    if length == BLOCK:
        residual_block(b + position, scales + rs, out + position, length, real, True, BLOCK)
    else:
        residual_block(b + position, scales + rs, out + position, length, real, False, BLOCK)


# the functions of the table


def _encode(
    x: Tensor, error: tuple[Tensor, Tensor] | None, valid: Tensor, runs: Sequence[int], out: Tensor | None = None,
    *, sums: bool = True,
) -> Any:  # fmt: skip
    row = cut(runs, x.device)
    if not row.host.aligned or any(t.dtype == torch.float64 for t in (x, *(error or ()))):
        return NotImplemented
    rows, x = x.shape[0], x.contiguous()
    buffer, sent = (t.to(torch.float32).contiguous() for t in error or (x.new_empty(1), x.new_empty(1)))
    if out is None:
        out = torch.empty((rows, row.host.n) if error else (1,), dtype=torch.float32, device=x.device)
    bits, squares = outputs(rows, row)
    args = x, buffer, sent, out, bits, squares, *row.segments(valid)
    constants = {"FEEDBACK": error is not None, "ALIGNED": row.host.whole, "BLOCK": BLOCK}
    launch(encode_kernel, x, squares.numel(), *args, **constants)
    return out, bits, add_up(squares, row) if sums else None


@cached_plan
def _whole(rows: int, n: int, device: torch.device) -> Tensor:
    """Return the lengths (R, 1) of rows of one segment, all of it real."""
    return torch.full((rows, 1), n, dtype=torch.int64, device=device)


def pack_bits(x: Tensor) -> Tensor:
    """See `reference.codes.pack_bits`."""
    # A float64 number below the smallest float32 would be rounded to zero, and its sign be lost.
    x = x if x.dtype != torch.float64 else torch.where(x >= 0, 1.0, -1.0).to(torch.float32)
    bits: Tensor = _encode(x, None, _whole(x.shape[0], x.shape[1], x.device), (1, x.shape[1]), sums=False)[1]
    return bits


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """See `reference.codes.unpack_bits`."""
    rows, device = bits.shape[0], bits.device
    # (R, bytes) -> (R, 1, bytes): a mean of one message
    signs: Tensor = sign_decode_mean(bits[:, None], ones(rows, device)[:, None, None], _whole(rows, n, device), (1, n))
    return signs.to(dtype)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_encode`."""
    encoded = _encode(x, None, valid, runs)
    return encoded if encoded is NotImplemented else encoded[1:]


def sign_encode_feedback(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_encode_feedback`."""
    return _encode(x, (buffer, sent), valid, runs)


def sign_encode_feedback_(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_encode_feedback_`."""
    if not plain((x,)):
        return NotImplemented
    encoded = _encode(x, (buffer, sent), valid, runs, x)
    return encoded if encoded is NotImplemented else encoded[1:]


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_residual_`."""
    done = _residual(b, scales, valid, runs, b) if b.is_contiguous() else NotImplemented
    return done if done is NotImplemented else None


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_residual`."""
    return _residual(b, scales, valid, runs, torch.empty(b.shape, dtype=torch.float32, device=b.device))


def _residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], out: Tensor) -> Any:
    row = cut(runs, b.device)
    if b.dtype != torch.float32 or scales.dtype != torch.float32:
        return NotImplemented
    args = b.contiguous(), scales.contiguous(), out, *row.segments(valid)
    launch(residual_kernel, b, b.shape[0] * row.blocks, *args, ALIGNED=row.host.whole, BLOCK=BLOCK)
    return out


def sign_serve(bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_serve`."""
    row = cut(runs, bits.device)
    if not row.host.aligned or any(t.dtype != torch.float32 for t in (scales, buffer, sent)):
        return NotImplemented
    b = torch.empty(buffer.shape, dtype=torch.float32, device=bits.device)
    codes, squares = outputs(bits.shape[0], row)
    bits = evenly(bits)
    inputs = bits, scales.contiguous(), buffer.contiguous(), sent.contiguous()
    args = *inputs, b, codes, squares, *row.segments(valid), *messages(bits)
    launch(serve_kernel, bits, squares.numel(), *args, ALIGNED=row.host.whole, BLOCK=BLOCK)
    return b, codes, add_up(squares, row)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_decode_mean`."""
    row = cut(runs, bits.device)
    if not row.host.aligned or scales.dtype != torch.float32:
        return NotImplemented
    out = torch.empty((bits.shape[0], row.host.n), dtype=torch.float32, device=bits.device)
    bits = evenly(bits)
    args = bits, scales.contiguous(), out, *row.segments(valid), *messages(bits)
    launch(decode_kernel, bits, bits.shape[0] * row.blocks, *args, ALIGNED=row.host.whole, BLOCK=BLOCK)
    return out


KERNELS = (pack_bits, unpack_bits, sign_encode, sign_encode_feedback, sign_encode_feedback_, sign_residual,
           sign_residual_, sign_serve, sign_decode_mean)  # fmt: skip
