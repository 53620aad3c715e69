"""The kernels of LAMB's and 1-bit LAMB's steps in place, in plain torch: their specification.

As in `reference` they work on lists of S tensors, a list per role. What a tensor's step is scaled by depends on
sums over the tensor, so that a step is two kernels: one for the moments and the sums, one for the params.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn.kernels import rules
from fn.kernels.reference.adam import clamped, over_root


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


def _table(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros((0, 3), dtype=torch.float64, device="cpu")


def _squares(x: Tensor) -> Tensor:
    return x.double().square().sum()
