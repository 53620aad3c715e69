"""The kernels that take an optimizer's whole step in place, in plain torch: their specification.

They work on lists of tensors, a list per role, and write into params and moments. The pure updates of
`transforms.moments` say the same thing without writing; adapters, which own their buffers, run these.

A list of tensors and the rows (R, n) of a message: segment s of row r is piece r of tensor s, R equal pieces each,
zeros behind the end of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.kernels import reference


def widths_of(runs: Sequence[int]) -> list[int]:
    """Return the width of every segment."""
    return [width for count, width in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def rows_of(tensors: Sequence[Tensor], rows: int, runs: Sequence[int]) -> Tensor:
    """Return tensors as the rows (R, n) that `runs` describe."""
    pieces = []
    for tensor, width in zip(tensors, widths_of(runs), strict=True):
        flat = tensor.reshape(-1)
        pieces.append(F.pad(flat, (0, rows * width - flat.shape[0])).view(rows, width))
    return torch.cat(pieces, dim=1)


def tensors_of(x: Tensor, like: Sequence[Tensor], runs: Sequence[int]) -> list[Tensor]:
    """Return the rows x (R, n) as tensors of given shapes."""
    pieces = x.split(widths_of(runs), dim=1)
    return [p.reshape(-1)[: t.numel()].view(t.shape) for p, t in zip(pieces, like, strict=True)]


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
    averages = _averages(mu, grads, decay, buffer.shape[0], runs)
    return reference.sign_encode_feedback(averages, buffer, sent, valid, runs)


def momentum_signs(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the bits and sums of what `momentum_encode` returns for an error that is a vector.

    Args: as there; buffer (R, n) the error.
    """
    return reference.sign_encode(_averages(mu, grads, decay, buffer.shape[0], runs) + buffer, valid, runs)


def _averages(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, rows: int, runs: Sequence[int]
) -> Tensor:
    averages = [torch.lerp(g.to(m.dtype), m, decay) for m, g in zip(mu, grads, strict=True)]
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
    found = []
    for p, a, m, g, v in zip(params, anchors, mu, grads, nu, strict=True):
        m = torch.where(v > 0, torch.lerp(g.to(m.dtype), m, decay), 0.0)
        found.append((p.to(m.dtype) - a) * (v.sqrt() + eps) - lr * m)
    return rows_of(found, rows, runs)


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
    keep_zeros: bool,
    copies: Sequence[Tensor],
) -> None:
    """Take the step of 1-bit Adam's compressed phase from the momentum of W messages, their mean.

        mu <- mean_r D(codes_r), 0 where nu = 0
        p <- p - lr ((mu / w_mu) / (sqrt(nu / w_nu) + eps) + weight_decay p)

    Args: params, mu, nu: S tensors each; params and mu are written. bits (R, W, ceil(n / 8)), scales (R, W, S), valid,
        runs: as for `reference.sign_decode_mean`; W is 1 for codes of the mean. mu_weight, nu_weight: w_mu, w_nu, 1
        for no bias correction. keep_zeros: without it, mu is not masked. copies: S tensors into which the new params
        are copied, or none.
    """
    found = tensors_of(reference.sign_decode_mean(bits, scales, valid, runs), params, runs)
    for p, m, v, x in zip(params, mu, nu, found, strict=True):
        m.copy_(torch.where(v > 0, x, 0.0) if keep_zeros else x)
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight)
    for copy, p in zip(copies, params, strict=bool(copies)):
        copy.copy_(p)


def onebit_adam_feedback_(
    params: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    grads: Sequence[Tensor],
    decay: float,
    buffer: Tensor,
    sent: Tensor,
    bits: Tensor,
    scales: Tensor,
    valid: Tensor,
    runs: Sequence[int],
    eps: float,
    weight_decay: float,
    lr: float,
    mu_weight: float,
    nu_weight: float,
    keep_zeros: bool,
) -> None:
    """Take the step of `onebit_adam_`, and write over an error the next one.

        buffer <- b - sent * sgn(b),   b = decay * mu + (1 - decay) * grad + buffer

    Args: grads, decay, buffer (R, n): as `momentum_signs` had them. sent (R, S): the scales that its codes were sent
        with. The rest as there.
    """
    b = _averages(mu, grads, decay, buffer.shape[0], runs) + buffer
    descent = eps, weight_decay, lr, mu_weight, nu_weight
    onebit_adam_(params, mu, nu, bits, scales, valid, runs, *descent, keep_zeros, [])
    buffer.copy_(reference.sign_residual(b, sent, valid, runs))


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
    frozen: bool,
) -> None:
    """Take AdamW's step.

        mu <- b1 mu + (1 - b1) g          nu <- b2 nu + (1 - b2) g^2          p as for `onebit_adam_`

    Args: params, grads, mu, nu: as many tensors each; all but grads are written. mu_weight, nu_weight: those after
        this step, 1 for no bias correction. frozen: nu rests, and mu stays 0 where nu is.

    A kernel may write zero for a momentum below the smallest normal number, 2**-126 in float32. With a gradient of zero
    rounding would keep it at a few of the smallest numbers there are, with which some processors are slow.
    """
    for p, g, m, v in zip(params, grads, mu, nu, strict=True):
        g = g.to(m.dtype)
        m.lerp_(g, 1 - b1)
        if frozen:
            m.masked_fill_(v <= 0, 0.0)
        else:
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight)


def largest_magnitude(grads: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of all elements, 0-d; NaN where one of them is.

    Args: grads: tensors of one dtype. Raises: ValueError if there is none.
    """
    if not grads:
        raise ValueError("grads: is empty; allowed is at least one tensor")
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
) -> Tensor:
    """Take AdamW's step with the mean of several gradients, and write it elsewhere.

    Args: new: param, mu and nu after the step, which are written. rows: gradients, added in their order. old: param,
        mu and nu, which stay as they are. The rest as for `adamw_`, of whose tensors these are one each.
    Returns: (2,), the largest magnitudes of the mean gradient and of the new param; NaN where one of them is.
    """
    mean = sum(rows[1:], start=rows[0]) * (1.0 / len(rows))
    for to, x in zip(new, old, strict=True):
        to.copy_(x)
    p, mu, nu = ([to] for to in new)
    adamw_(p, [mean], mu, nu, b1, b2, eps, weight_decay, lr, mu_weight, nu_weight, False)
    return torch.stack([x.to(mean.dtype).abs().amax() if x.numel() else mean.new_zeros(()) for x in (mean, new[0])])


def _descend(
    p: Tensor, m: Tensor, v: Tensor, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float
) -> None:
    u = reference.over_root(m / mu_weight, v / nu_weight, eps)
    p.copy_(p - lr * (u + weight_decay * p.to(u.dtype)))
