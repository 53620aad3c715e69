"""Codes of vectors that travel: sign bits, integers, and floating numbers of 8 bits.

Shapes: R rows, n elements of a row, S segments of a row, B of them or of their blocks, W ranks. `layout` describes
segments, `runs`, `valid` and `block`.

Sign bits are little-endian: 1 means x >= 0 (also -0.0). The end of the last byte is padded with 0, which is minus one.

Integer codes are quantized values, blocks of numbers as small integers times one scale:

    M = max |x|,   scale = 2**(width - 1) / M  (1 where that overflows),   code = clamp(round half even(x * scale)),
    decoded = code * (1 / scale)

The largest positive element comes back as 7/8 of itself in 4 bits, and as 127/128 in 8. The largest negative one is
exact. Codes of 4 bits lie two to a byte, the even element in the high half: (R, n / 2) uint8. Codes of 8 bits are
(R, n) int8. Padding is coded as zero.

Floating codes are the same with 8-bit floating numbers in place of integers, a sign, an exponent and 2 or 3 bits of
mantissa: torch's float8_e5m2 and float8_e4m3fn, whose largest number is 57344 or 448:

    scale = largest / M,   code = x * scale rounded half to even,   decoded = code * (1 / scale)

They are (R, n) uint8. A code is never NaN or infinite: in a block that has a NaN or an Inf all are zero, and its scale
makes NaN of them.

Paper: Dettmers et al., 8-bit Optimizers (arXiv 2110.02861), for the blocks; Wang et al., ZeRO++ (arXiv 2306.10209),
    section 4, for what travels; Xie et al., LoCo (arXiv 2407.04480), for errors that are kept in 8 bits.
Differs: the arithmetic is that of DeepSpeed's kernels, in IEEE float32, for every width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.kernels import rules
from fn.kernels.layout import blocks_of, padding_mask, per_run, row_length, scale_dtype, spread

# signs


def pack_bits(x: Tensor) -> Tensor:
    """Pack the signs of x (R, n) into (R, ceil(n / 8)) uint8."""
    bits = F.pad((x >= 0).to(torch.uint8), (0, -x.shape[-1] % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    # (R, 8 bytes) -> (R, bytes, 8) -> (R, bytes); without a dtype the sum would be int64
    packed: Tensor = (bits.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return +1 and -1 in `dtype` for the first n bits of each row of bits (R, ceil(n / 8)) uint8: (R, n)."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    # (R, bytes) -> (R, bytes, 1) & (8,) -> (R, bytes, 8) -> (R, n)
    ones = (bits.unsqueeze(-1) & weights).ne(0).flatten(-2)[..., :n]
    return ones.to(dtype) * 2 - 1


def sum_of_squares(b: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the sum of squares of every segment of b (R, n), taken in float64: (R, S) float64.

    A float32 sum over 2**24 elements is off by 7e-4. Kernels add in another order, and may begin in float32: scales
    agree to their last bit.
    """
    # (R, count, width) of each run -> (R, count)
    sums = per_run(b, runs, lambda p, first, end: p.double().square().sum(-1))
    # (R, count) of each run -> (R, S); `cat` refuses an empty list, which no runs would give
    return torch.cat([*sums, b.new_empty((b.shape[0], 0), dtype=torch.float64)], -1)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    """Return the sign bits of x (R, n), and the sum of squares of each block or segment.

    Args: x (R, n) floating; valid (R, S) int64; runs; block.
    Returns: bits (R, ceil(n / 8)) uint8 with padding as minus one; sums (R, B) float64.
    """
    valid, runs = blocks_of(valid, runs, block)
    real = padding_mask(x, valid, runs)
    x = x.to(scale_dtype(x))
    bits = torch.ops.fn.pack_bits(torch.where(real, x, -1.0))
    return bits, sum_of_squares(torch.where(real, x, 0.0), runs)


def sign_encode_feedback(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the residual error to x (R, n), and encode: b = x + (buffer - sent * sgn(buffer)).

    Args: x (R, n) floating; buffer (R, n) the last b, sent (R, B) the scales it was sent with, both float32 or
        float64 (an error itself is a buffer that was sent with scale 0); valid (R, S) int64; runs; block.
    Returns: b (R, n); bits and sums of b as `sign_encode`.
    """
    b = x + sign_residual(buffer, sent, valid, runs, block)
    return (b, *sign_encode(b, valid, runs, block))


def sign_encode_feedback_(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> tuple[Tensor, Tensor]:
    """Do what `sign_encode_feedback` does, and write b over x.

    Args: x (R, n) in the dtype of the buffer; the rest as there.
    Returns: bits and sums of b.
    """
    b, bits, sums = sign_encode_feedback(x, buffer, sent, valid, runs, block)
    x.copy_(b)
    return bits, sums


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Tensor:
    """Return b - scale * sgn(b), the residual error of a message, and b itself in the padding.

    Args: b (R, n); scales (R, B) of the same dtype, float32 or float64; valid (R, S) int64; runs; block.
    Returns: (R, n).
    """
    valid, runs = blocks_of(valid, runs, block)
    return torch.where(padding_mask(b, valid, runs), rules.residual(b, spread(scales, runs), 0.0), b)


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> None:
    """Do what `sign_residual` does, in place."""
    b.copy_(sign_residual(b, scales, valid, runs, block))


def sign_serve(
    bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do all that a server does, the rank which reduces a shard: the mean of W messages, feedback, encode.

    Args: bits (R, W, ceil(n / 8)), scales (R, W, B) as `sign_decode_mean`; the rest as `sign_encode_feedback`.
    Returns: as `sign_encode_feedback`.
    """
    return sign_encode_feedback(sign_decode_mean(bits, scales, valid, runs, block), buffer, sent, valid, runs, block)


def _of_signs(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """Return scale * sign for every element (R, n), and zero in the padding."""
    # (R, n) * (R, S) -> (R, n)
    decoded = torch.ops.fn.unpack_bits(bits, row_length(runs), scales.dtype) * spread(scales, runs)
    return torch.where(padding_mask(decoded, valid, runs), decoded, 0.0)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], block: int) -> Tensor:
    """Return the mean of W decoded messages, added in rank order, each scale divided by W first.

    Args: bits (R, W, ceil(n / 8)) uint8; scales (R, W, B); valid (R, S) int64; runs; block.
    Returns: (R, n) in the dtype of the scales.
    """
    valid, runs = blocks_of(valid, runs, block)
    ranks = bits.shape[1]
    scales = scales * (1.0 / ranks)
    # (R, W, bytes) -> (R, bytes) of each rank; added in their order, so that all ranks get the same bits
    total = _of_signs(bits[:, 0], scales[:, 0], valid, runs)
    for r in range(1, ranks):
        total = total + _of_signs(bits[:, r], scales[:, r], valid, runs)
    return total


# integers


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return the codes, or quantized values, of x (R, n), and the factor 1 / scale of each segment, which decodes them.

    Args: x (R, n) floating; valid (R, S) int64; runs; width 4 or 8 bits (for 4, n is even).
    Returns: codes; scales (R, S) float32, or float64 for float64.
    """
    x = torch.where(padding_mask(x, valid, runs), x.to(scale_dtype(x)), 0.0)
    scale = _code_scales(x, 2.0 ** (width - 1), runs)
    code = (x * spread(scale, runs)).round().clamp(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    # What a NaN becomes as an integer differs between devices. The scale makes NaN of the whole segment.
    code = code.nan_to_num(0.0).to(torch.int8)
    return (_pack_pairs(code) if width == 4 else code), 1.0 / scale


def _code_scales(x: Tensor, largest: float, runs: Sequence[int]) -> Tensor:
    """Return what the numbers of each segment are multiplied by, so that the largest becomes `largest`."""
    # (R, count, width) of each run -> (R, count); `amax` refuses a dimension without elements
    peaks = per_run(x, runs, lambda p, a, b: p.abs().amax(-1) if p.numel() else p.new_zeros(p.shape[:2]))
    # (R, count) of each run -> (R, S)
    peak = torch.cat([*peaks, x[:, :0]], -1)
    top = torch.full_like(peak, largest)  # number / tensor would round twice
    scale: Tensor = rules.code_scale(peak, top, 1.0, float("inf"))
    return scale


def _pack_pairs(code: Tensor) -> Tensor:
    # (R, n) -> (R, n / 2, 2); in int8 the shift would overflow
    pairs = code.unflatten(-1, (-1, 2)).to(torch.int32)
    packed: Tensor = ((pairs[..., 0] & 15) << 4 | (pairs[..., 1] & 15)).to(torch.uint8)
    return packed


def _unpack_pairs(codes: Tensor) -> Tensor:
    codes = codes.to(torch.int32)
    # (R, n / 2) twice -> (R, n / 2, 2) -> (R, n)
    pairs = torch.stack([codes >> 4, codes & 15], -1).flatten(-2)
    # 0 .. 15 -> -8 .. 7: the sign of 4 bits
    return ((pairs ^ 8) - 8).to(torch.int8)


def _of_integers(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    """Return code * scale for every element (R, n), and zero in the padding."""
    code = _unpack_pairs(codes) if width == 4 else codes
    decoded = code[:, : row_length(runs)].to(scales.dtype) * spread(scales, runs)
    return torch.where(padding_mask(decoded, valid, runs), decoded, 0.0)


def dequantize_mean(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    """Return the mean of W decoded messages: their sum in rank order, times 1 / W.

    Args: codes (R, W, ...), scales (R, W, S) as `quantize` returns them; valid (R, S) int64; runs; width 4 or 8.
    Returns: (R, n) in the dtype of the scales.
    """
    ranks = codes.shape[1]
    # (R, W, ...) -> (R, n) of each rank
    total = _of_integers(codes[:, 0], scales[:, 0], valid, runs, width)
    for r in range(1, ranks):
        total = total + _of_integers(codes[:, r], scales[:, r], valid, runs, width)
    return total * (1.0 / ranks)


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a residual error that is kept in 8 bits to x (R, n), quantize, and keep a moving average of what was lost.

        h = x + e,   q = Q(h),   e <- Q_8(beta e + (1 - beta) (h - D(q)))

    Args: x (R, n) floating; error (R, n) int8 and error_scales (R, S), as `quantize` returns them for 8 bits;
        beta; valid (R, S) int64; runs; width 4 or 8 bits of q.
    Returns: codes and scales of h; codes and scales of the next error. h, D(q) and the next error are rounded to the
        dtype of x, as they would be if they were stored.
    """
    e = _of_integers(error, error_scales, valid, runs, 8).to(x.dtype)
    h = x + e
    codes, scales = quantize(h, valid, runs, width)
    lost = h.to(scales.dtype) - _of_integers(codes, scales, valid, runs, width).to(x.dtype).to(scales.dtype)
    kept: Tensor = rules.damped(e.to(scales.dtype), lost, beta, 1.0 - beta)
    return (codes, scales, *quantize(kept.to(x.dtype), valid, runs, 8))


# floating numbers of 8 bits

FP8 = {2: torch.float8_e5m2, 3: torch.float8_e4m3fn}
"""The formats, by the bits of their mantissa."""


def quantize_fp8(x: Tensor, valid: Tensor, runs: Sequence[int], mantissa: int) -> tuple[Tensor, Tensor]:
    """Return x (R, n) as 8-bit floating numbers, and the factor 1 / scale of each segment, which decodes them.

    Args: x (R, n) floating; valid (R, S) int64; runs; mantissa 3 bits for e4m3, 2 for e5m2.
    Returns: codes (R, n) uint8; scales (R, S) float32, or float64 for float64.
    """
    x = torch.where(padding_mask(x, valid, runs), x.to(scale_dtype(x)), 0.0)
    scale = _code_scales(x, torch.finfo(FP8[mantissa]).max, runs)
    factor = spread(scale, runs)
    code = torch.where(factor > 0, x * factor, 0.0).float().to(FP8[mantissa])  # no block with a NaN or an Inf has one
    return code.view(torch.uint8), 1.0 / scale


def dequantize_fp8(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], mantissa: int) -> Tensor:
    """Return the mean of W decoded messages: the sum of code * scale in rank order, times 1 / W. Padding is zero.

    Args: codes (R, W, n), scales (R, W, S) as `quantize_fp8` returns them; valid (R, S) int64; runs; mantissa.
    Returns: (R, n) in the dtype of the scales.
    """

    def decoded(rank: int) -> Tensor:
        # (R, W, n) -> (R, n)
        return codes[:, rank].view(FP8[mantissa]).to(scales.dtype) * spread(scales[:, rank], runs)

    ranks, total = codes.shape[1], decoded(0)
    for rank in range(1, ranks):
        total = total + decoded(rank)
    return torch.where(padding_mask(total, valid, runs), total * (1.0 / ranks), 0.0)
