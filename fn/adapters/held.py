"""Parameters without a gradient stay as they are, and so do the copies of them that a state keeps.

The master shards of `fn.sharded` and the anchor of 0/1 Adam take every step, as by a gradient of zero: the momentum
goes on for a while, and weight decay for good. Unless they are held, too, a parameter jumps to them when its gradients
return.

0/1 Adam leads the ranks together in its synchronising steps. A parameter that moved in local steps, elsewhere on each
rank, takes part in the next of them even if its gradients ended in between; from then on it is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.staged import commit
from fn.base import Phase, UpdateFn
from fn.transforms.in_place import Staged

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer

Tree = Any
Place = tuple[int, int]

COPIES = ("master", "anchor")
"""Fields of states that hold parameters; `init` copies these there."""


class Held:
    """Which parameters of an optimizer a step leaves as they are, (group, parameter) by index; alike on all ranks."""

    def __init__(self) -> None:
        self.places: frozenset[Place] = frozenset()
        self._alone: frozenset[Place] = frozenset()  # held in all local steps since the ranks agreed last
        self._masks: tuple[frozenset[Place], list[Tensor]] = frozenset(), []

    def follow(self, optimizer: Optimizer, phase: Phase) -> None:
        """Find them for a step that is about to be taken."""
        self.places = optimizer._gradients.absent
        if phase is not Phase.LOCAL:
            if self.places and _is_apart(optimizer):
                self.places &= self._alone
        elif self.places:
            self._alone = self._alone & self.places if _is_apart(optimizer) else self.places
        else:
            self._alone = frozenset()

    def keep(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the copies in the state as (leaf, what it holds, where it is to stay). The axes must be bound."""
        if not self.places:
            return []
        groups = sorted({g for g, _ in self.places})
        if self._masks[0] != self.places:
            self._masks = self.places, [mask for g in groups for mask in self._find(optimizer, g)]
        copies = [leaf for g in groups for leaf in _copies(optimizer.states[g])]
        return [(leaf, leaf.clone(), mask) for leaf, mask in zip(copies, self._masks[1], strict=True)]

    def _find(self, optimizer: Optimizer, g: int) -> list[Tensor]:
        """Return where a group's copies are of parameters that stay, which an init of ones for those tells."""
        if not _copies(optimizer.states[g]):
            return []
        params = optimizer.param_groups[g]["params"]
        ones = [torch.full_like(p.detach(), float((g, i) in self.places)) for i, p in enumerate(params)]
        return [leaf != 0 for leaf in _copies(optimizer._transforms[g].init(ones))]


def put_back(kept: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Write what `Held.keep` returned to where it was."""
    for leaf, before, mask in kept:
        leaf.copy_(torch.where(mask, before, leaf))


def held(update: UpdateFn, optimizer: Optimizer, phase: Phase) -> UpdateFn:
    """Return an update, in place, of all param groups that leaves alone what is held."""

    def step(grads: Tree, states: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        stay = optimizer._gradients.held
        stay.follow(optimizer, phase)
        kept = [] if phase is Phase.LOCAL else stay.keep(optimizer)
        found = update(grads, states, params)
        put_back(kept)
        return found

    return step


def commit_held(steps: Sequence[Staged], optimizer: Optimizer, phase: Phase) -> None:
    """Write the steps of all param groups as `staged.commit` does, and leave alone what is held."""
    stay = optimizer._gradients.held
    stay.follow(optimizer, phase)
    kept = stay.keep(optimizer)
    commit(steps, optimizer.states, [optimizer.param_groups[g]["params"][i] for g, i in stay.places])
    put_back(kept)


def _copies(state: Tree) -> list[Tensor]:
    return [leaf for name in COPIES for leaf in tree.leaves(tree.fields(state, name))]


def _is_apart(optimizer: Optimizer) -> bool:
    """Tell whether ranks took local steps since they agreed; it is replicated."""
    return any(float(elapsed) > 0 for elapsed in tree.fields(optimizer.states, "elapsed"))
