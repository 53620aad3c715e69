"""The integer kernels of the CPU row in Numba, part of `numba`. Bit for bit those of the reference, but for float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels import half_feedback
from fn.kernels.cpu import int_loops as loops
from fn.kernels.cpu.blocks import WHOLE_SEGMENTS, BlockTable, block_table, run
from fn.kernels.memory_pool import empty


def _block_table(runs: Sequence[int], width: int) -> BlockTable | None:
    at = block_table(runs, WHOLE_SEGMENTS)
    return at if width == 8 or at.even else None


def _codes(rows: int, n: int, width: int) -> Tensor:
    return empty((rows, n * width // 8), torch.uint8 if width == 4 else torch.int8)


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.quantize`."""
    at = _block_table(runs, width)
    if at is None or x.dtype == torch.float64:
        return NotImplemented
    x = x.contiguous() if x.dtype == torch.float32 else empty(x.shape, torch.float32).copy_(x)
    codes, scales = _codes(x.shape[0], at.n, width), torch.ones(valid.shape, dtype=torch.float32, device="cpu")
    run(loops.quantize, at, valid.contiguous(), x.data_ptr(), codes.data_ptr(), scales.data_ptr(), width)
    return codes, scales


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.quantize_feedback`."""
    at = _block_table(runs, width)
    if at is None or x.dtype == torch.float64 or error_scales.dtype != torch.float32:
        return NotImplemented
    if x.dtype != torch.float32:
        parts = quantize, dequantize
        return half_feedback.quantize_feedback(*parts, x, error, error_scales, beta, valid, runs, width)
    x, error, error_scales = x.contiguous(), error.contiguous(), error_scales.contiguous()
    found = []
    for bits in (width, 8):
        found += [_codes(x.shape[0], at.n, bits), torch.ones(valid.shape, dtype=torch.float32, device="cpu")]
    inputs = (x.data_ptr(), error.data_ptr(), error_scales.data_ptr(), beta)
    longest = int(at.table[:, 1].max(initial=0))
    run(loops.quantize_feedback, at, valid.contiguous(), *inputs, *(t.data_ptr() for t in found), width,
        scratch=4 * longest + 64)  # fmt: skip
    return tuple(found)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.dequantize_mean`."""
    at = _block_table(runs, width)
    if at is None or scales.dtype != torch.float32:
        return NotImplemented
    codes = codes if codes.stride(-1) == 1 or codes.shape[-1] <= 1 else codes.contiguous()
    scales = scales.contiguous()
    rows, ranks = codes.shape[:2]
    out = empty((rows, at.n), torch.float32)
    message = (codes.data_ptr(), codes.stride(0), codes.stride(1), ranks, scales.data_ptr(), width)
    run(loops.dequantize, at, valid.contiguous(), *message, out.data_ptr())
    return out


def dequantize(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.dequantize`."""
    return dequantize_mean(codes[:, None], scales[:, None], valid, runs, width)


KERNELS = {f.__name__: f for f in (quantize, quantize_feedback, dequantize, dequantize_mean)}
