"""Steps of `outer` and `average_params` in place: their inner optimizer's links stand in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import Guarded, links_of
from fn.collectives.agreement import device_of, true_on_all
from fn.inplace.links import MatchedChain
from fn.inplace.match import matched, register
from fn.inplace.protocol import InPlace, Staged, on_host
from fn.transforms.outer import OuterLocal, OuterState, OuterWarmup, PlainWarmup
from fn.transforms.outer_checks import check_alike, narrows

Tree = Any

BEHIND = "a weight decay or a rate stands behind the local steps, which have their own"


def warmup(rule: OuterWarmup, chain: MatchedChain) -> InPlace | str:
    """Return how a warm-up step is staged, behind which the anchor is the params."""
    inner = as_inner(rule, chain)
    if isinstance(inner, str):
        return inner

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        own: OuterState = chain.link.state(state)
        check_alike(on_host(own.alone))  # as the call would refuse it, before anything is sent
        anchor, leaves = tree.leaves(own.anchor), tree.leaves(params)
        if any(narrows(a.dtype, p.dtype) for a, p in zip(anchor, leaves, strict=True)):
            return None  # the anchor may overflow where the params do not, which only the pure step sees
        step = inner.stage(updates, state, params)
        if step is None:
            return None

        def commit() -> None:
            step.commit()
            torch._foreach_copy_(anchor, [p.detach() for p in leaves])

        return step._replace(commit=commit)

    return inner._replace(stage=stage)


def plain_warmup(rule: PlainWarmup, chain: MatchedChain) -> InPlace | str:
    """Return how a warm-up step without an anchor is staged."""
    inner = as_inner(rule, chain)
    if isinstance(inner, str):
        return inner

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        check_alike(on_host(chain.link.state(state).alone))
        return inner.stage(updates, state, params)

    return inner._replace(stage=stage)


def local(rule: OuterLocal, chain: MatchedChain) -> InPlace | str:
    """Return how a local step is staged."""
    inner = as_inner(rule, chain)
    if isinstance(inner, str):
        return inner

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        step = inner.stage(updates, state, params)
        if step is None:
            return None
        if rule.together:  # as the pure step does, which other ranks of the island may take
            ok = step.ok if isinstance(step.ok, Tensor) else torch.tensor(step.ok, dtype=torch.bool, device="cpu")
            # Ranks of an island take or leave a local step together; one alone would drift from the others.
            step = step._replace(ok=true_on_all(ok, rule.together, device_of(params)))
        return _alone(step, chain.link.state(state))

    return inner._replace(stage=stage)


def as_inner(rule: Any, chain: MatchedChain) -> InPlace | str:
    """Return how the step of the inner optimizer is staged, in the state of the whole."""
    assert isinstance(chain.update, Guarded)
    inner = links_of(rule.inner, (*chain.link.path, 0))  # 0: `inner` of their states
    return matched(chain.update, [*chain.head.links, *inner], True)


def _alone(step: Staged, state: OuterState) -> Staged:
    """Leave out what is not finite, on this rank alone, and count it: no message tells the others."""

    def commit() -> None:
        state.alone.add_(1)
        step.commit()

    def drop() -> None:
        state.alone.add_(1)
        if step.otherwise is None:
            state.dropped.add_(1)
        else:
            step.otherwise()

    return step._replace(commit=commit, otherwise=drop)


register(OuterWarmup, warmup, last=BEHIND)
register(PlainWarmup, plain_warmup, last=BEHIND)
register(OuterLocal, local, looks=False, last=BEHIND)
