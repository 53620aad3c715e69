"""The integer kernels in plain torch: blocks of numbers as small integers times one scale.

    M = max |x|,   scale = 2**(width - 1) / M  (1 where that overflows),   code = clamp(round half even(x * scale)),
    decoded = code * (1 / scale)

The largest positive element comes back as 7/8 of itself in 4 bits, and as 127/128 in 8; the largest negative one is
exact. Codes of 4 bits lie two to a byte, the even element in the high half. Segments, `runs` and `valid` are as in
`reference`; padding is coded as zero.

Shapes: R rows, n elements of a row, S segments of a row, W ranks; codes (R, n / 2) uint8 for a width of 4, (R, n)
int8 for 8.

Paper: Dettmers et al., 8-bit Optimizers (arXiv 2110.02861), for the blocks; Wang et al., ZeRO++ (arXiv 2306.10209),
    section 4, for what travels; Xie et al., LoCo (arXiv 2407.04480), for errors that are kept in 8 bits.
Differs: the arithmetic is that of DeepSpeed's kernels, in IEEE float32, for every width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn.kernels import rules
from fn.kernels.reference.layout import padding_mask, per_segment, row_length, scale_dtype, spread


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return the codes of x (R, n), and the factor 1 / scale of each segment, which decodes them.

    Args: x (R, n) floating; valid (R, S) int64; runs; width 4 or 8 bits (for 4, n is even).
    Returns: codes; scales (R, S) float32, or float64 for float64.
    """
    x = torch.where(padding_mask(x, valid, runs), x.to(scale_dtype(x)), 0.0)
    peaks = per_segment(x, runs, lambda p, a, b: p.abs().amax(-1) if p.numel() else p.new_zeros(p.shape[:2]))
    peak = torch.cat([*peaks, x[:, :0]], -1)
    top = torch.full_like(peak, 2.0 ** (width - 1))  # number / tensor would round twice
    scale = rules.code_scale(peak, top, 1.0, float("inf"))
    code = (x * spread(scale, runs)).round().clamp(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    code = code.nan_to_num(0.0).to(torch.int8)
    return (_pack_pairs(code) if width == 4 else code), 1.0 / scale


def _pack_pairs(code: Tensor) -> Tensor:
    pairs = code.unflatten(-1, (-1, 2)).to(torch.int32)
    packed: Tensor = ((pairs[..., 0] & 15) << 4 | (pairs[..., 1] & 15)).to(torch.uint8)
    return packed


def _unpack_pairs(codes: Tensor) -> Tensor:
    codes = codes.to(torch.int32)
    pairs = torch.stack([codes >> 4, codes & 15], -1).flatten(-2)
    return ((pairs ^ 8) - 8).to(torch.int8)


def dequantize(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    """Return code * scale for every element, and zero in the padding.

    Args: codes, scales as `quantize` returns them; valid (R, S) int64; runs; width 4 or 8.
    Returns: (R, n) in the dtype of the scales.
    """
    code = _unpack_pairs(codes) if width == 4 else codes
    decoded = code[:, : row_length(runs)].to(scales.dtype) * spread(scales, runs)
    return torch.where(padding_mask(decoded, valid, runs), decoded, 0.0)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    """Return the mean of W decoded messages: their sum in rank order, times 1 / W.

    Args: codes (R, W, ...), scales (R, W, S) as `quantize` returns them; valid (R, S) int64; runs; width 4 or 8.
    Returns: (R, n) in the dtype of the scales.
    """
    ranks = codes.shape[1]
    total = dequantize(codes[:, 0], scales[:, 0], valid, runs, width)
    for r in range(1, ranks):
        total = total + dequantize(codes[:, r], scales[:, r], valid, runs, width)
    return total * (1.0 / ranks)


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add an error that is kept in 8 bits to x (R, n), quantise, and keep a moving average of what was lost.

        h = x + e,   q = Q(h),   e <- Q_8(beta e + (1 - beta) (h - D(q)))

    Args: x (R, n) floating; error (R, n) int8 and error_scales (R, S), as `quantize` returns them for 8 bits;
        beta; valid (R, S) int64; runs; width 4 or 8 bits of q.
    Returns: codes and scales of h; codes and scales of the next error. h, D(q) and the next error are rounded to the
        dtype of x, as they would be if they were stored.
    """
    e = dequantize(error, error_scales, valid, runs, 8).to(x.dtype)
    h = x + e
    codes, scales = quantize(h, valid, runs, width)
    lost = h.to(scales.dtype) - dequantize(codes, scales, valid, runs, width).to(x.dtype).to(scales.dtype)
    kept: Tensor = rules.damped(e.to(scales.dtype), lost, beta, 1.0 - beta)
    return (codes, scales, *quantize(kept.to(x.dtype), valid, runs, 8))
