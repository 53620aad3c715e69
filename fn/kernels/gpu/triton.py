"""The Triton row: one set of fused kernels for CUDA, ROCm and XPU. Here are those of signs, and the row itself.

Products are not contracted with sums, so that elements equal the reference's; sums of squares are added in another
order. float64, and blocks that no program holds, are left to the next row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels.gpu import launching
from fn.kernels.gpu import triton_kernels as kernels
from fn.kernels.gpu.launching import BLOCK, Cut
from fn.kernels.reference import bytes_for
from fn.kernels.reference.layout import plain
from fn.kernels.table import Accelerator


def cut(runs: Sequence[int], device: torch.device) -> Cut:
    """Return a row cut into blocks whose squares are added."""
    return launching.cut(tuple(runs), BLOCK, device)


def outputs(rows: int, at: Cut) -> tuple[Tensor, Tensor]:
    """Return memory for the bits of rows, and for the squares of their blocks."""
    device = at.table.device
    bits = torch.empty((rows, bytes_for(at.at.n)), dtype=torch.uint8, device=device)
    return bits, torch.empty((rows, len(at.at.table)), dtype=torch.float64, device=device)


def place(at: Cut, valid: Tensor) -> tuple[Any, ...]:
    """Return what kernels take of the blocks of rows."""
    return at.table, valid.contiguous(), at.at.n, len(at.at.table), at.at.segments


def evenly(bits: Tensor) -> Tensor:
    """Return codes (R, W, bytes) whose W R rows lie as far from each other; those of a message do, without a copy."""
    rows, ranks, _ = bits.shape
    even = 1 in (rows, ranks) or bits.stride(0) == ranks * bits.stride(1)
    return bits if even and bits.stride(2) == 1 else bits.contiguous()


def messages(bits: Tensor) -> tuple[Any, ...]:
    """Return what kernels take of W messages behind the numbers of `place`: how far they lie apart, W, 1 / W."""
    ranks = bits.shape[1]
    return bits.stride(1 if ranks > 1 else 0), ranks, 1.0 / ranks


def _encode(
    x: Tensor, error: tuple[Tensor, Tensor] | None, valid: Tensor, runs: Sequence[int], out: Tensor | None = None
) -> Any:
    at = cut(runs, x.device)
    if not at.at.aligned or any(t.dtype == torch.float64 for t in (x, *(error or ()))):
        return NotImplemented
    rows, x = x.shape[0], x.contiguous()
    buffer, sent = (t.to(torch.float32).contiguous() for t in error or (x.new_empty(1), x.new_empty(1)))
    if out is None:
        out = torch.empty((rows, at.at.n) if error else (1,), dtype=torch.float32, device=x.device)
    bits, squares = outputs(rows, at)
    ends = x, buffer, sent, out, bits, squares
    constants = {"FEEDBACK": error is not None, "ALIGNED": at.at.whole, "BLOCK": at.block}
    launching.launch(kernels.encode, x, squares.numel(), *ends, *place(at, valid), **constants)
    return out, bits, launching.add_up(squares, at)


def pack_bits(x: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    x = x if x.dtype != torch.float64 else torch.where(x >= 0, 1.0, -1.0).to(torch.float32)
    valid = torch.full((x.shape[0], 1), x.shape[1], dtype=torch.int64, device=x.device)
    bits: Tensor = _encode(x, None, valid, (1, x.shape[1]))[1]
    return bits


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """See `reference.unpack_bits`."""
    one = torch.ones((bits.shape[0], 1), dtype=torch.float32, device=bits.device)
    signs: Tensor = sign_decode(
        bits, one, torch.full((bits.shape[0], 1), n, dtype=torch.int64, device=bits.device), (1, n)
    )
    return signs.to(dtype)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode`."""
    found = _encode(x, None, valid, runs)
    return found if found is NotImplemented else found[1:]


def sign_encode_feedback(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode_feedback`."""
    return _encode(x, (buffer, sent), valid, runs)


def sign_encode_feedback_(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode_feedback_`. A program reads its block before it writes it."""
    if not plain((x,)):
        return NotImplemented
    found = _encode(x, (buffer, sent), valid, runs, x)
    return found if found is NotImplemented else found[1:]


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_residual_`."""
    found = _residual(b, scales, valid, runs, b) if b.is_contiguous() else NotImplemented
    return found if found is NotImplemented else None


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_residual`."""
    return _residual(b, scales, valid, runs, torch.empty(b.shape, dtype=torch.float32, device=b.device))


def _residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], out: Tensor) -> Any:
    at = cut(runs, b.device)
    if b.dtype != torch.float32 or scales.dtype != torch.float32:
        return NotImplemented
    b, programs = b.contiguous(), b.shape[0] * len(at.at.table)
    ends = b, scales.contiguous(), out, *place(at, valid)
    launching.launch(kernels.leave, b, programs, *ends, ALIGNED=at.at.whole, BLOCK=at.block)
    return out


def sign_serve(bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_serve`."""
    at = cut(runs, bits.device)
    if not at.at.aligned or any(t.dtype != torch.float32 for t in (scales, buffer, sent)):
        return NotImplemented
    (mine, squares), b = outputs(bits.shape[0], at), torch.empty(buffer.shape, dtype=torch.float32, device=bits.device)
    bits = evenly(bits)
    ends = bits, scales.contiguous(), buffer.contiguous(), sent.contiguous(), b, mine, squares, *place(at, valid)
    constants = {"ALIGNED": at.at.whole, "BLOCK": at.block}
    launching.launch(kernels.serve, bits, squares.numel(), *ends, *messages(bits), **constants)
    return b, mine, launching.add_up(squares, at)


def sign_decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode`."""
    return sign_decode_mean(bits[:, None], scales[:, None], valid, runs)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode_mean`."""
    at = cut(runs, bits.device)
    if not at.at.aligned or scales.dtype != torch.float32:
        return NotImplemented
    out = torch.empty((bits.shape[0], at.at.n), dtype=torch.float32, device=bits.device)
    bits = evenly(bits)
    ends = bits, scales.contiguous(), out, *place(at, valid), *messages(bits)
    programs = bits.shape[0] * len(at.at.table)
    launching.launch(kernels.decode, bits, programs, *ends, ALIGNED=at.at.whole, BLOCK=at.block)
    return out


def row(device_type: str) -> Accelerator:
    """Return the row."""
    from fn.kernels.gpu import triton_int, triton_lamb, triton_steps

    found = (pack_bits, unpack_bits, sign_encode, sign_encode_feedback, sign_encode_feedback_, sign_residual,
             sign_residual_, sign_serve, sign_decode, sign_decode_mean)  # fmt: skip
    kernels = {f.__name__: f for f in found}
    for module in (triton_int, triton_lamb, triton_steps):
        kernels |= module.KERNELS
    return Accelerator(device_type, kernels, provider="triton")
