"""Steps of `late` in place: a gradient that is kept for the next step is taken over, not copied."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fn import tree
from fn.base import UpdateFn
from fn.inplace.links import MatchedChain
from fn.inplace.match import register
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
        pairs = [*zip(*tree.lists(own.gradients, updates), strict=True)]

        def commit() -> None:
            for kept, g in pairs:
                # The memory of the last gradients stays as it is: a mean that is on its way may read it.
                kept.set_(g.detach() if may_be_taken(g, kept) else g.detach().to(kept, copy=True).contiguous())

        return Staged(True, commit)

    return InPlace(pure, stage)


def may_be_taken(g: Tensor, like: Tensor) -> bool:
    """Tell whether a gradient can be taken over: it is dense and has memory of its own, so that it lies in no bucket.

    Where DDP has `gradient_as_bucket_view`, gradients are views of its buckets, which the next backward pass writes.
    """
    alone = g.is_contiguous() and not g._is_view() and g.untyped_storage().nbytes() == g.numel() * g.element_size()
    return alone and type(g) is Tensor and g.dtype == like.dtype and g.device == like.device


register(LateLocal, local, looks=False, last=AROUND)
register(LateWarmup, as_inner, last=AROUND)
