"""Steps of `late` in place: they keep a copy of each gradient, and leave the params alone."""

from __future__ import annotations

from typing import Any

import torch

from fn import tree
from fn.base import UpdateFn
from fn.inplace.links import MatchedChain
from fn.inplace.match import register
from fn.inplace.memory import copy_into
from fn.inplace.outer import as_inner
from fn.inplace.protocol import InPlace, Staged
from fn.transforms.late import LateLocal, LateState, LateWarmup

Tree = Any

AROUND = "something stands around fn.late, which is a whole optimizer"


def local(rule: LateLocal, chain: MatchedChain) -> InPlace | str:
    """Return how a step is staged that keeps its gradients and moves nothing."""
    if chain.head.links:
        return AROUND
    pure: UpdateFn = chain.update

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged:
        own: LateState = chain.link.state(state)
        tree.check_updates(updates, own.gradients)
        olds, grads = tree.lists(own.gradients, updates)
        # A copy: a script may keep the gradient's memory, and fill it anew while the mean travels. In other memory than
        # the last one, which a mean that is on its way may read. Contiguous, as it is sent.
        kept = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in olds]
        copy_into([*zip(kept, grads, strict=True)])

        def commit() -> None:
            for x, new in zip(olds, kept, strict=True):
                x.set_(new)

        return Staged(True, commit)

    return InPlace(pure, stage)


register(LateLocal, local, looks=False, last=AROUND)
register(LateWarmup, as_inner, last=AROUND)
