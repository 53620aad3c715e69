"""The Triton row: one set of fused kernels for CUDA, ROCm and XPU.

Products are not contracted with sums, so that elements equal the reference's; sums of squares are added in another
order. float64, and blocks that no program holds, are left to the next row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from fn.kernels.cpu.blocks import BlockTable, add_up, block_table
from fn.kernels.gpu import triton_kernels as kernels
from fn.kernels.reference import bytes_for
from fn.kernels.table import Accelerator
from fn.kernels.tracing import PLANS

SIGN_BLOCK = 4096
LARGEST = 1 << 15
"""Elements that one program may hold: a larger segment of an integer codec is left to the next row."""


@lru_cache(maxsize=PLANS)
def _cut(runs: tuple[int, ...], block: int, device: torch.device) -> tuple[BlockTable, Tensor, int]:
    """Return the blocks, their table on the device, and the size of a program's block."""
    at = block_table(runs, block)
    longest = int(at.table[:, 1].max(initial=1))
    return at, torch.from_numpy(at.table).to(device), max(16, triton.next_power_of_2(longest))


def _launch(kernel: Any, x: Tensor, programs: int, *args: Any, **constants: Any) -> None:
    if not programs:
        return
    here = nullcontext() if x.device.type == "cpu" else torch.accelerator.device_index(x.device.index or 0)
    with here:
        kernel[(programs,)](*args, **constants, num_warps=8, enable_fp_fusion=False)


def _encode(
    x: Tensor, error: tuple[Tensor, Tensor] | None, valid: Tensor, runs: Sequence[int], out: Tensor | None = None
) -> Any:
    at, table, block = _cut(tuple(runs), SIGN_BLOCK, x.device)
    if not at.aligned or any(t.dtype == torch.float64 for t in (x, *(error or ()))):
        return NotImplemented
    rows = x.shape[0]
    x = x.contiguous()
    buffer, sent = (t.to(torch.float32).contiguous() for t in error or (x.new_empty(1), x.new_empty(1)))
    if out is None:
        out = torch.empty((rows, at.n) if error else (1,), dtype=torch.float32, device=x.device)
    bits = torch.empty((rows, bytes_for(at.n)), dtype=torch.uint8, device=x.device)
    squares = torch.empty((rows, len(at.table)), dtype=torch.float64, device=x.device)
    _launch(kernels.encode, x, squares.numel(), x, buffer, sent, out, bits, squares, table, valid.contiguous(), at.n,
            len(at.table), at.segments, FEEDBACK=error is not None, BLOCK=block)  # fmt: skip
    return out, bits, add_up(squares, runs, SIGN_BLOCK)


def pack_bits(x: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    x = x if x.dtype != torch.float64 else torch.where(x >= 0, 1.0, -1.0).to(torch.float32)
    valid = torch.full((x.shape[0], 1), x.shape[1], device=x.device)
    bits: Tensor = _encode(x, None, valid, (1, x.shape[1]))[1]
    return bits


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """See `reference.unpack_bits`."""
    one = torch.ones((bits.shape[0], 1), device=bits.device)
    signs: Tensor = sign_decode(bits, one, torch.full((bits.shape[0], 1), n, device=bits.device), (1, n))
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
    if x.dtype != torch.float32 or not x.is_contiguous():
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
    at, table, block = _cut(tuple(runs), SIGN_BLOCK, b.device)
    if b.dtype != torch.float32 or scales.dtype != torch.float32:
        return NotImplemented
    b = b.contiguous()
    _launch(kernels.residual, b, b.shape[0] * len(at.table), b, scales.contiguous(), out, table, valid.contiguous(),
            at.n, len(at.table), at.segments, BLOCK=block)  # fmt: skip
    return out


def sign_serve(bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_serve`."""
    at, table, block = _cut(tuple(runs), SIGN_BLOCK, bits.device)
    if not at.aligned or any(t.dtype != torch.float32 for t in (scales, buffer, sent)):
        return NotImplemented
    rows, ranks = bits.shape[:2]
    bits, scales = bits.contiguous(), (scales * (1.0 / ranks)).contiguous()
    buffer, sent = buffer.contiguous(), sent.contiguous()
    out, mine = torch.empty_like(buffer), bits.new_empty((rows, bytes_for(at.n)))
    squares = torch.empty((rows, len(at.table)), dtype=torch.float64, device=bits.device)
    _launch(kernels.serve, bits, squares.numel(), bits, scales, buffer, sent, out, mine, squares, table,
            valid.contiguous(), at.n, len(at.table), at.segments, bits.shape[2], ranks,
            BLOCK=block)  # fmt: skip
    return out, mine, add_up(squares, runs, SIGN_BLOCK)


def _decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    at, table, block = _cut(tuple(runs), SIGN_BLOCK, bits.device)
    if scales.dtype != torch.float32:
        return NotImplemented
    bits, (rows, ranks) = bits.contiguous(), bits.shape[:2]
    out = torch.empty((rows, at.n), dtype=torch.float32, device=bits.device)
    _launch(kernels.decode, bits, rows * len(at.table), bits, scales.contiguous(), out, table, valid.contiguous(), at.n,
            len(at.table), at.segments, bits.shape[2], ranks, BLOCK=block)  # fmt: skip
    return out


def sign_decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode`."""
    return _decode(bits[:, None], scales[:, None], valid, runs)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode_mean`."""
    return _decode(bits, scales * (1.0 / bits.shape[1]), valid, runs)


def row(device_type: str) -> Accelerator:
    """Return the row."""
    from fn.kernels.gpu import triton_int

    found = (pack_bits, unpack_bits, sign_encode, sign_encode_feedback, sign_encode_feedback_, sign_residual,
             sign_residual_, sign_serve, sign_decode, sign_decode_mean)  # fmt: skip
    return Accelerator(device_type, {f.__name__: f for f in found} | triton_int.KERNELS, provider="triton")
