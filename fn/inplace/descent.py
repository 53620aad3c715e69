"""What stands behind the moments: weight decays, then learning rates, which the kernels take as two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from fn.base import Link, Step
from fn.inplace.host_scalars import on_host
from fn.transforms.weights import Decay, Rate

Tree = Any


class Descent(NamedTuple):
    """p <- p - rate (u + weight_decay p). rates: of the links, numbers or 0-d tensors."""

    weight_decay: float
    rates: tuple[float | Tensor, ...]

    @property
    def rate(self) -> float:
        """Return the product of the rates, on the host; -1 without any, where the update is added as it is."""
        signed = prod((-float(on_host(lr) if isinstance(lr, Tensor) else lr) for lr in self.rates), start=1.0)
        return -signed


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
