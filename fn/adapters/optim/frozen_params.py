"""Parameters without a gradient stay as they are, and so do the copies of them that a state keeps.

The master shards of `fn.sharded` and the anchor of 0/1 Adam take every step, as by a gradient of zero: the momentum
goes on for a while, and weight decay for good. Unless they are held, too, a parameter jumps to them when its gradients
return.

0/1 Adam leads the ranks together in its synchronising steps. A parameter that moved in local steps, elsewhere on each
rank, takes part in the next of them even if its gradients ended in between; from then on it is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Phase, Transform
from fn.transforms.zero_one_adam import ZeroOneAdamState

Tree = Any
Place = tuple[int, int]

class FrozenParams:
    """Which parameters of an optimizer a step leaves as they are, (group, parameter) by index; alike on all ranks."""

    def __init__(self) -> None:
        self.places: frozenset[Place] = frozenset()
        self._alone: frozenset[Place] = frozenset()  # held in all local steps since the ranks agreed last
        self._masks: tuple[frozenset[Place], list[Tensor]] = frozenset(), []

    @contextmanager
    def during(
        self,
        phase: Phase,
        absent: frozenset[Place],
        params: Sequence[Sequence[Tensor]],
        states: Tree,
        transforms: Sequence[Transform],
    ) -> Iterator[None]:
        """Find them for a step, and put the state's copies of them back when it has been taken. The axes must be bound.

        The parameters themselves are for the step to leave alone.

        Args: absent: the parameters that have no gradient. params, states, transforms: of each param group.
        """
        held = absent & self._alone if absent and _is_apart(states) else absent
        if phase is Phase.LOCAL:
            self.places, self._alone = absent, held
            yield
            return
        self.places = held
        copies = [leaf for g in self._groups() for leaf in _copies(states[g])]
        masks = self._masks_of(params, states, transforms) if copies else []
        before = [leaf.clone() for leaf in copies]
        yield
        for leaf, old, mask in zip(copies, before, masks, strict=True):
            leaf.copy_(torch.where(mask, old, leaf))

    def among(self, params: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the parameters that the step leaves as they are. Args: params: of each param group."""
        return [params[g][i] for g, i in self.places]

    def _groups(self) -> list[int]:
        return sorted({g for g, _ in self.places})

    def _masks_of(
        self, params: Sequence[Sequence[Tensor]], states: Tree, transforms: Sequence[Transform]
    ) -> list[Tensor]:
        """Return where the copies are of parameters that stay, which an init of ones for those tells."""
        if self._masks[0] != self.places:
            masks = []
            for g in self._groups():
                ones = [torch.full_like(p.detach(), float((g, i) in self.places)) for i, p in enumerate(params[g])]
                if _copies(states[g]):
                    masks += [leaf != 0 for leaf in _copies(transforms[g].init(ones))]
            self._masks = self.places, masks
        return self._masks[1]


def _copies(state: Tree) -> list[Tensor]:
    return tree.leaves(roles.find(state, "copies"))


def _is_apart(states: Tree) -> bool:
    """Tell whether ranks took local steps since they agreed; it is replicated."""
    return any(float(state.elapsed) > 0 for state in tree.instances(states, ZeroOneAdamState))
