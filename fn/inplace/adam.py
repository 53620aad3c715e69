"""Adam's and 1-bit Adam's steps in place."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fn.collectives.axis import axis_size
from fn.inplace.compressed_average import CodedAverage, Mean, average_of
from fn.inplace.links import MatchedChain, bounded, largest_of, staged_by
from fn.inplace.match import register
from fn.inplace.protocol import WITH_FLOAT16, Eligibility, InPlace, Staged, number, write
from fn.kernels.table import direct
from fn.transforms.adam import Adam, Moments, OnebitAdam, OnebitAdamState, check_ages, share

Tree = Any


def warmup(rule: Adam, chain: MatchedChain) -> InPlace | str:
    """Return how a step of Adam is staged."""

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: Moments) -> Staged:
        params, mu, nu = lists

        def commit() -> None:
            betas = decays(moments.ages, rule.corrected, rule.b1, rule.b2)
            descent = rule.eps, chain.descent.weight_decay, chain.descent.rate, math.inf
            direct("adamw_", params, grads, mu, nu, *betas, *descent, False)
            count_step(moments)

        return Staged(bounded(largest_of(grads, moments.step)), commit)

    return staged_by(chain, rule.eps, Eligibility("adamw_", ("mu", "nu"), WITH_FLOAT16), stage)


def compressed(rule: OnebitAdam, chain: MatchedChain) -> InPlace | str:
    """Return how a step of 1-bit Adam is staged, from the codes of the mean where they are signs by tensor.

    `stage` sends and receives; nothing is written until all ranks know that the mean is finite. `commit` decodes it
    into the momentum and takes the step, in one pass.
    """
    average = average_of(rule.average)
    if isinstance(average, CodedAverage) and axis_size(average.rule.axis) == 1:
        average = None  # the momentum is its own mean
    eligible = Eligibility("adamw_" if average is None else "onebit_adam_", ("mu", "nu"), WITH_FLOAT16)

    def fits(updates: Tree, moments: OnebitAdamState, params: Tree) -> list[list[Tensor]] | None:
        lists = eligible(updates, moments, params)
        if lists is None or rule.keep_zeros:
            return lists
        return lists if isinstance(average, CodedAverage) and average.in_signs(lists[0], moments.sync) else None

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: OnebitAdamState) -> Staged:
        params, mu, nu = lists
        mean: Mean | None = None
        (b1,) = decays(moments.ages, rule.corrected, rule.b1)
        if average is not None:
            mean = average.average_moments(moments.sync, mu, grads, b1, moments.mu)

        def commit() -> None:
            descent = rule.eps, chain.descent.weight_decay, chain.descent.rate, rule.max_step
            if mean is None:
                direct("adamw_", params, grads, mu, nu, b1, 0.0, *descent, True)
            else:
                mean.step(params, mu, nu, descent, keep_zeros=rule.keep_zeros)
                mean.keep()
            count_step(moments, frozen=True)

        return Staged(bounded(largest_of(grads if mean is None else mean.numbers, moments.step)), commit)

    return staged_by(chain, rule.eps, fits, stage)


def decays(ages: tuple[Tensor, ...], corrected: bool, *betas: float) -> tuple[float, ...]:
    """Return by how much moments of these ages decay in the next step: in the first one all of it, where corrected."""
    check_ages(ages, corrected)
    return tuple(1 - share(b, number(age) + 1) for b, age in zip(betas, ages, strict=False)) if corrected else betas


def count_step(moments: Any, *, frozen: bool = False) -> None:
    """Count a step, in place. frozen: the second moment rests."""
    moments.step.add_(1)
    for age in moments.ages[: 1 if frozen else 2]:
        write(age, lambda count: count.add_(1))


register(Adam, warmup)
register(OnebitAdam, compressed)
