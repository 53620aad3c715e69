"""Parameters without a gradient: fine if all ranks agree, an error on all ranks if they do not.

Which gradients are absent is compared only when it changes. A rank on which it changed puts a NaN among its
gradients: the step is then skipped on all ranks, as any step with a NaN is, and all of them meet in `settle`. That
keeps the comparison off the steady path, and no rank waits for a message that another never sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn import tree
from fn.collectives.agreement import check_agreement

Place = tuple[int, int]


class Gradients:
    """The gradients of all param groups, and which of them the ranks agreed to be absent."""

    def __init__(self) -> None:
        self.absent: frozenset[Place] = frozenset()
        self._now: frozenset[Place] = frozenset()

    def collect(self, groups: Sequence[Sequence[Tensor]], ask: bool = True) -> tuple[list[Tensor], ...]:
        """Return a gradient per parameter, zeros where there is none; NaN to ask, if the absent ones changed.

        Args: groups: the parameters of each param group. ask: False in a step in which nothing is sent.
        Raises: TypeError if a gradient is sparse or complex.
        """
        self._now = _absent(groups)
        grads = tuple([torch.zeros_like(p) if p.grad is None else p.grad for p in params] for params in groups)
        for g, found in enumerate(grads):
            tree.check_real(found, f"gradients of param group {g}")
        if ask and self.absent != self._now:
            grads = tuple([torch.full_like(x, float("nan")) for x in found] for found in grads)
        return grads

    def follow(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Take the gradients that are absent now as those that the ranks agreed on; DDP has seen to that."""
        self._now = self.absent = _absent(groups)

    def settle(self, axes: Sequence[str], groups: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]) -> bool:
        """After a skipped step: compare with the other ranks; tell whether the step should be taken again.

        Raises: ValueError, on every rank, that names a rank and a parameter, if the ranks differ.
        """
        found = {
            f"the gradient of param group {g}, parameter {name}": "absent" if (g, i) in self._now else "present"
            for g, group in enumerate(names)
            for i, name in enumerate(group)
        }
        device = next((p.device for params in groups for p in params), torch.device("cpu"))
        for axis in axes:
            check_agreement(axis, found, device)
        changed = self.absent != self._now
        self.absent = self._now
        return changed


def _absent(groups: Sequence[Sequence[Tensor]]) -> frozenset[Place]:
    return frozenset((g, i) for g, params in enumerate(groups) for i, p in enumerate(params) if p.grad is None)
