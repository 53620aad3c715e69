"""Adam's and 1-bit Adam's steps in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fn import tree
from fn.base import Link, UpdateFn
from fn.collectives.axis import axis_size
from fn.inplace.bounds import Bounds, Reach, Sized, bounded
from fn.inplace.compressed_average import CodedAverage, Mean, average_of
from fn.inplace.descent import Descent
from fn.inplace.head import Head, largest_of
from fn.inplace.host_scalars import on_host, write
from fn.inplace.protocol import Eligibility, InPlace
from fn.kernels import ops
from fn.transforms.moments import Adam, AdamState, OnebitAdam, OnebitAdamState
from fn.transforms.zero_one import largest

Tree = Any
Moments = AdamState | OnebitAdamState


def warmup(update: UpdateFn, rule: Adam, link: Link, head: Head, descent: Descent, bounds: Bounds) -> InPlace | str:
    """Return how a step of Adam is staged; its moments are those of `link`."""

    def stage(updates: Tree, state: Tree, params: Tree) -> Sized:
        moments: Moments = link.state(state)
        grads, keep = head.gradients(updates, state, params, moments.mu)

        def commit() -> None:
            count_step(moments, rule.b1, rule.b2)
            leaves, mu, nu = tree.lists(params, moments.mu, moments.nu)
            ops.direct("adamw_", leaves, grads, mu, nu, rule.b1, rule.b2, *kernel_args(rule, descent, moments), False)
            keep()

        return Sized(largest_of(grads, moments.step), commit)

    fits = Eligibility("adamw_", link, ("mu", "nu"))
    return bounded(update, link, fits, bounds, lambda moments: reach_of(rule, descent, moments), stage)


def compressed(
    update: UpdateFn, rule: OnebitAdam, link: Link, head: Head, descent: Descent, bounds: Bounds
) -> InPlace | str:
    """Return how a step of 1-bit Adam is staged, from the codes of the mean where they are signs by tensor."""
    average = average_of(rule.average)

    def is_alone() -> bool:
        """Tell whether the momentum is its own mean."""
        return average is None or (isinstance(average, CodedAverage) and axis_size(average.axis) == 1)

    eligible = Eligibility(lambda: "adamw_" if is_alone() else "onebit_adam_", link, ("mu", "nu"))

    def fits(updates: Tree, state: Tree, params: Tree) -> list[Tensor] | None:
        tensors = eligible(updates, state, params)
        if tensors is None or rule.keep_zeros:
            return tensors
        coded = average if isinstance(average, CodedAverage) and not is_alone() else None
        return tensors if coded is not None and coded.in_signs(tree.leaves(params), link.state(state).sync) else None

    def stage(updates: Tree, state: Tree, params: Tree) -> Sized:
        moments: OnebitAdamState = link.state(state)
        grads, keep = head.gradients(updates, state, params, moments.mu)
        leaves, mu, nu = tree.lists(params, moments.mu, moments.nu)
        mean: Mean | None = None
        if average is not None and not is_alone():
            mean = average.average_moments(moments.sync, mu, grads, rule.b1, params)

        def commit() -> None:
            count_step(moments, rule.b1)
            args = kernel_args(rule, descent, moments)
            if mean is None:
                ops.direct("adamw_", leaves, grads, mu, nu, rule.b1, 0.0, *args, True)
            else:
                mean.step(leaves, mu, nu, args, keep_zeros=rule.keep_zeros)
                mean.keep()
            keep()

        return Sized(largest_of(grads, moments.step) if mean is None else largest(mean.numbers), commit)

    def reach(moments: OnebitAdamState) -> Reach:
        return reach_of(rule, descent, moments, keeps=is_alone())

    return bounded(update, link, fits, bounds, reach, stage)


def reach_of(rule: Adam | OnebitAdam, descent: Descent, moments: Moments, *, keeps: bool = True) -> Reach:
    """Return how far the next step goes. keeps: whether the old momentum enters the new one."""
    weight = rule.b1 * float(on_host(moments.mu_weight)) + 1 - rule.b1 if rule.corrected else 1.0
    return Reach(abs(descent.rate), rule.eps, descent.weight_decay, weight, keeps=keeps)


def kernel_args(rule: Adam | OnebitAdam, descent: Descent, moments: Moments) -> tuple[float, ...]:
    """Return eps, weight decay, learning rate and the weights of the moments, as the kernels take them."""
    if not rule.corrected:
        return rule.eps, descent.weight_decay, descent.rate, 1.0, 1.0
    weights = float(on_host(moments.mu_weight)), float(on_host(moments.nu_weight)) or 1.0
    return rule.eps, descent.weight_decay, descent.rate, *weights


def count_step(moments: Moments, b1: float, b2: float | None = None) -> None:
    """Count a step, in place. b2: None: the second moment rests."""

    def follow(decay: float) -> Any:
        return lambda weight: weight.mul_(decay).add_(1 - decay)

    moments.step.add_(1)
    write(moments.mu_weight, follow(b1))
    if b2 is not None:
        write(moments.nu_weight, follow(b2))

