"""0/1 Adam's steps in place: variance, local and synchronising steps, each with an anchor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn.collectives.axis import axis_size
from fn.inplace.adam import Ages, count_step
from fn.inplace.compressed_average import CodedAverage, average_of
from fn.inplace.links import MatchedChain, bounded, largest_of, staged_by
from fn.inplace.match import register
from fn.inplace.protocol import Eligibility, InPlace, Staged, on_host, write
from fn.kernels.table import direct
from fn.transforms.adam import FILLED
from fn.transforms.flat_layout import Bucket
from fn.transforms.zero_one_adam import (
    LocalStep,
    SynchronisingStep,
    VarianceStep,
    ZeroOneAdam,
    ZeroOneAdamState,
    check_synchronised,
)

Tree = Any

SMALLEST = 2.0**-120
"""Numbers from here on keep their digits in the products that kernels form with them."""

FIELDS = ("mu", "nu", "anchor")
BEHIND = "a weight decay or a rate stands behind 0/1 Adam, whose updates are added to the params as they are"


def variance(rule: VarianceStep, chain: MatchedChain) -> InPlace | str:
    """Return how a variance step is staged."""
    h, ages = rule.hyper, Ages(rule.hyper.corrected)

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: ZeroOneAdamState) -> Staged:
        asked = ages.ask(moments) if h.corrected else None

        def commit() -> None:
            params, _, _, anchor = lists
            ages.answer(moments, asked)
            # What the guard of the pure step looks at; the state is then as that step leaves it.
            moments.peak.copy_(direct("largest_magnitude", grads))
            _descend(moments, ages, lists, grads, h, frozen=False)
            torch._foreach_copy_(anchor, params)

        return Staged(bounded(largest_of(grads, moments.step)), commit, asked=asked)

    staged = staged_by(chain, h.eps, Eligibility("adamw_", FIELDS), stage)
    if isinstance(staged, str):
        return staged

    def checked(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        check_synchronised(on_host(chain.link.state(state).elapsed))  # as the call would, before anything is sent
        return staged.stage(updates, state, params)

    return staged._replace(stage=checked)


def local(rule: LocalStep, chain: MatchedChain) -> InPlace | str:
    """Return how a local step is staged."""
    h, ages = rule.hyper, Ages(rule.hyper.corrected)

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: ZeroOneAdamState) -> Staged:
        def count_elapsed() -> None:
            write(moments.elapsed, lambda elapsed: elapsed.add_(_rate(h)))

        def commit() -> None:
            _descend(moments, ages, lists, grads, h, frozen=True)
            count_elapsed()

        def drop() -> None:  # this rank's own: no message tells the others, so the time goes on alike on all ranks
            moments.dropped.add_(1)
            count_step(moments, frozen=True)
            count_elapsed()

        return Staged(bounded(largest_of(grads, moments.step)), commit, drop)

    return staged_by(chain, h.eps, Eligibility("adamw_", FIELDS), stage)


def synchronise(rule: SynchronisingStep, chain: MatchedChain) -> InPlace | str:
    """Return how a synchronising step is staged."""
    h, average = rule.hyper, average_of(rule.average)
    if not isinstance(average, CodedAverage) or average.rule.layout == "fused":
        return "0/1 Adam has kernels for fn.compressed_average over one axis, in the layouts 'flat' and 'per_tensor'"
    eligible, ages = Eligibility("adamw_", FIELDS), Ages(h.corrected)

    def elapsed_after(moments: ZeroOneAdamState) -> float:
        # In the dtype of the state: the pure step divides by the number that it has rounded to.
        return float(on_host(moments.elapsed).add(_rate(h)).to(moments.elapsed.dtype))

    def fits(updates: Tree, moments: ZeroOneAdamState, params: Tree) -> list[list[Tensor]] | None:
        moved = axis_size(average.rule.axis) > 1 and elapsed_after(moments) >= SMALLEST
        # a vector that travels has one decay for all of its tensors
        return eligible(updates, moments, params) if moved and ages.decay(moments, h.b1) is not None else None

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: ZeroOneAdamState) -> Staged:
        params, mu, nu, anchor = lists
        elapsed = elapsed_after(moments)
        b1 = ages.decay(moments, h.b1)
        assert b1 is not None  # as `fits` saw

        def drifts(bucket: Bucket) -> Tensor:
            inputs = [[tensors[i] for i in bucket.leaf_indices] for tensors in (params, anchor, mu, grads, nu)]
            layout = bucket.segments.valid.shape[0], bucket.segments.runs
            drift: Tensor = direct("drift", *inputs, b1, h.eps, float(_rate(h)), *layout)
            # (R, n / R) -> (n,)
            return drift.view(-1)

        mean = average.average_rows(anchor, moments.sync, drifts)
        peak = largest_of(mean.numbers, moments.peak)

        def commit() -> None:  # from the anchor, with the mean in place of minus the learning rates times the momentum
            descent = h.eps, h.weight_decay, elapsed, h.max_step
            mean.step(anchor, mu, nu, descent, factor=-1 / elapsed, copies=params)
            moments.peak.copy_(peak)
            moments.step.add_(1)
            # The copy on the host becomes zero, too, so the next step need not wait for the device.
            write(moments.elapsed, Tensor.zero_)
            for age in moments.ages[:1]:
                write(age, lambda count: count.fill_(FILLED))
            mean.keep()

        return Staged(bounded(peak / elapsed), commit)

    return staged_by(chain, h.eps, fits, stage)


def _descend(
    moments: ZeroOneAdamState, ages: Ages, lists: list[list[Tensor]], grads: list[Tensor], h: ZeroOneAdam, *,
    frozen: bool,
) -> None:  # fmt: skip
    decay = 0.0 if frozen else h.weight_decay  # that of local steps comes with the synchronisation
    args = h.eps, decay, float(_rate(h)), h.max_step
    for (params, mu, nu, _, fresh), betas in ages.groups(moments, (*lists, grads), h.b1, h.b2):
        direct("adamw_", params, fresh, mu, nu, *betas, *args, frozen)
    count_step(moments, frozen=frozen)


def _rate(h: ZeroOneAdam) -> float | Tensor:
    return on_host(h.lr) if isinstance(h.lr, Tensor) else h.lr


register(VarianceStep, variance, last=BEHIND)
register(SynchronisingStep, synchronise, last=BEHIND)
register(LocalStep, local, looks=False, last=BEHIND)
