"""Integer codes by torch functions on a CPU, tile by tile: where no compiler is there for anything faster.

The arithmetic is the reference's, number by number; the codes of 4 bits are paired and taken apart by whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels import half_feedback, memory_pool
from fn.kernels.eager.tiles import TILE, tiles
from fn.kernels.reference import row_length, scale_dtype
from fn.kernels.tracing import cached_plan


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Any:
    """See `reference.quantize`."""
    if _too_wide(runs):
        return NotImplemented
    x = x.to(scale_dtype(x))
    codes, scales = _codes_like(x), torch.ones(valid.shape, dtype=x.dtype, device="cpu")
    for tile in tiles(valid, runs):
        found, tile.scales(scales)[:] = _quantize(tile.clear(tile.of(x).clone()), width)
        tile.of(codes).copy_(found)
    return (_pair(codes) if width == 4 else codes), scales


def dequantize(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    """See `reference.dequantize`."""
    return _decode(codes, scales, valid, runs, width, None)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    """See `reference.dequantize_mean`."""
    total = _decode(codes[:, 0], scales[:, 0], valid, runs, width, None)
    for r in range(1, codes.shape[1]):
        _decode(codes[:, r], scales[:, r], valid, runs, width, total)
    return total.mul_(1.0 / codes.shape[1])


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.quantize_feedback`."""
    if _too_wide(runs) or scale_dtype(x) != error_scales.dtype:
        return NotImplemented
    if x.dtype != error_scales.dtype:
        parts = quantize, dequantize
        return half_feedback.quantize_feedback(*parts, x, error, error_scales, beta, valid, runs, width)
    codes, kept = _codes_like(x), _codes_like(x)
    scales, kept_scales = (torch.ones(valid.shape, dtype=x.dtype, device="cpu") for _ in range(2))
    for tile in tiles(valid, runs):
        e = tile.of(error).to(x.dtype).mul_(tile.scales(error_scales))
        h = tile.clear(tile.of(x) + tile.clear(e))
        found, factor = _quantize(h, width)
        tile.of(codes).copy_(found)
        tile.scales(scales)[:] = factor
        lost = h.sub_(found.mul_(factor))
        found, tile.scales(kept_scales)[:] = _quantize(e.mul_(beta).add_(lost.mul_(1.0 - beta)), 8)
        tile.of(kept).copy_(found)
    return (_pair(codes) if width == 4 else codes), scales, kept, kept_scales


def _too_wide(runs: Sequence[int]) -> bool:
    """Return whether a segment, which has one scale, is in several tiles."""
    return any(width > TILE for width in runs[1::2])


def _codes_like(x: Tensor) -> Tensor:
    return memory_pool.empty(x.shape, torch.int8, x.device)


def _quantize(part: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the codes of a part (rows, segments, width) as whole numbers in its dtype, and what decodes them."""
    top = 2.0 ** (width - 1)
    peak = part.abs().amax(-1, keepdim=True)
    scale = torch.full_like(peak, top).div_(peak)
    scale.masked_fill_(scale == float("inf"), 1.0)
    code = (part * scale).round_().clamp_(-top, top - 1)
    if not peak.isfinite().all():
        code.nan_to_num_(0.0)
    return code, 1.0 / scale


def _decode(
    codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int, total: Tensor | None
) -> Tensor:
    """Return what codes (R, ...) mean, or add it to a total."""
    shape = codes.shape[0], row_length(runs)
    found = memory_pool.empty(shape, scales.dtype, scales.device) if total is None else total
    numbers = _numbers(codes, scales.dtype) if width == 4 else codes
    for tile in tiles(valid, runs):
        part = tile.clear(tile.of(numbers).to(scales.dtype) * tile.scales(scales))
        tile.of(found).copy_(part) if total is None else tile.of(found).add_(part)
    return found


def _pair(codes: Tensor) -> Tensor:
    """Return codes of 4 bits (R, n) int8, n even, two to a byte; the even one in the high half."""
    pairs = codes.view(-1).view(torch.int16)  # the even one is the low byte
    return ((pairs & 15) << 4 | pairs >> 8 & 15).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def _numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes with two codes each stand for: (R, n)."""
    found = memory_pool.empty((codes.shape[0], 2 * codes.shape[1]), dtype, codes.device)
    torch.index_select(_table(dtype), 0, codes.reshape(-1).int(), out=found.view(-1, 2))
    return found


@cached_plan
def _table(dtype: torch.dtype) -> Tensor:
    """Return the two numbers that each byte stands for: (256, 2)."""
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    pairs = torch.stack([byte >> 4, byte & 15], 1)
    return ((pairs ^ 8) - 8).to(dtype)


KERNELS = {f.__name__: f for f in (quantize, dequantize, dequantize_mean, quantize_feedback)}
