"""Adam's and 1-bit Adam's steps in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives.axis import axis_size
from fn.inplace.compressed_average import CodedAverage, Mean, average_of
from fn.inplace.links import MatchedChain, bounded, largest_of, staged_by
from fn.inplace.match import register
from fn.inplace.protocol import WITH_FLOAT16, Asked, Eligibility, InPlace, Staged, number, write
from fn.kernels.lists import peaks
from fn.kernels.table import direct
from fn.transforms.adam import Adam, Moments, OnebitAdam, OnebitAdamState, check_ages, share

Tree = Any


def warmup(rule: Adam, chain: MatchedChain) -> InPlace | str:
    """Return how a step of Adam is staged."""

    ages = Ages(rule.corrected)

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: Moments) -> Staged:
        asked = ages.ask(moments) if rule.awaits else None

        def commit() -> None:
            ages.answer(moments, asked)
            descent = rule.eps, chain.descent.weight_decay, chain.descent.rate, math.inf
            for (params, mu, nu, fresh), betas in ages.groups(moments, (*lists, grads), rule.b1, rule.b2):
                direct("adamw_", params, fresh, mu, nu, *betas, *descent, False)
            count_step(moments)

        return Staged(bounded(largest_of(grads, moments.step)), commit, asked=asked)

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
    ages = Ages(rule.corrected)

    def fits(updates: Tree, moments: OnebitAdamState, params: Tree) -> list[list[Tensor]] | None:
        lists = eligible(updates, moments, params)
        if average is not None and ages.decay(moments, rule.b1) is None:
            return None  # a vector that travels has one decay for all of its tensors
        if lists is None or rule.keep_zeros:
            return lists
        return lists if isinstance(average, CodedAverage) and average.in_signs(lists[0], moments.sync) else None

    def stage(grads: list[Tensor], lists: list[list[Tensor]], moments: OnebitAdamState) -> Staged:
        params, mu, nu = lists
        mean: Mean | None = None
        if average is not None:
            b1 = ages.decay(moments, rule.b1)
            assert b1 is not None  # as `fits` saw
            mean = average.average_moments(moments.sync, mu, grads, b1, moments.mu)

        def commit() -> None:
            descent = rule.eps, chain.descent.weight_decay, chain.descent.rate, rule.max_step
            if mean is None:
                for (p, m, v, g), (b1,) in ages.groups(moments, (*lists, grads), rule.b1):
                    direct("adamw_", p, g, m, v, b1, 0.0, *descent, True)
            else:
                mean.step(params, mu, nu, descent, keep_zeros=rule.keep_zeros)
                mean.keep()
            count_step(moments, frozen=True)

        return Staged(bounded(largest_of(grads if mean is None else mean.numbers, moments.step)), commit)

    return staged_by(chain, rule.eps, fits, stage)


class Ages:
    """The ages of moments, tensor by tensor, on the host, for kernels that take one decay for several tensors.

    What tensors sat out is read when somebody has written it, all in one go. Args: corrected: as for `Adam`.
    """

    def __init__(self, corrected: bool) -> None:
        self._corrected = corrected
        self._leaves: list[Tensor] = []
        self._versions: list[int] = []
        self._rested: list[int] = []

    def rested(self, moments: Any) -> list[int]:
        """Return how many updates each tensor sat out; [] where the state does not say."""
        leaves = tree.leaves(moments.rested)
        versions = [*map(_VERSION, leaves)]
        if versions != self._versions or not all(map(is_, leaves, self._leaves)):
            self._rested = torch.stack(leaves).tolist() if leaves else []  # S of () -> (S,)
            self._leaves, self._versions = leaves, versions
        return self._rested

    def decays(self, moments: Any, *betas: float) -> list[tuple[float, ...]]:
        """Return by how much the moments of each tensor decay in the next step; one entry where all are alike.

        Where they are corrected that is all of it in the first step.
        """
        check_ages(moments.ages, self._corrected)
        if not self._corrected:
            return [betas]
        counts, rested = [number(age) + 1 for age in moments.ages], self.rested(moments)
        kinds: dict[int, tuple[float, ...]] = {}
        for n in {*rested} or {0}:
            kinds[n] = tuple(1 - share(b, age - n) for b, age in zip(betas, counts, strict=False))
        return [kinds[n] for n in rested] if len({*kinds.values()}) > 1 else [*kinds.values()][:1]

    def decay(self, moments: Any, beta: float) -> float | None:
        """Return by how much the first moments of all tensors decay in the next step; None where that differs."""
        found = self.decays(moments, beta)
        return found[0][0] if len(found) == 1 else None

    def groups(
        self, moments: Any, lists: Sequence[list[Tensor]], *betas: float
    ) -> Iterator[tuple[Sequence[list[Tensor]], tuple[float, ...]]]:
        """Yield the lists in groups of tensors whose moments decay alike, usually one, and by how much."""
        found = self.decays(moments, *betas)
        if len(found) == 1:
            yield lists, found[0]
            return
        for of_group, places in tree.places_by(found).items():
            yield [[column[i] for i in places] for column in lists], of_group

    def ask(self, moments: Any) -> Asked | None:
        """Ask which tensors have had no gradient yet, see `fn.transforms.adam.started`; None where no tensor may."""
        latest, nus = number(moments.ages[-1]) - 1, tree.leaves(moments.nu)
        places = [i for i, n in enumerate(self.rested(moments)) if n == latest and nus[i].numel()]
        return Asked(places, torch.stack([peak == 0 for peak in peaks([nus[i] for i in places])])) if places else None

    def answer(self, moments: Any, asked: Asked | None) -> None:
        """Write that tensors without a gradient sat out all updates so far."""
        if asked is None:
            return
        count, leaves = int(number(moments.ages[-1])), tree.leaves(moments.rested)
        for place, waits in zip(asked.places, asked.answers(), strict=True):
            if waits:
                leaves[place].fill_(count)
                self._rested[place] = count
        self._versions = [*map(_VERSION, leaves)]


_VERSION = attrgetter("_version")


def count_step(moments: Any, *, frozen: bool = False) -> None:
    """Count a step, in place. frozen: the second moment rests."""
    moments.step.add_(1)
    for age in moments.ages[: 1 if frozen else 2]:
        write(age, lambda count: count.add_(1))


register(Adam, warmup)
register(OnebitAdam, compressed)
