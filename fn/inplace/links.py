"""The links around the moments of a chain: those in front, which run purely, and decays and rates behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Link, UpdateFn
from fn.inplace.memory import copy_plan
from fn.inplace.protocol import DTYPE, WITH_FLOAT16, InPlace, Staged, number
from fn.kernels.reference.steps import is_normal
from fn.kernels.table import direct
from fn.transforms.decay_and_lr import Decay, Rate

Tree = Any


class Head(NamedTuple):
    """The links in front of the one that keeps the moments. Their new states wait for the step to be written."""

    links: Sequence[Link]

    def run(self, updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Callable[[], None]]:
        """Return the updates that the links make, and a function that writes their new states.

        Args: updates, state, params: of the whole chain.
        """
        writes = []
        for link in self.links:
            before = link.state(state)
            updates, after = link.update(updates, before, params)
            if after is not before:
                # Kept until the step is written: a step that is skipped leaves these states as they were.
                writes.append(copy_plan(before, after))

        def write() -> None:
            for write_state in writes:
                write_state()

        return updates, write

    def gradients(self, updates: Tree, state: Tree, params: Tree, mu: Tree) -> tuple[list[Tensor], Callable[[], None]]:
        """Return the same for moments like `mu`, as their kernels take it: contiguous, all in one dtype, not wider."""
        updates, write = self.run(updates, state, params)
        tree.check_updates(updates, mu)
        leaves, moments = tree.lists(updates, mu)
        dtypes = {*map(DTYPE, leaves)}
        # nearly always so; `to` and `contiguous` cost a microsecond a tensor even where they have nothing to do
        if len(dtypes) == 1 and dtypes <= {*WITH_FLOAT16} and all(map(Tensor.is_contiguous, leaves)):
            return leaves, write
        return [u.to(m.dtype).contiguous() for u, m in zip(leaves, moments, strict=True)], write


class Descent(NamedTuple):
    """p <- p - rate (u + weight_decay p). rates: of the links, numbers or 0-d tensors."""

    weight_decay: float
    rates: tuple[float | Tensor, ...]

    @property
    def rate(self) -> float:
        """Return the product of the rates, on the host; -1 without any, where the update is added as it is."""
        signed = -1.0
        for lr in self.rates:
            signed *= -number(lr)
        return signed


def descent_of(links: Sequence[Link]) -> Descent | Link:
    """Return the descent that links make; the first that is no part of one."""
    decay, rates = 0.0, list[float | Tensor]()
    for link in links:
        rule = link.update
        if isinstance(rule, Rate):
            rates.append(rule.lr)
        elif isinstance(rule, Decay) and not rates:
            decay += rule.weight_decay
        else:
            return link
    return Descent(decay, tuple(rates))


class MatchedChain(NamedTuple):
    """A chain, cut at the link that keeps the moments.

    update: the pure one. link: that link. head: the links in front of it. descent: what those behind it amount to.
    """

    update: UpdateFn
    link: Link
    head: Head
    descent: Descent


NO_EPS = "kernels divide by sqrt(nu) + eps, which an eps of 0, or one that rounds to it, does not keep from zero"


def staged_by(
    chain: MatchedChain,
    eps: float,
    fits: Callable[[Tree, Tree, Tree], list[list[Tensor]] | None],
    stage: Callable[[list[Tensor], list[list[Tensor]], Any], Staged],
) -> InPlace | str:
    """Return how the update of a chain is staged, or why it is not.

    What enters the moments is finite where the updates are, which a guard of the pure step looks at.

    Args: eps: of the direction. fits: (updates, the link's state, params) -> the lists that the kernels write, params
        first; None without any.
        stage: (gradients, those lists, the link's state) -> the step, but for the links in front.
    """

    def staged(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        moments = chain.link.state(state)
        lists = fits(updates, moments, params)
        if lists is None:
            return None
        grads, keep_front = chain.head.gradients(updates, state, params, moments.nu)
        step = stage(grads, lists, moments)
        otherwise = step.otherwise and _both(step.otherwise, keep_front)
        return step._replace(commit=_both(step.commit, keep_front), otherwise=otherwise)

    return InPlace(chain.update, staged) if is_normal(eps, torch.float32) else NO_EPS


def _both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def write() -> None:
        first()
        then()

    return write


def bounded(size: Tensor) -> bool | Tensor:
    """Return whether the largest magnitude of what enters the momentum, 0-d, is finite."""
    # A magnitude below Inf is finite, and no NaN: one launch on a device, where isfinite takes four.
    return (size if size.device.type != "cpu" else float(size)) < math.inf


def largest_of(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the largest magnitude, 0-d; NaN where an element is. like: is on the device where it is zero of none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=like.device)
    largest: Tensor = direct("largest_magnitude", tensors)
    return largest
