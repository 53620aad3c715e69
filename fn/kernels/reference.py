"""The specification: what every kernel means, in plain torch. Every other row of the table is held against it.

All kernels but those on lists are row-wise: a row is one rank's, or one message's, and no kernel looks from one row at
another. That is what lets a batch of simulated ranks be folded into the rows. `layout` describes segments, `runs` and
`valid`.

Shapes: R rows, n elements of a row, S segments of a row, W ranks.

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

Kernels on lists take an optimizer's step in place. They work on lists of S tensors, a list per role, and write into
params and moments. The pure updates of `transforms` say the same thing without writing; adapters, which own their
buffers, run these.

Paper: Dettmers et al., 8-bit Optimizers (arXiv 2110.02861), for the blocks; Wang et al., ZeRO++ (arXiv 2306.10209),
    section 4, for what travels; Xie et al., LoCo (arXiv 2407.04480), for errors that are kept in 8 bits.
Differs: the arithmetic is that of DeepSpeed's kernels, in IEEE float32, for every width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.errors import expected
from fn.kernels import rules
from fn.kernels.layout import padding_mask, per_run, row_length, rows_of, scale_dtype, spread, tensors_of
from fn.kernels.schemas import SCHEMAS

# signs


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
    sums = per_run(b, runs, lambda p, first, end: p.double().square().sum(-1))
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
    """Add the residual error to x (R, n), and encode: b = x + (buffer - sent * sgn(buffer)).

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
    """Return b - scale * sgn(b), the residual error of a message, and b itself in the padding.

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
    """Do all that a server does, the rank which reduces a shard: the mean of W messages, feedback, encode.

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


# integers


def quantize(x: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return the codes, or quantized values, of x (R, n), and the factor 1 / scale of each segment, which decodes them.

    Args: x (R, n) floating; valid (R, S) int64; runs; width 4 or 8 bits (for 4, n is even).
    Returns: codes; scales (R, S) float32, or float64 for float64.
    """
    x = torch.where(padding_mask(x, valid, runs), x.to(scale_dtype(x)), 0.0)
    scale = _code_scales(x, 2.0 ** (width - 1), runs)
    code = (x * spread(scale, runs)).round().clamp(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    code = code.nan_to_num(0.0).to(torch.int8)
    return (_pack_pairs(code) if width == 4 else code), 1.0 / scale


def _code_scales(x: Tensor, largest: float, runs: Sequence[int]) -> Tensor:
    """Return what the numbers of each segment are multiplied by, so that the largest becomes `largest`."""
    peaks = per_run(x, runs, lambda p, a, b: p.abs().amax(-1) if p.numel() else p.new_zeros(p.shape[:2]))
    peak = torch.cat([*peaks, x[:, :0]], -1)
    top = torch.full_like(peak, largest)  # number / tensor would round twice
    scale: Tensor = rules.code_scale(peak, top, 1.0, float("inf"))
    return scale


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
    """Add a residual error that is kept in 8 bits to x (R, n), quantize, and keep a moving average of what was lost.

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
        return codes[:, rank].view(FP8[mantissa]).to(scales.dtype) * spread(scales[:, rank], runs)

    ranks, total = codes.shape[1], decoded(0)
    for rank in range(1, ranks):
        total = total + decoded(rank)
    return torch.where(padding_mask(total, valid, runs), total * (1.0 / ranks), 0.0)


# Adam and 1-bit Adam. In the rows (R, n) of a message, segment s of row r is piece r of tensor s, see `layout`


def direction(x: Tensor, nu: Tensor, eps: float, max_step: float) -> tuple[Tensor, Tensor]:
    """Return a momentum, zero where its second moment is zero, and the direction that Adam takes from it.

    Args: x (R, n) the momentum; nu (R, n) the second moment, of the same dtype; eps; max_step: what the direction is
        `clamped` to.
    Returns: kept (R, n) and kept / (sqrt(nu) + eps) (R, n). Where nu is zero and x is not finite, kept is NaN.
    """
    kept = rules.kept_at_zero(x, nu, x - x, 0.0)
    return kept, clamped(over_root(kept, nu, eps), max_step)


def over_root(x: Tensor, nu: Tensor, eps: float) -> Tensor:
    """Return x / (sqrt(nu) + eps); 0 where that divides by zero, so that what never had a gradient does not move.

    It divides by zero where eps is 0, or rounds to it. Kernels have no such case: they only get an eps that is normal.
    """
    below: Tensor = rules.denominator(nu, eps)
    if is_normal(eps, below.dtype):
        return x / below
    return torch.where(below == 0, x - x, x / below.masked_fill(below == 0, 1.0))


def clamped(u: Tensor, max_step: float) -> Tensor:
    """Return a direction within +-max_step, NaN where it is not finite; as it is if max_step is infinite."""
    if max_step == math.inf:
        return u
    within: Tensor = rules.clamped(u, max_step)
    return within


def is_normal(eps: float, dtype: torch.dtype) -> bool:
    """Return whether an eps keeps all of its digits in a dtype."""
    return eps >= torch.finfo(dtype).tiny


def momentum_encode(
    mu: Sequence[Tensor],
    grads: Sequence[Tensor],
    decay: float,
    buffer: Tensor,
    sent: Tensor,
    valid: Tensor,
    runs: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode with feedback the moving average decay * mu + (1 - decay) * grad of every tensor.

    Args: mu, grads: S tensors each; decay; the rest, and the results, as for `reference.sign_encode_feedback`.
    """
    averages = momentum_rows(mu, grads, decay, None, buffer.shape[0], runs)
    return sign_encode_feedback(averages, buffer, sent, valid, runs)


def momentum_recode(
    bits: Tensor,
    seen: Tensor,
    scales: Tensor,
    grads: Sequence[Tensor],
    decay: float,
    buffer: Tensor,
    sent: Tensor,
    valid: Tensor,
    runs: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `momentum_encode` does for a momentum that is kept as codes, see `momentum_of_codes`.

    Args: bits, seen, scales: as there; grads: S tensors; the rest, and the results, as for `momentum_encode`.
    """
    mu = tensors_of(momentum_of_codes(bits, seen, scales, valid, runs), grads, runs)
    return momentum_encode(mu, grads, decay, buffer, sent, valid, runs)


def momentum_of_codes(bits: Tensor, seen: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """Return scale * sign where a second bit is 1, and zero elsewhere, as rows (R, n).

    Args: bits, seen (R, ceil(n / 8)) uint8: signs, and whether the second moment is above zero; scales (R, S); valid,
        runs: as for `sign_decode`.
    """
    above = torch.ops.fn.sign_decode(seen, torch.ones_like(scales), valid, runs)
    rows: Tensor = rules.kept_at_zero(torch.ops.fn.sign_decode(bits, scales, valid, runs), above, 0.0, 0.0)
    return rows


def momentum_rows(
    mu: Sequence[Tensor],
    grads: Sequence[Tensor],
    decay: float,
    factors: Tensor | None,
    rows: int,
    runs: Sequence[int],
) -> Tensor:
    """Return the moving average decay * mu + (1 - decay) * grad of every tensor as rows (R, n).

    Args: mu, grads: S tensors each; decay; factors: (S,), what the averages are multiplied by; rows: R; runs.
    """
    averages = [rules.lerp(g.to(m.dtype), m, decay) for m, g in zip(mu, grads, strict=True)]
    if factors is not None:
        averages = [x * factor for x, factor in zip(averages, factors.unbind(), strict=True)]
    return rows_of(averages, rows, runs)


def drift(
    params: Sequence[Tensor],
    anchors: Sequence[Tensor],
    mu: Sequence[Tensor],
    grads: Sequence[Tensor],
    nu: Sequence[Tensor],
    decay: float,
    eps: float,
    lr: float,
    rows: int,
    runs: Sequence[int],
) -> Tensor:
    """Return how far every tensor is from its anchor after one more local step of 0/1 Adam, as rows (R, n).

        m = decay mu + (1 - decay) grad, 0 where nu = 0       x = (p - anchor) (sqrt(nu) + eps) - lr m

    Args: params, anchors, mu, grads, nu: S tensors each; decay, eps, lr; rows: R; runs.
    """
    drifts = []
    for p, a, m, g, v in zip(params, anchors, mu, grads, nu, strict=True):
        m = rules.kept_at_zero(rules.lerp(g.to(m.dtype), m, decay), v, 0.0, 0.0)
        drifts.append(rules.drift(p.to(m.dtype), a, m, v, eps, lr))
    return rows_of(drifts, rows, runs)


def onebit_adam_(
    params: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    bits: Tensor,
    scales: Tensor,
    valid: Tensor,
    runs: Sequence[int],
    eps: float,
    weight_decay: float,
    lr: float,
    mu_weight: float,
    nu_weight: float,
    max_step: float,
    max_momentum: float,
    keep_zeros: bool,
    copies: Sequence[Tensor],
) -> None:
    """Take the step of 1-bit Adam's compressed phase from the momentum of W messages, their mean.

        mu <- held(mean_r D(codes_r)), 0 where nu = 0
        p <- p - lr (clamp((mu / w_mu) / (sqrt(nu / w_nu) + eps)) + weight_decay p)

    Args: params, mu, nu: S tensors each; params and mu are written. mu may be (), where it is kept as codes.
        bits (R, W, ceil(n / 8)), scales (R, W, S), valid, runs: as for `reference.sign_decode_mean`; W is 1 for codes
        of the mean. mu_weight, nu_weight: w_mu, w_nu, 1 for no bias correction. max_step: the direction is `clamped` to
        it. max_momentum: the momentum is `held` where its direction, without bias correction, is within it. Infinity
        for none of each. keep_zeros: without it, mu is not masked. copies: S tensors into which the new params are
        copied, or none.
    """
    means = tensors_of(sign_decode_mean(bits, scales, valid, runs), params, runs)
    for p, m, v, x in zip(params, mu or [*map(torch.empty_like, nu)], nu, means, strict=True):
        m.copy_(rules.held(rules.kept_at_zero(x, v, 0.0, 0.0) if keep_zeros else x, v, eps, max_momentum))
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    for copy, p in zip(copies, params, strict=bool(copies)):
        copy.copy_(p)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    lr: float,
    mu_weight: float,
    nu_weight: float,
    max_step: float,
    max_momentum: float,
    frozen: bool,
) -> None:
    """Take AdamW's step.

        mu <- b1 mu + (1 - b1) g          nu <- b2 nu + (1 - b2) g^2          p as for `onebit_adam_`

    Args: params, grads, mu, nu: as many tensors each; all but grads are written. mu_weight, nu_weight: those after
        this step, 1 for no bias correction. max_step: as for `onebit_adam_`. frozen: nu rests, mu stays 0 where nu
        is, and max_momentum is as for `onebit_adam_`; nothing is held otherwise.

    A kernel may write zero for a momentum below the smallest normal number, 2**-126 in float32. Where gradients stay
    zero, rounding would keep it at a few of the smallest numbers there are. Some processors are slow with those.
    """
    for p, g, m, v in zip(params, grads, mu, nu, strict=True):
        g = g.to(m.dtype)
        m.copy_(rules.lerp(g, m, b1))
        if frozen:
            m.copy_(rules.held(rules.kept_at_zero(m, v, 0.0, 0.0), v, eps, max_momentum))
        else:
            v.copy_(rules.second_moment(v, g, b2, 1 - b2))
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight, max_step)


def largest_magnitude(grads: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of all elements, 0-d; NaN where one of them is.

    Args: grads: tensors of one dtype. Raises: ValueError if there is none.
    """
    if not grads:
        raise ValueError("grads: expected at least one tensor, but got none")
    return torch.stack([x.abs().amax() if x.numel() else x.new_zeros(()) for x in grads]).amax()


def adamw_into_(
    new: Sequence[Tensor],
    rows: Sequence[Tensor],
    old: Sequence[Tensor],
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    lr: float,
    mu_weight: float,
    nu_weight: float,
    max_step: float,
    frozen: bool,
) -> Tensor:
    """Take AdamW's step with the mean of several gradients, and write it elsewhere.

    Args: new: param, mu and nu after the step, which are written; no nu where it is frozen. rows: gradients, added in
        their order. old: param, mu and nu, which stay as they are. The rest as for `adamw_`, of whose tensors these are
        one each.
    Returns: (2,), the largest magnitudes of the mean gradient and of the new param; NaN where one of them is.
    """
    mean = sum(rows[1:], start=rows[0]) * (1.0 / len(rows))
    for to, x in zip(new, old, strict=not frozen):
        to.copy_(x)
    p, mu, nu = new[:1], new[1:2], old[2:] if frozen else new[2:]
    adamw_(p, [mean], mu, nu, b1, b2, eps, weight_decay, lr, mu_weight, nu_weight, max_step, math.inf, frozen)
    return torch.stack([x.to(mean.dtype).abs().amax() if x.numel() else mean.new_zeros(()) for x in (mean, new[0])])


def _descend(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    eps: float,
    weight_decay: float,
    lr: float,
    mu_weight: float,
    nu_weight: float,
    max_step: float,
) -> None:
    u = clamped(over_root(m / mu_weight, v / nu_weight, eps), max_step)
    p.copy_(rules.descended(p.to(u.dtype), u, weight_decay, lr))


# LAMB and 1-bit LAMB: a step is scaled by sums over a tensor, so that it is two kernels, one for the moments and sums,
# one for the params


def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    """Move Adam's moments, and return the sums of squares that LAMB's trust ratio and 1-bit LAMB's scaling need.

        mu <- b1 mu + (1 - b1) g          nu <- b2 nu + (1 - b2) g^2          u = mu / (sqrt(nu) + eps) + weight_decay p

    Args: params, grads, mu, nu: S tensors each; mu and nu are written.
    Returns: (S, 3) float64, the sums of squares of p, u and mu.

    A kernel may write zero for a momentum below the smallest normal number, as in `adamw_`.
    """
    sums = []
    for p, g, m, v in zip(params, grads, mu, nu, strict=True):
        g = g.to(m.dtype)
        m.copy_(rules.lerp(g, m, b1))
        v.copy_(rules.second_moment(v, g, b2, 1 - b2))
        u = rules.decayed(over_root(m, v, eps), p.to(m.dtype), weight_decay)
        sums.append(torch.stack([_squares(p), _squares(u), _squares(m)]))
    return _table(sums)


def onebit_lamb_moments_(
    params: Sequence[Tensor],
    averages: Sequence[Tensor],
    scaling: Tensor,
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    fresh: Sequence[Tensor],
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    max_step: float,
    keep_zeros: bool,
) -> Tensor:
    """Take the averaged momentum, move the second moment that goes on, and return what 1-bit LAMB's factor needs.

        m = average / scaling, 0 where nu = 0             g = (m - b1 mu) / (1 - b1),   mu <- m
        fresh <- b2 fresh + (1 - b2) g^2        q = clamp(mu / (sqrt(nu) + eps)),    u = q + weight_decay p

    Args: params, averages, mu, nu, fresh: S tensors each; mu and fresh are written. scaling (S,). max_step: q is
        `clamped` to it; infinity for none. keep_zeros: without it, m is not masked.
    Returns: (S, 3) float64: the largest (sqrt(nu) + eps) / (sqrt(fresh) + eps), 0 of a tensor without elements, and
        the sums of squares of q and u.
    """
    sums = []
    for p, x, s, m, v, f in zip(params, averages, scaling.unbind(), mu, nu, fresh, strict=True):
        x = x.to(m.dtype) / s.to(m.dtype)
        x = rules.kept_at_zero(x, v, 0.0, 0.0) if keep_zeros else x
        f.copy_(rules.second_moment(f, rules.implied_gradient(x, m, b1, 1 - b1), b2, 1 - b2))
        m.copy_(x)
        ratios = over_root(rules.denominator(v, eps), f, eps).reshape(-1)
        largest = torch.cat([ratios.new_zeros(1), ratios]).max().double()
        q = clamped(over_root(m, v, eps), max_step)
        u = rules.decayed(q, p.to(m.dtype), weight_decay)
        sums.append(torch.stack([largest, _squares(q), _squares(u)]))
    return _table(sums)


def lamb_step_(
    params: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    rates: Tensor,
    eps: float,
    weight_decay: float,
    max_step: float,
) -> None:
    """Take the step p <- p - rate (clamp(mu / (sqrt(nu) + eps)) + weight_decay p), each tensor at a rate of its own.

    Args: params, mu, nu: S tensors each; params are written. rates (S,). max_step: as for `onebit_lamb_moments_`.
    """
    for p, m, v, rate in zip(params, mu, nu, rates.unbind(), strict=True):
        u = clamped(over_root(m, v, eps), max_step)
        p.copy_(rules.descended(p.to(m.dtype), u, weight_decay, rate.to(m.dtype)))


# any rule, on lists


def elementwise_(
    rule: str,
    results: Sequence[Tensor],
    operands: Sequence[Tensor],
    scalars: Sequence[Tensor],
    places: Sequence[int],
    numbers: Sequence[float],
) -> None:
    """Apply a rule to the tensors of lists, and write what it returns. `lists.elementwise` is how it is called.

    Args: rule: its name in `rules`; it takes lists first, then numbers. results: its K lists of results of S tensors
        each, one list behind the other; they are written, and may be operands. operands: its lists, in the same form,
        of tensors of one shape in each place. numbers: the numbers; scalars (one element, or S) stand in place of those
        at `places`.

    It is calculated in float32, or in the wider of the dtypes, and rounded once, to the dtype of the result.
    """
    wanted = rule_of(rule)
    size = len(results) // RESULTS[rule]
    for s in range(size):
        row = operands[s::size]
        wide = max((scale_dtype(x) for x in row), key=lambda dtype: dtype.itemsize)
        given: list[Any] = [*numbers]
        for place, scalar in zip(places, scalars, strict=True):
            given[place] = scalar.reshape(-1)[s if scalar.numel() > 1 else 0].to(wide)
        found = wanted(*(x.to(wide) for x in row), *given)
        for to, x in zip(results[s::size], found if isinstance(found, tuple) else (found,), strict=True):
            to.copy_(x)


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor, (S,) float64. Args: tensors: S of one dtype."""
    return torch.stack([_squares(x) for x in tensors]) if tensors else torch.zeros(0, dtype=torch.float64, device="cpu")


def rule_of(name: str) -> Callable[..., Any]:
    """Return a rule by name. Raises: ValueError if there is none."""
    if name not in RESULTS:
        raise ValueError(expected("rule", "the name of a function of fn.kernels.rules", f"{name!r}"))
    rule: Callable[..., Any] = vars(rules)[name]
    return rule


RESULTS: dict[str, int] = {
    name: str(rule.__annotations__["return"]).count("Number")
    for name, rule in vars(rules).items()
    if getattr(rule, "__module__", "") == rules.__name__
}
"""How many numbers each rule returns."""


def _table(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros((0, 3), dtype=torch.float64, device="cpu")


def _squares(x: Tensor) -> Tensor:
    return x.double().square().sum()


REFERENCES: dict[str, Callable[..., Any]] = {name: globals()[name] for name in SCHEMAS}
"""What every kernel means, by name."""
