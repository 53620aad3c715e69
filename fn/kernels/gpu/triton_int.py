"""The integer kernels of the Triton row, part of `triton`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels import half_feedback
from fn.kernels.cpu.blocks import WHOLE_SEGMENTS
from fn.kernels.gpu import triton_kernels as kernels
from fn.kernels.gpu.triton import LARGEST, _cut, _launch


def _codes(x: Tensor, n: int, width: int) -> Tensor:
    dtype = torch.uint8 if width == 4 else torch.int8
    return torch.empty((x.shape[0], n * width // 8), dtype=dtype, device=x.device)


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.quantize`."""
    at, table, block = _cut(tuple(runs), WHOLE_SEGMENTS, x.device)
    if x.dtype == torch.float64 or block > LARGEST or (width == 4 and not at.even):
        return NotImplemented
    x, codes = x.contiguous(), _codes(x, at.n, width)
    scales = torch.ones(valid.shape, dtype=torch.float32, device=x.device)
    _launch(kernels.quantize, x, x.shape[0] * len(at.table), x, codes, scales, table, valid.contiguous(), at.n,
            len(at.table), at.segments, WIDTH=width, BLOCK=block)  # fmt: skip
    return codes, scales


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.quantize_feedback`."""
    at, table, block = _cut(tuple(runs), WHOLE_SEGMENTS, x.device)
    if x.dtype == torch.float64 or error_scales.dtype != torch.float32 or block > LARGEST:
        return NotImplemented
    if width == 4 and not at.even:
        return NotImplemented
    if x.dtype != torch.float32:
        parts = quantize, dequantize
        return half_feedback.quantize_feedback(*parts, x, error, error_scales, beta, valid, runs, width)
    x, found = x.contiguous(), []
    for bits in (width, 8):
        found += [_codes(x, at.n, bits), torch.ones(valid.shape, dtype=torch.float32, device=x.device)]
    factors = float(np.float32(beta)), float(np.float32(1.0 - beta))
    _launch(kernels.quantize_feedback, x, x.shape[0] * len(at.table), x, error.contiguous(), error_scales.contiguous(),
            *factors, *found, table, valid.contiguous(), at.n, len(at.table), at.segments, WIDTH=width,
            BLOCK=block)  # fmt: skip
    return tuple(found)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.dequantize_mean`."""
    at, table, block = _cut(tuple(runs), 4096, codes.device)
    if scales.dtype != torch.float32:
        return NotImplemented
    codes, (rows, ranks) = codes.contiguous(), codes.shape[:2]
    out = torch.empty((rows, at.n), dtype=torch.float32, device=codes.device)
    _launch(kernels.dequantize, codes, rows * len(at.table), codes, scales.contiguous(), out, table, valid.contiguous(),
            at.n, len(at.table), at.segments, codes.shape[2], ranks, float(np.float32(1.0 / ranks)),
            WIDTH=width, BLOCK=block)  # fmt: skip
    return out


def dequantize(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.dequantize`."""
    return dequantize_mean(codes[:, None], scales[:, None], valid, runs, width)


KERNELS = {f.__name__: f for f in (quantize, quantize_feedback, dequantize, dequantize_mean)}
