"""Steps of optimizers, on lists of S tensors, a list per role.

Where one takes or returns the rows (R, n) of a message, segment s of row r is piece r of tensor s, see `layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fn.kernels import rules
from fn.kernels.layout import rows_of, tensors_of
from fn.kernels.reference.codes import sign_decode_mean, sign_encode_feedback

# Adam and 1-bit Adam


def over_root(x: Tensor, nu: Tensor, eps: float) -> Tensor:
    """Return x / (sqrt(nu) + eps); 0 where that divides by zero, so that what never had a gradient does not move.

    It divides by zero where eps is 0, or rounds to it. Kernels have no such case: they only get an eps that is normal.
    """
    below: Tensor = rules.denominator(nu, eps)
    if is_normal(eps, below.dtype):
        return x / below
    # x - x is 0, and NaN of what is not finite, so that the step is skipped.
    return torch.where(below == 0, x - x, x / below.masked_fill(below == 0, 1.0))


def clamped(u: Tensor, max_step: float) -> Tensor:
    """Return a direction within +-max_step; as it is if max_step is infinite."""
    if max_step == math.inf:
        return u
    within: Tensor = rules.clamped(u, max_step)
    return within


def is_normal(eps: float, dtype: torch.dtype) -> bool:
    """Return whether an eps keeps all of its digits in a dtype."""
    return eps >= torch.finfo(dtype).tiny


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int], block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Encode with feedback the moving average decay * mu + (1 - decay) * grad of every tensor.

    Args: mu, grads: S tensors each; decay; the rest, and the results, as for `codes.sign_encode_feedback`.
    """
    averages = momentum_rows(mu, grads, decay, None, buffer.shape[0], runs)
    return sign_encode_feedback(averages, buffer, sent, valid, runs, block)


def momentum_rows(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, factors: Tensor | None, rows: int, runs: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the moving average decay * mu + (1 - decay) * grad of every tensor as rows (R, n).

    Args: mu, grads: S tensors each; decay; factors: (S,), what the averages are multiplied by; rows: R; runs.
    """
    averages = [rules.lerp(g.to(m.dtype), m, decay) for m, g in zip(mu, grads, strict=True)]
    if factors is not None:
        averages = [x * factor for x, factor in zip(averages, factors.unbind(), strict=True)]
    return rows_of(averages, rows, runs)


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Tensor:  # fmt: skip
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
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], block: int, eps: float, weight_decay: float, lr: float, max_step: float, keep_zeros: bool,
    copies: Sequence[Tensor],
) -> None:  # fmt: skip
    """Take the step of 1-bit Adam's compressed phase from the momentum of W messages, their mean.

        mu <- mean_r D(codes_r), 0 where nu = 0
        p <- p - lr (clamp(mu / (sqrt(nu) + eps)) + weight_decay p)

    Args: params, mu, nu: S tensors each; params and mu are written. bits (R, W, ceil(n / 8)), scales (R, W, B), valid,
        runs, block: as for `codes.sign_decode_mean`; W is 1 for codes of the mean. max_step: the direction is `clamped`
        to it; infinity for no clamp. keep_zeros: without it, mu is not masked. copies: S tensors into which the new
        params are copied, or none.
    """
    means = tensors_of(sign_decode_mean(bits, scales, valid, runs, block), params, runs)
    for p, m, v, x in zip(params, mu, nu, means, strict=True):
        m.copy_(rules.kept_at_zero(x, v, 0.0, 0.0) if keep_zeros else x)
        _descend(p, m, v, eps, weight_decay, lr, max_step)
    for copy, p in zip(copies, params, strict=bool(copies)):
        copy.copy_(p)


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float, b2: float,
    eps: float, weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> None:  # fmt: skip
    """Take AdamW's step.

        mu <- b1 mu + (1 - b1) g          nu <- b2 nu + (1 - b2) g^2          p as for `onebit_adam_`

    Args: params, grads, mu, nu: as many tensors each; all but grads are written. b1, b2: of this step; moments that are
        stored bias-corrected decay by less in the first ones. max_step: as for `onebit_adam_`. frozen: nu rests, and
        mu stays 0 where nu is.

    A kernel may write zero for a momentum below the smallest normal number, 2**-126 in float32. Where gradients stay
    zero, rounding would keep it at a few of the smallest numbers there are. Some processors are slow with those.
    """
    for p, g, m, v in zip(params, grads, mu, nu, strict=True):
        g = g.to(m.dtype)
        m.copy_(rules.lerp(g, m, b1))
        if frozen:
            m.copy_(rules.kept_at_zero(m, v, 0.0, 0.0))
        else:
            v.copy_(rules.second_moment(v, g, b2, 1 - b2))
        _descend(p, m, v, eps, weight_decay, lr, max_step)


def adamw_into_(
    new: Sequence[Tensor], rows: Sequence[Tensor], old: Sequence[Tensor], b1: float, b2: float, eps: float,
    weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> Tensor:  # fmt: skip
    """Take AdamW's step with the mean of several gradients, and write it elsewhere.

    Args: new: param, mu and nu after the step, which are written; no nu where it is frozen. rows: gradients, added in
        their order. old: param, mu and nu, which stay as they are. The rest as for `adamw_`, of whose tensors these are
        one each.
    Returns: (2,), the largest magnitudes of the mean gradient and of the new param; NaN where one of them is.
    """
    mean = sum(rows[1:], start=rows[0]) * (1.0 / len(rows))
    for to, x in zip(new, old, strict=not frozen):
        to.copy_(x)
    # The second moment that rests is read where it is, and not written: frozen steps do not copy it.
    p, mu, nu = new[:1], new[1:2], old[2:] if frozen else new[2:]
    adamw_(p, [mean], mu, nu, b1, b2, eps, weight_decay, lr, max_step, frozen)
    # 0-d twice -> (2,)
    return torch.stack([x.to(mean.dtype).abs().amax() if x.numel() else mean.new_zeros(()) for x in (mean, new[0])])


def _descend(
    p: Tensor, m: Tensor, v: Tensor, eps: float, weight_decay: float, lr: float | Tensor, max_step: float
) -> None:
    u = clamped(over_root(m, v, eps), max_step)
    p.copy_(rules.descended(p.to(u.dtype), u, weight_decay, lr))


# 1-bit LAMB: a step is scaled by sums over a tensor, so that it is two kernels, one for the moments and sums,
# one for the params


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor], nu: Sequence[Tensor],
    fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float, max_step: float,
) -> Tensor:  # fmt: skip
    """Take the averaged momentum, move the second moment that goes on, and return what 1-bit LAMB's factor needs.

        m = average / scaling, 0 where nu = 0             g = (m - b1 mu) / (1 - b1),   mu <- m
        fresh <- b2 fresh + (1 - b2) g^2        q = clamp(mu / (sqrt(nu) + eps)),    u = q + weight_decay p

    Args: params, averages, mu, nu, fresh: S tensors each; mu and fresh are written. scaling (S,). max_step: q is
        `clamped` to it; infinity for none.
    Returns: (S, 3) float64: the largest (sqrt(nu) + eps) / (sqrt(fresh) + eps), 0 of a tensor without elements, and
        the sums of squares of q and u.
    """
    sums = []
    for p, x, s, m, v, f in zip(params, averages, scaling.unbind(), mu, nu, fresh, strict=True):
        x = rules.kept_at_zero(x.to(m.dtype) / s.to(m.dtype), v, 0.0, 0.0)
        f.copy_(rules.second_moment(f, rules.implied_gradient(x, m, b1, 1 - b1), b2, 1 - b2))
        m.copy_(x)
        ratios = over_root(rules.denominator(v, eps), f, eps).reshape(-1)
        # With a zero in front: `max` refuses a tensor without elements.
        largest = torch.cat([ratios.new_zeros(1), ratios]).max().double()
        q = clamped(over_root(m, v, eps), max_step)
        u = rules.decayed(q, p.to(m.dtype), weight_decay)
        sums.append(torch.stack([largest, _squares(q), _squares(u)]))
    return _table(sums)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float, max_step: float,
) -> None:  # fmt: skip
    """Take the step p <- p - rate (clamp(mu / (sqrt(nu) + eps)) + weight_decay p), each tensor at a rate of its own.

    Args: params, mu, nu: S tensors each; params are written. rates (S,). max_step: as for `onebit_lamb_moments_`.
    """
    for p, m, v, rate in zip(params, mu, nu, rates.unbind(), strict=True):
        _descend(p, m, v, eps, weight_decay, rate.to(m.dtype), max_step)


def _table(rows: list[Tensor]) -> Tensor:
    # (3,) of each tensor -> (S, 3)
    return torch.stack(rows) if rows else torch.zeros((0, 3), dtype=torch.float64, device="cpu")


def _squares(x: Tensor) -> Tensor:
    return x.double().square().sum()
