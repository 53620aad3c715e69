"""The integer kernels of the Triton row, part of `triton`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels import half_feedback
from fn.kernels.cpu.blocks import WHOLE_SEGMENTS
from fn.kernels.gpu import launching
from fn.kernels.gpu import triton_int_kernels as kernels
from fn.kernels.gpu.launching import BLOCK, Cut

LARGEST = 1 << 15
"""Elements that one program may hold: a larger segment is left to the next row."""

TOGETHER = 1 << 11
"""Elements of small blocks that a program takes together."""


def _codes(x: Tensor, n: int, width: int) -> Tensor:
    dtype = torch.uint8 if width == 4 else torch.int8
    return torch.empty((x.shape[0], n * width // 8), dtype=dtype, device=x.device)


def _factors(at: Cut, valid: Tensor) -> Tensor:
    """Return memory for the factors of segments, 1 where no block writes any."""
    make = torch.empty if at.at.widths.all() else torch.ones
    return make(valid.shape, dtype=torch.float32, device=valid.device)


def _launch(kernel: Any, at: Cut, valid: Tensor, width: int, ends: Sequence[Any], message: Sequence[Any] = ()) -> None:
    """Launch a kernel on all blocks of the rows of `valid`, several a program where they are small."""
    total = valid.shape[0] * len(at.at.table)
    count = max(1, TOGETHER // at.block)
    numbers = at.at.n, len(at.at.table), at.at.segments, *message, total
    constants = {"WIDTH": width, "ALIGNED": at.at.whole, "COUNT": count, "BLOCK": at.block}
    launching.launch(kernel, valid, -(-total // count), *ends, at.table, valid.contiguous(), *numbers, **constants)


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.quantize`."""
    at = launching.cut(tuple(runs), WHOLE_SEGMENTS, x.device)
    if x.dtype == torch.float64 or at.block > LARGEST or (width == 4 and not at.at.even):
        return NotImplemented
    codes, scales = _codes(x, at.at.n, width), _factors(at, valid)
    _launch(kernels.quantize, at, valid, width, (x.contiguous(), codes, scales))
    return codes, scales


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.quantize_feedback`."""
    at = launching.cut(tuple(runs), WHOLE_SEGMENTS, x.device)
    if x.dtype == torch.float64 or error_scales.dtype != torch.float32 or at.block > LARGEST:
        return NotImplemented
    if width == 4 and not at.at.even:
        return NotImplemented
    if x.dtype != torch.float32:
        parts = quantize, dequantize
        return half_feedback.quantize_feedback(*parts, x, error, error_scales, beta, valid, runs, width)
    found: list[Tensor] = []
    for bits in (width, 8):
        found += [_codes(x, at.at.n, bits), _factors(at, valid)]
    factors = float(np.float32(beta)), float(np.float32(1.0 - beta))
    ends = x.contiguous(), error.contiguous(), error_scales.contiguous(), *factors, *found
    _launch(kernels.quantize_feedback, at, valid, width, ends)
    return tuple(found)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.dequantize_mean`."""
    at, (rows, ranks, stride) = launching.cut(tuple(runs), BLOCK, codes.device), codes.shape
    if scales.dtype != torch.float32 or (width == 4 and not at.at.even):
        return NotImplemented
    out = torch.empty((rows, at.at.n), dtype=torch.float32, device=codes.device)
    ends = codes.contiguous(), scales.contiguous(), out
    _launch(kernels.dequantize, at, valid, width, ends, (stride, ranks, float(np.float32(1.0 / ranks))))
    return out


def dequantize(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.dequantize`."""
    return dequantize_mean(codes[:, None], scales[:, None], valid, runs, width)


KERNELS = {f.__name__: f for f in (quantize, quantize_feedback, dequantize, dequantize_mean)}
