"""The sign kernels in plain torch.

All kernels are row-wise: a row is one rank's, or one message's, and never looks at another row. That is what
lets a batch of simulated ranks be folded into the rows. For segments, `runs` and `valid` see `layout`.

Bits are little-endian, 1 means x >= 0 (also -0.0), the tail of the last byte is padded with 0 (minus one).

Shapes: R rows, n elements of a row, S segments of a row, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.kernels import rules
from fn.kernels.reference.layout import (
    padding_mask,
    per_segment,
    row_length,
    scale_dtype,
    spread,
)


def pack_bits(x: Tensor) -> Tensor:
    """Pack the signs of x (R, n) into (R, ceil(n / 8)) uint8."""
    bits = F.pad((x >= 0).to(torch.uint8), (0, -x.shape[-1] % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    packed: Tensor = (bits.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return +1 and -1 in `dtype` for the first n bits of each row of bits (R, ceil(n / 8)) uint8: (R, n)."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    ones = (bits.unsqueeze(-1) & weights).ne(0).flatten(-2)[..., :n]
    return ones.to(dtype) * 2 - 1


def sum_of_squares(b: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the sum of squares of every segment of b (R, n), taken in float64: (R, S) float64.

    A float32 sum over 2**24 elements is off by 7e-4. Kernels add in another order, and may begin in float32: scales
    agree to their last bit.
    """
    sums = per_segment(b, runs, lambda p, first, end: p.double().square().sum(-1))
    return torch.cat([*sums, b.new_empty((b.shape[0], 0), dtype=torch.float64)], -1)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the sign bits of x (R, n), and the sum of squares of each segment.

    Args: x (R, n) floating; valid (R, S) int64; runs.
    Returns: bits (R, ceil(n / 8)) uint8 with padding as minus one; sums (R, S) float64.
    """
    real = padding_mask(x, valid, runs)
    x = x.to(scale_dtype(x))
    bits = torch.ops.fn.pack_bits(torch.where(real, x, -1.0))
    return bits, sum_of_squares(torch.where(real, x, 0.0), runs)


def sign_encode_feedback(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Add what was not delivered to x (R, n), and encode: b = x + (buffer - sent * sgn(buffer)).

    Args: x (R, n) floating; buffer (R, n) the last b, sent (R, S) the scales it was sent with, both float32 or
        float64 (an error itself is a buffer that was sent with scale 0); valid (R, S) int64; runs.
    Returns: b (R, n); bits and sums of b as `sign_encode`.
    """
    b = x + sign_residual(buffer, sent, valid, runs)
    return (b, *sign_encode(b, valid, runs))


def sign_encode_feedback_(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Do what `sign_encode_feedback` does, and write b over x.

    Args: x (R, n) in the dtype of the buffer; the rest as there.
    Returns: bits and sums of b.
    """
    b, bits, sums = sign_encode_feedback(x, buffer, sent, valid, runs)
    x.copy_(b)
    return bits, sums


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """Return b - scale * sgn(b), and b itself in the padding.

    Args: b (R, n); scales (R, S) of the same dtype, float32 or float64; valid (R, S) int64; runs.
    Returns: (R, n).
    """
    return torch.where(padding_mask(b, valid, runs), rules.residual(b, spread(scales, runs), 0.0), b)


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> None:
    """Do what `sign_residual` does, in place."""
    b.copy_(sign_residual(b, scales, valid, runs))


def sign_serve(
    bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Do all that a server does: the mean of W messages, feedback, encode.

    Args: bits (R, W, ceil(n / 8)), scales (R, W, S) as `sign_decode_mean`; the rest as `sign_encode_feedback`.
    Returns: as `sign_encode_feedback`.
    """
    return sign_encode_feedback(sign_decode_mean(bits, scales, valid, runs), buffer, sent, valid, runs)


def sign_decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """Return scale * sign for every element, and zero in the padding.

    Args: bits (R, ceil(n / 8)) uint8; scales (R, S) float32 or float64; valid (R, S) int64; runs.
    Returns: (R, n) in the dtype of the scales.
    """
    decoded = torch.ops.fn.unpack_bits(bits, row_length(runs), scales.dtype) * spread(scales, runs)
    return torch.where(padding_mask(decoded, valid, runs), decoded, 0.0)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the mean of W decoded messages, added in rank order, each scale divided by W first.

    Args: bits (R, W, ceil(n / 8)) uint8; scales (R, W, S); valid (R, S) int64; runs.
    Returns: (R, n) in the dtype of the scales.
    """
    ranks = bits.shape[1]
    scales = scales * (1.0 / ranks)
    total = sign_decode(bits[:, 0], scales[:, 0], valid, runs)
    for r in range(1, ranks):
        total = total + sign_decode(bits[:, r], scales[:, r], valid, runs)
    return total


