"""Steps of the inner optimizer of `fn.outer` in place: alone, and in the warm-up, where the anchor follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import Link
from fn.inplace.protocol import InPlace, Staged
from fn.transforms.outer import OuterLocal, OuterState, OuterWarmup, narrows

Tree = Any

def around(rule: OuterWarmup | OuterLocal, link: Link, inner: InPlace) -> InPlace:
    """Return how a step of `outer` is staged. inner: how that of its inner optimizer is, in the state of the whole."""
    stage = _followed if isinstance(rule, OuterWarmup) else _alone
    fits = inner.fits if stage is _alone else lambda *args: _holds(link.state(args[1]), args[2]) and inner.fits(*args)
    return inner._replace(fits=fits, stage=lambda *args: stage(inner.stage(*args), link.state(args[1]), args[2]))


def _holds(own: OuterState, params: Tree) -> bool:
    """Tell whether the anchor has the range of the params; else only the pure step sees that it overflows."""
    return not any(narrows(x.dtype, p.dtype) for x, p in zip(tree.leaves(own.anchor), tree.leaves(params), strict=True))


def _followed(step: Staged, own: OuterState, params: Tree) -> Staged:
    def commit() -> None:
        step.commit()
        _copy(tree.leaves(own.anchor), tree.leaves(params))

    return step._replace(commit=commit)


def _alone(step: Staged, own: OuterState, params: Tree) -> Staged:
    """Leave out what is not finite, on this rank alone, and count it: no message tells the others."""
    ok, write, safe = step.settled()

    def commit() -> None:
        own.alone.add_(1)
        if ok:
            write()
        else:
            own.dropped.add_(1)

    return Staged(True, commit, safe)


def _copy(to: list[Tensor], new: list[Tensor]) -> None:
    torch._foreach_copy_(to, [x.detach() for x in new])
