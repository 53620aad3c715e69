"""Adam's and 1-bit Adam's steps in place."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fn.collectives.axis import axis_size
from fn.inplace.compressed_average import CodedAverage, Mean, average_of
from fn.inplace.links import Descent, MatchedChain, Sized, largest_of, staged_by
from fn.inplace.match import register
from fn.inplace.protocol import WITH_FLOAT16, Eligibility, InPlace, number, write
from fn.kernels import ops
from fn.transforms.adam import Adam, Moments, OnebitAdam, OnebitAdamState

Tree = Any


def warmup(rule: Adam, chain: MatchedChain) -> InPlace | str:
    """Return how a step of Adam is staged."""

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: Moments) -> Sized:
        params, mu, nu = lists

        def commit() -> None:
            count_step(moments, rule.b1, rule.b2)
            numbers = kernel_args(rule, chain.descent, moments)
            ops.direct("adamw_", params, grads, mu, nu, rule.b1, rule.b2, *numbers, math.inf, math.inf, False)

        return Sized(largest_of(grads, moments.step), commit)

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

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: OnebitAdamState) -> Sized:
        params, mu, nu = lists
        mean: Mean | None = None
        if average is not None:
            mean = average.average_moments(moments.sync, mu, grads, rule.b1, moments.mu)

        def commit() -> None:
            count_step(moments, rule.b1)
            numbers = kernel_args(rule, chain.descent, moments)
            descent = *numbers, rule.max_step, math.inf
            if mean is None:
                ops.direct("adamw_", params, grads, mu, nu, rule.b1, 0.0, *descent, True)
            else:
                mean.step(params, mu, nu, descent, keep_zeros=rule.keep_zeros)
                mean.keep()

        return Sized(largest_of(grads if mean is None else mean.numbers, moments.step), commit)

    return staged_by(chain, rule.eps, fits, stage)


def kernel_args(rule: Adam | OnebitAdam, descent: Descent, moments: Moments) -> tuple[float, ...]:
    """Return eps, weight decay, learning rate and the weights of the moments, as the kernels take them."""
    weights = (number(moments.mu_weight), number(moments.nu_weight) or 1.0) if rule.corrected else (1.0, 1.0)
    return rule.eps, descent.weight_decay, descent.rate, *weights


def count_step(moments: Moments, b1: float, b2: float | None = None) -> None:
    """Count a step, in place. b2: None: the second moment rests."""

    def moved(decay: float) -> Any:
        # as the pure step has it: 1 - b ** t would be another number after rounding
        return lambda weight: weight.mul_(decay).add_(1 - decay)

    moments.step.add_(1)
    write(moments.mu_weight, moved(b1))
    if b2 is not None:
        write(moments.nu_weight, moved(b2))


register(Adam, warmup)
register(OnebitAdam, compressed)
