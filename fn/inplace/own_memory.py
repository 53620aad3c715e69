"""Pure steps that write into memory of their own: what is element-wise behind an exchange takes no more of it.

A link of a chain takes memory for what it returns while what it was given is still held: behind an average of low rank
a scale by shape, a decay and a rate are three times the params. What `NEW` links return lies in memory that nobody else
has, so that the links of `ELEMENTWISE` behind them, directly or in a partition, may write into it. The numbers are the
same. Any other link may keep what it is given, in its state say: what has gone through one is written by nobody.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from fn import tree
from fn.base import Chained, Guarded, Step, UpdateFn, unchanged
from fn.compiling import original
from fn.inplace.memory import memory_of
from fn.kernels.tracing import is_concrete
from fn.transforms.decay_and_lr import Decay, Rate
from fn.transforms.low_rank import LowRankAverage
from fn.transforms.masking import Partitioned
from fn.transforms.scaling import ByShape

Tree = Any

ELEMENTWISE = (Decay, Rate, ByShape)
"""Rules of links that can write over the updates that they are given."""

NEW = (*ELEMENTWISE, LowRankAverage)
"""Rules of links that keep nothing of the updates that they return."""


def in_own_memory(update: UpdateFn) -> UpdateFn:
    """Return an update that returns the same, for a single step: it remembers whose the tensors of that are."""
    return _within(update, WeakIdKeyDictionary())


def _within(update: UpdateFn, own: Any) -> UpdateFn:
    """Args: own: the tensors that may be written, as keys."""
    update = original(update)
    if isinstance(update, Guarded):
        return update.around(_within(update.inner, own))
    if isinstance(update, Chained):
        return Chained(tuple(_within(link, own) for link in update.links))
    if isinstance(update, Step) and isinstance(update.rule, Partitioned):
        return update.rule.of({label: _within(one, own) for label, one in update.rule.update_of.items()})
    return update if update is unchanged else partial(_step, update, own)


def _step(update: UpdateFn, own: Any, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    rule, leaves = update.rule if isinstance(update, Step) else None, tree.leaves(updates)
    if isinstance(rule, ELEMENTWISE) and leaves and is_concrete(*leaves) and all(x in own for x in leaves):
        return rule.applied(updates, params, out=updates), state
    out, after = update(updates, state, params)
    for x in leaves:
        own.pop(x, None)
    if isinstance(rule, NEW):
        given = {memory_of(x) for x in leaves}
        own.update((x, True) for x in tree.leaves(out) if is_concrete(x) and memory_of(x) not in given)
    return out, after
