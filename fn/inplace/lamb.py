"""1-bit LAMB's steps in place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives.axis import axis_size
from fn.inplace.compressed_average import CodedAverage, average_of, moving_averages
from fn.inplace.links import MatchedChain, bounded, largest_of, staged_by
from fn.inplace.match import register
from fn.inplace.protocol import Eligibility, InPlace, Staged
from fn.kernels import memory_pool, rules
from fn.kernels.lists import elementwise, squared_norms
from fn.kernels.table import direct
from fn.kernels.tracing import cached_plan
from fn.transforms import flat_layout as layouts
from fn.transforms.flat_layout import Bucket
from fn.transforms.lamb import (
    LambHyper,
    LambWarmup,
    OnebitLamb,
    OnebitLambState,
    bounded_factor,
    common_scale_of,
    frozen_ratio,
    moved_coefficient,
    ratio_of,
)

Tree = Any


def warmup(rule: LambWarmup, chain: MatchedChain) -> InPlace | str:
    """Return how a warm-up step of 1-bit LAMB is staged."""
    h = rule.hyper
    if chain.descent.weight_decay:
        return DECAYS

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: OnebitLambState) -> Staged:
        leaves, mu, nu, fresh = lists

        def commit() -> None:
            # Adam's step with a rate of -1 from weight_decay p is the direction u, whose norm is needed before a step
            # can be taken: it lies in memory of the pool.
            u = [memory_pool.empty(m.shape, m.dtype, m.device) for m in mu]
            elementwise(rules.scaled, (leaves,), h.weight_decay, wide=True, out=[u])
            direct("adamw_", u, grads, mu, nu, h.b1, h.b2, h.eps, 0.0, -1.0, math.inf, False)
            weight, moved, rms = (squared_norms(tensors).sqrt() for tensors in (leaves, u, mu))  # (S,) each
            ratio = ratio_of(weight.float(), moved.float(), h.min_coeff, h.max_coeff)
            _write(moments.coefficient, moved_coefficient(h, _read(moments.coefficient), ratio))
            _write(moments.factor, torch.ones_like(ratio))
            _write(moments.scaling, common_scale_of(rms / _counts(mu).clamp(min=1).sqrt()).float())
            torch._foreach_copy_(fresh, nu)
            _descend(moments, lists, ratio, h, chain.descent.rate, math.inf)

        return Staged(bounded(largest_of(grads, moments.step)), commit)

    return staged_by(chain, h.eps, Eligibility("adamw_", FIELDS), stage)


def compressed(rule: OnebitLamb, chain: MatchedChain) -> InPlace | str:
    """Return how a compressed step of 1-bit LAMB is staged, where all tensors have one scale."""
    h, average = rule.hyper, average_of(rule.average)
    if chain.descent.weight_decay:
        return DECAYS
    if not isinstance(average, CodedAverage) or average.rule.layout != "fused":
        return "1-bit LAMB has kernels for fn.compressed_average over one axis in the layout 'fused'"
    eligible = Eligibility("adamw_", FIELDS)

    def fits(updates: Tree, moments: OnebitLambState, params: Tree) -> list[list[Tensor]] | None:
        return eligible(updates, moments, params) if axis_size(average.rule.axis) > 1 else None

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: OnebitLambState) -> Staged:
        leaves, mu, nu, fresh = lists
        scaling = _read(moments.scaling)  # (S,)

        def rows(bucket: Bucket) -> Tensor:
            return moving_averages(mu, grads, h.b1, bucket, scaling)

        mean = average.average_rows(mu, moments.sync, rows)
        ((bucket, vector, *_),) = mean.buckets
        averages = layouts.split(vector, bucket)  # type: ignore[arg-type]
        # The mean is of momenta times their scales; over the smallest scale it bounds all of them.
        size = largest_of(mean.numbers, moments.step) / scaling.min()

        def commit() -> None:
            args = h.b1, h.b2, h.eps, h.weight_decay, rule.max_step
            # (S, 3) float64
            sums = direct("onebit_lamb_moments_", leaves, averages, scaling, mu, nu, fresh, *args)
            last = _read(moments.factor)
            factor = bounded_factor(h, last, sums[:, 0].float(), *sums[:, 1:].sqrt().float().unbind(1))
            # (S,); a tensor without elements has no ratio, and keeps its factor.
            factor = torch.where(_counts(mu) > 0, factor, last)
            _write(moments.factor, factor)
            ratio = frozen_ratio(_read(moments.coefficient), factor)
            _descend(moments, lists, ratio, h, chain.descent.rate, rule.max_step)
            mean.keep()

        return Staged(bounded(size), commit)

    return staged_by(chain, h.eps, fits, stage)


FIELDS = ("mu", "nu", "nu_fresh")
DECAYS = "a weight decay stands behind 1-bit LAMB, whose trust ratio has to see it; hand it to scale_by_onebit_lamb"


def _descend(
    moments: OnebitLambState, lists: list[list[Tensor]], ratio: Tensor, h: LambHyper, rate: float, max_step: float
) -> None:
    params, mu, nu, _ = lists
    direct("lamb_step_", params, mu, nu, rate * ratio, h.eps, h.weight_decay, max_step)
    _write(moments.ratio, ratio)
    moments.step.add_(1)


def _read(numbers: Tree) -> Tensor:
    """Return the numbers of tensors as (S,)."""
    return torch.stack(tree.leaves(numbers))  # S of () -> (S,)


def _write(numbers: Tree, values: Tensor) -> None:
    torch._foreach_copy_(tree.leaves(numbers), values.unbind())  # (S,) -> S of ()


def _counts(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return _numbers(tuple(map(Tensor.numel, tensors)), device)


@cached_plan
def _numbers(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64, device=device)


register(LambWarmup, warmup)
register(OnebitLamb, compressed)
