"""What stands around the moments of a chain: links in front, which run purely, and decays and rates behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fn import tree
from fn.base import Link, Step
from fn.inplace.memory import written_into
from fn.inplace.protocol import DTYPE, WITH_FLOAT16, number
from fn.transforms.decay_and_lr import Decay, Rate

Tree = Any


class Head(NamedTuple):
    """The links in front of the one that keeps the moments. Their new states wait for the step to be written."""

    links: Sequence[Link]

    def run(self, updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Callable[[], None]]:
        """Return the updates that the links make, and what writes their new states.

        Args: updates, state, params: of the whole chain.
        """
        writes = []
        for link in self.links:
            before = link.state(state)
            updates, after = link.update(updates, before, params)
            if after is not before:
                writes.append(written_into(before, after))

        def write() -> None:
            for write_state in writes:
                write_state()

        return updates, write

    def gradients(
        self, updates: Tree, state: Tree, params: Tree, mu: Tree
    ) -> tuple[list[Tensor], Callable[[], None]]:
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
        rule = link.update.rule if isinstance(link.update, Step) else None
        if isinstance(rule, Rate):
            rates.append(rule.lr)
        elif isinstance(rule, Decay) and not rates:
            decay += rule.weight_decay
        else:
            return link
    return Descent(decay, tuple(rates))
