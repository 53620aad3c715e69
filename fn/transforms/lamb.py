"""LAMB's trust ratio, and 1-bit LAMB: the ratios frozen, the momentum of all layers on one scale in codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_interval, check_is_transform, check_number
from fn.base import Phase, Transform, UpdateFn, check_arguments, check_params, declare_rule, facts_of, lift, missing
from fn.errors import expected
from fn.facts import Averages, Facts, merged
from fn.kernels import layout, reference, rules
from fn.kernels.lists import squared_norms
from fn.roles import declare
from fn.transforms.adam import (
    adam_direction,
    check_betas,
    keep_unseen_at_zero,
    limit_of,
    moving_average,
    moving_average_of_squares,
    start_moments,
)
from fn.transforms.decay_and_lr import check_decay
from fn.transforms.leafwise import apply
from fn.transforms.skip_nonfinite import nan_unless_finite

Tree = Any


@declare(first_moment=("mu",), second_moment=("nu",))
class OnebitLambState(NamedTuple):
    """State of `scale_by_onebit_lamb`; per-tensor numbers are 0-d float32.

    step, mu, nu: as for Adam; nu rests after the warm-up.
    nu_fresh: the second moment that goes on, from gradients reconstructed out of the momentum.
    coefficient: the moving trust ratio. factor: how far the ratio may have moved since; 1 in the warm-up.
    ratio: what the last update was scaled by.
    scaling: the factor that brings each tensor's momentum to the common scale.
    sync: the state of the transform that averages.
    """

    step: Tensor
    mu: Tree
    nu: Tree
    nu_fresh: Tree
    coefficient: Tree
    factor: Tree
    ratio: Tree
    scaling: Tree
    sync: Tree


@declare_rule(name="scale_by_trust_ratio", tensorwise=True, now=True)
class TrustRatio(NamedTuple):
    """The rule of `scale_by_trust_ratio`."""

    min_coeff: float
    max_coeff: float

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates times their trust ratios, and the state."""
        check_params(params)
        tree.check_real(updates, "updates")
        leaves, weights = tree.flatten_alike((updates, params))[0]
        # (S,), a number for each tensor
        ratios = ratio_of(squared_norms(weights).sqrt(), squared_norms(leaves).sqrt(), *self)
        if len({u.device for u in leaves}) < 2:
            return apply(rules.scaled, (updates,), ratios), state
        each = [ratio.to(u.device) for ratio, u in zip(ratios.unbind(), leaves, strict=True)]  # they are on the first's
        return apply(rules.scaled, (updates,), each), state


def scale_by_trust_ratio(min_coeff: float = 0.0, max_coeff: float = 10.0) -> Transform:
    """Scale each tensor's update by clamp(||p|| / ||u||, min_coeff, max_coeff); by 1 where a norm is 0.

        >>> import torch, fn
        >>> tx = fn.scale_by_trust_ratio()
        >>> tx.update(fn.Phase.WARMUP)(torch.tensor([0.6, 0.8]), (), torch.tensor([3.0, 4.0]))[0]      # 5 / 1 times u
        tensor([3., 4.])

    Raises: ValueError unless 0 <= min_coeff <= max_coeff.

    Paper: You et al., LAMB (arXiv 1904.00962), algorithm 2.
    """
    _check_bounds(min_coeff, max_coeff)
    rule = TrustRatio(min_coeff, max_coeff)
    return lift(lambda params: (), rule)._replace(facts=Facts(whole=("scale_by_trust_ratio",)))


class LambHyper(NamedTuple):
    """Hyper-parameters of 1-bit LAMB for one tensor; see `scale_by_onebit_lamb`."""

    b1: float
    b2: float
    eps: float
    weight_decay: float
    max_coeff: float
    min_coeff: float
    coeff_beta: float
    factor_max: float
    factor_min: float
    factor_threshold: float


@declare_rule(now=True)
class LambWarmup(NamedTuple):
    """The rule of a warm-up step of `scale_by_onebit_lamb`."""

    hyper: LambHyper
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


@declare_rule(now=True)
class OnebitLamb(NamedTuple):
    """The rule of a compressed step of `scale_by_onebit_lamb`. average: the momentum's."""

    hyper: LambHyper
    average: UpdateFn
    max_step: float
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


def scale_by_onebit_lamb(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    sync: Transform,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    max_step: float | None = None,
) -> Transform:
    """Run LAMB in the warm-up; then freeze ratios and second moment, and average the momentum in codes.

        q = mu / (sqrt(nu) + eps),   u = q + wd p
        warm-up:     c = clamp(||p|| / ||u||, min_coeff, max_coeff), 1 where a norm is 0;   step c u
                     coefficient <- coeff_beta coefficient + (1 - coeff_beta) c, unless c = 1
        compressed:  mu <- C((b1 mu + (1 - b1) g_r) scaling) / scaling
                     g' = (mu - b1 mu_last) / (1 - b1),   nu_fresh <- b2 nu_fresh + (1 - b2) g'^2
                     f = max (sqrt(nu) + eps) / (sqrt(nu_fresh) + eps)
                     share = min(1, ||q|| / ||u||),   f <- share f + 1 - share          (only if wd > 0)
                     f <- clamp(f, factor_min, factor_max)
                     factor <- clamp(f, (1 - factor_threshold) factor, (1 + factor_threshold) factor)
                     step coefficient factor u

        >>> import torch, fn
        >>> tx = fn.scale_by_onebit_lamb(sync=fn.compressed_average("data", fn.sign()))
        >>> params = torch.tensor([3.0, 4.0])
        >>> state = tx.init(params)
        >>> for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED):
        ...     u, state = tx.update(phase)(torch.tensor([1.0, -1.0]), state, params)
        >>> state.coefficient, u
        (tensor(0.1118), tensor([ 0.6046, -0.6046]))

    A c of exactly 1 counts as a ratio that was not taken, and does not enter the coefficient. With weight decay only
    q's share of the step follows the second moment, so f is blended with 1 by that share before it is bounded.
    scaling brings the root mean square of every tensor's momentum to their common mean, so that one scale serves
    the whole model; it is kept current in the warm-up, as nu_fresh and coefficient are.

    Args:
        weight_decay: inside the link, because the trust ratio sees it.
        sync: the transform that averages the momentum, in the layout "fused", so that all tensors have one scale.
        max_coeff, min_coeff: bounds of the trust ratio. coeff_beta: decay of its moving average.
        factor_max, factor_min: bounds of the factor. factor_threshold: how far it may move in a step, relative to
            the last one; it wins over the bounds.
        max_step: clamp each element of q to +-max_step in the compressed phase, before decay and norms; None for no
            clamp. Frozen ratios are as they were. See `scale_by_onebit_adam`.
    Raises: ValueError if an argument is out of range.

    Paper: Li et al., 1-bit LAMB (arXiv 2104.06069), algorithm 1.
    Differs: a tensor whose momentum is zero at the switch keeps scaling 1 (DeepSpeed divides by zero), one whose
        ratio was never taken has coefficient 1 (there 0, so that it would never move again).
    """
    hyper = LambHyper(
        b1, b2, eps, weight_decay, max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold
    )
    check_is_transform("sync", sync)
    check_hyper(hyper)
    limit = limit_of(max_step)

    def hypers_of(updates: Tree) -> list[LambHyper]:
        return [hyper] * len(tree.leaves(updates))

    def init(params: Tree) -> OnebitLambState:
        moments = start_lamb(params)
        return OnebitLambState._make([*moments, sync.init(moments[1])])

    def warmup(updates: Tree, state: OnebitLambState, params: Tree, /) -> tuple[Tree, OnebitLambState]:
        updates, params = check_arguments(updates, state, params, OnebitLambState, "mu")
        return warm_step(hypers_of(updates), updates, state, params)

    def compressed(updates: Tree, state: OnebitLambState, params: Tree, /) -> tuple[Tree, OnebitLambState]:
        updates, params = check_arguments(updates, state, params, OnebitLambState, "mu")
        # All tensors at one scale: the codes have a single one for the whole model, in which small momenta would drown.
        sent = tree.map(lambda g, m, s: torch.lerp(g.to(m.dtype), m, hyper.b1) * s, updates, state.mu, state.scaling)
        mean, sync_state = sync.compressed_update(sent, state.sync, params)
        # Back from the common scale, with the factors that it was sent with; all ranks have the same ones.
        mu = keep_unseen_at_zero(tree.map(lambda m, s: m / s, mean, state.scaling), state.nu)
        out, state = frozen_step(hypers_of(updates), limit, mu, state, params)
        # A clamp would make a finite step of an infinite momentum, and no guard would skip it.
        return (nan_unless_finite(out, mu) if limit < math.inf else out), state._replace(sync=sync_state)

    rule = OnebitLamb(hyper, sync.compressed_update, limit, compressed)
    local, frozen = missing(Phase.LOCAL, "1-bit LAMB"), frozenset({Phase.COMPRESSED})  # nu is frozen
    facts = merged(facts_of(sync), Facts(whole=("scale_by_onebit_lamb",)))
    facts = facts._replace(averages=Averages((), facts.averaged.compressed))  # its warm-up does without sync
    return Transform(init, LambWarmup(hyper, warmup), rule, local, needs_warmup=frozen, facts=facts)


def start_lamb(params: Tree) -> tuple[Any, ...]:
    """Return the fields of `OnebitLambState` before the first update, but `sync`, in their order."""
    step, mu, nu = start_moments(params)
    full = lambda m, value: torch.full((), value, dtype=layout.scale_dtype(m), device=m.device)  # noqa: E731
    coefficient, factor, ratio, scaling = (tree.map(partial(full, value=v), mu) for v in (0.0, 1.0, 1.0, 1.0))
    return step, mu, nu, tree.map(torch.zeros_like, nu), coefficient, factor, ratio, scaling


def warm_step(hypers: Sequence[LambHyper], updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    """Return the updates and the state after a warm-up step. hypers: of each tensor."""
    rows = _rows(updates, params, state.mu, state.nu, state.coefficient)
    results = [_warm_tensor(h, *row) for h, row in zip(hypers, rows, strict=True)]
    out, mu, nu, coefficient, ratio = _columns(results, updates, 5)
    state = state._replace(
        step=state.step + 1,
        mu=mu,
        nu=nu,
        nu_fresh=nu,  # so that it goes on from there at the switch
        coefficient=coefficient,
        factor=tree.map(torch.ones_like, state.factor),
        ratio=ratio,
        scaling=common_scale(mu),
    )
    return out, state


def frozen_step(hypers: Sequence[LambHyper], max_step: float, mu: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    """Return the updates and the state after a compressed step.

    Args: hypers: of each tensor. mu: the new momentum, which all ranks share. state: with the last one.
    """
    rows = _rows(params, mu, state.mu, state.nu, state.nu_fresh, state.coefficient, state.factor)
    results = [_step_tensor(h, max_step, *row) for h, row in zip(hypers, rows, strict=True)]
    out, fresh, factor, ratio = _columns(results, mu, 4)
    return out, state._replace(step=state.step + 1, mu=mu, nu_fresh=fresh, factor=factor, ratio=ratio)


def _warm_tensor(h: LambHyper, g: Tensor, p: Tensor, mu: Tensor, nu: Tensor, coefficient: Tensor) -> tuple[Tensor, ...]:
    """Return the update, mu, nu, the moving ratio and the ratio of one tensor after a warm-up step."""
    mu, nu = moving_average(mu, g, h.b1), moving_average_of_squares(nu, g, h.b2)
    u = _decayed(adam_direction(mu, nu, h.eps), p, h)
    ratio = ratio_of(_norm(p), _norm(u), h.min_coeff, h.max_coeff)
    return u * ratio.to(u.dtype), mu, nu, moved_coefficient(h, coefficient, ratio), ratio


def _step_tensor(
    h: LambHyper, max_step: float, p: Tensor, mu: Tensor, mu_last: Tensor, nu: Tensor, fresh: Tensor,
    coefficient: Tensor, factor: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the update, nu_fresh, the factor and the ratio of one tensor after a compressed step."""
    # The gradient that leads from the last momentum to this one is alike on all ranks; with a rank's own the factors
    # would differ between ranks.
    fresh = moving_average_of_squares(fresh, (mu - h.b1 * mu_last) / (1 - h.b1), h.b2)
    q = adam_direction(mu, nu, h.eps, max_step=max_step)
    u = _decayed(q, p, h)
    factor = _bounded_factor(h, factor, nu, fresh, q, u)
    ratio = frozen_ratio(coefficient, factor)
    return u * ratio.to(u.dtype), fresh, factor, ratio


def moved_coefficient(h: LambHyper, coefficient: Tensor, ratio: Tensor) -> Tensor:
    """Return the moving trust ratio after a warm-up step; a ratio of 1 was not taken and does not count."""
    return torch.where(ratio == 1, coefficient, h.coeff_beta * coefficient + (1 - h.coeff_beta) * ratio)


def frozen_ratio(coefficient: Tensor, factor: Tensor) -> Tensor:
    """Return the factor of a compressed step: the coefficient, 1 if no ratio was ever taken, times the factor."""
    return torch.where(coefficient == 0, 1.0, coefficient) * factor


def _bounded_factor(h: LambHyper, last: Tensor, nu: Tensor, fresh: Tensor, q: Tensor, u: Tensor) -> Tensor:
    if not nu.numel():  # there is no largest element
        return last
    # (...) -> (), the largest of the tensor
    f = reference.steps.over_root(rules.denominator(nu, h.eps), fresh, h.eps).max().to(last.dtype)
    return bounded_factor(h, last, f, _norm(q), _norm(u)) if h.weight_decay > 0 else bounded_factor(h, last, f, f, f)


def bounded_factor(h: LambHyper, last: Tensor, f: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return the factor after a compressed step, from the largest ratio f and the norms of q and u, like the last."""
    if h.weight_decay > 0:
        # Where u is zero, q / 0 would be NaN or infinite.
        share = (q / u.clamp(min=torch.finfo(last.dtype).tiny)).clamp(max=1.0)
        f = share * f + 1 - share
    f = f.clamp(h.factor_min, h.factor_max)
    # Last, for the threshold wins over the bounds.
    return f.minimum(last * (1 + h.factor_threshold)).maximum(last * (1 - h.factor_threshold))


def _decayed(u: Tensor, p: Tensor, h: LambHyper) -> Tensor:
    return u + h.weight_decay * p.to(u.dtype) if h.weight_decay else u


def _rows(*trees: Tree) -> list[tuple[Any, ...]]:
    return list(zip(*(tree.leaves(t) for t in trees), strict=True))


def _columns(rows: list[tuple[Tensor, ...]], like: Tree, width: int) -> list[Tree]:
    structure = tree.flatten(like)[1]
    return [tree.unflatten(structure, [row[i] for row in rows]) for i in range(width)]


def check_hyper(h: LambHyper) -> None:
    """Refuse hyper-parameters that are out of range with a ValueError that names them."""
    check_betas(h.b1, h.b2, h.eps)
    _check_bounds(h.min_coeff, h.max_coeff)
    check_decay(h.weight_decay)
    check_interval("coeff_beta", h.coeff_beta, "[0, 1)")
    for name in ("factor_min", "factor_max", "factor_threshold"):
        check_number(name, getattr(h, name))
    if not 0 < h.factor_min <= h.factor_max:
        raise ValueError(expected("factor_min, factor_max", "0 < min <= max", f"{h.factor_min}, {h.factor_max}"))
    if not h.factor_threshold >= 0:
        raise ValueError(expected("factor_threshold", "a number of at least 0", f"{h.factor_threshold}"))


def ratio_of(weight: Tensor, update: Tensor, low: float, high: float) -> Tensor:
    """Return the trust ratio, from the norms of the weight and of the update."""
    known = torch.minimum(weight, update) > 0
    # Divided by 1 where the ratio is not taken: behind the outer selection a derivative would still meet 0 / 0.
    return torch.where(known, (weight / torch.where(known, update, 1.0)).clamp(low, high), 1.0)


def common_scale(mu: Tree) -> Tree:
    """Return, per tensor, mean_j rms(mu_j) / rms(mu_i), 0-d float32; 1 for a tensor that is zero or empty."""
    leaves, structure = tree.flatten(mu)
    if not leaves:
        return mu
    # (S,), in float64: a quotient of two of them is a factor of every number that travels
    rms = torch.stack([(_norm(m).double() / max(m.numel(), 1) ** 0.5).to(leaves[0].device) for m in leaves])
    scaling = common_scale_of(rms)
    # (S,) -> S numbers (), each on the device of its tensor
    parts = [s.to(m.device, layout.scale_dtype(m)) for s, m in zip(scaling.unbind(), leaves, strict=True)]
    return tree.unflatten(structure, parts)


def common_scale_of(rms: Tensor) -> Tensor:
    """Return the factors that bring root mean squares (S,) to their mean; 1 where one is zero.

    They are at most the largest float32: where a momentum fades out, the quotient would overflow.
    """
    alive = rms > 0
    # (S,) -> (), over those that are not zero
    mean = rms.sum() / alive.sum().clamp(min=1)
    scaling = (mean / torch.where(alive, rms, 1.0)).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(alive, scaling, 1.0)


def _norm(x: Tensor) -> Tensor:
    # Wide: the square of a float16 overflows from 256 on.
    norm: Tensor = torch.linalg.vector_norm(x.to(layout.scale_dtype(x)))
    return norm


def _check_bounds(low: float, high: float) -> None:
    check_number("min_coeff", low)
    check_number("max_coeff", high)
    if not 0 <= low <= high:
        raise ValueError(expected("min_coeff, max_coeff", "0 <= min_coeff <= max_coeff", f"{low}, {high}"))
