"""Pure steps in memory of their own: the peak of Muon's step is a quarter lower, 21 bytes a parameter in place of 29.

Counted are parameters, gradients, state and temporaries of a GPT of 1.3 billion parameters, all of whose matrices every
rank steps (`tests/scripts/gpu_counts.py`). Where matrices have owners nothing is saved, and where all are one batch a
ninth.

A link of a chain takes memory for what it returns while what it was given is still held: behind an average of low rank
a scale by shape, a decay and a rate are three times the params. What `NEW` links return lies in memory that nobody else
has, so that the links of `OVER` behind them, directly or in a partition, may write over it, and so may Adam's direction
over the mean of gradients. The numbers are the same.
Any other link may keep what it is given, in its state say: what has gone through one is written by nobody.

A momentum is nearly as cheap to form as to copy. So where its new state is to be written over the old one, `trace`
leaves it as it is, makes its direction where the new momentum was formed, and forms that once more when the step is
written (`late`). With it Muon's step takes memory for the updates and for one batch, whatever there is of momenta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fn import tree
from fn.base import Chained, Guarded, Step, UpdateFn, check_state, unchanged
from fn.compiling import original
from fn.inplace.memory import memory_of
from fn.kernels.flags import are_assumed, known
from fn.kernels.tracing import is_concrete
from fn.transforms.adam import Adam, AdamState
from fn.transforms.average import Average
from fn.transforms.decay_and_lr import Decay, Rate
from fn.transforms.lamb import TrustRatio
from fn.transforms.low_rank import LowRankAverage
from fn.transforms.masking import Partitioned
from fn.transforms.momentum import MomentumState, Trace
from fn.transforms.muon import NewtonSchulz
from fn.transforms.outer import OuterLocal
from fn.transforms.owned import Owned
from fn.transforms.scaling import ByShape
from fn.transforms.skip_nonfinite import all_finite
from fn.transforms.unsharded import Unsharded

Tree = Any

OVER = (Decay, Rate, ByShape, NewtonSchulz, TrustRatio)
"""Rules of links that can write over the updates that they are given."""

NEW = (*OVER, LowRankAverage, Average)
"""Rules of links that keep nothing of the updates that they return."""


class _Memory(NamedTuple):
    """own: the tensors that may be written, as keys. late: writes of states that wait for the step to be written."""

    own: Any
    late: list[Callable[[], None]] | None


def in_own_memory(update: UpdateFn, late: list[Callable[[], None]] | None = None) -> UpdateFn:
    """Return an update that returns the same, for a single step: it remembers whose the tensors of that are.

    Args: late: is filled with what writes those parts of the new state that it returns as they were. They come before
        all else that is written, if the step is taken and all flags that were assumed are true. None: none are late.
    """
    rules = [link.rule for link in _links(update) if isinstance(link, Step)]
    divided = any(isinstance(rule, Unsharded) or (isinstance(rule, OuterLocal) and rule.inside) for rule in rules)
    # a rank would see alone that a momentum of its own is not finite, and take the step again alone
    memory, update = _Memory(WeakIdKeyDictionary(), None if divided else late), original(update)
    if isinstance(update, Guarded):
        return update.around(_within(update.inner, memory))
    return _within(update, memory)


def _links(update: UpdateFn) -> list[UpdateFn]:
    """Return an update and all that are entered below."""
    update = original(update)
    rule = update.rule if isinstance(update, Step) else update
    inside: Iterable[UpdateFn] = ()
    if isinstance(rule, Chained):
        inside = rule.links
    elif isinstance(rule, Partitioned):
        inside = rule.update_of.values()
    elif isinstance(rule, Guarded | Owned | OuterLocal):
        inside = [rule.inner]
    return [update, *(link for one in inside for link in _links(one))]


def _within(update: UpdateFn, memory: _Memory) -> UpdateFn:
    update, alone = original(update), memory._replace(late=None)
    if isinstance(update, Guarded):  # it may keep the old state of its links, of which nothing must be written then
        return update.around(_within(update.inner, alone))
    if isinstance(update, Chained):
        return Chained(tuple(_within(link, memory) for link in update.links))
    rule = update.rule if isinstance(update, Step) else None
    if isinstance(rule, Partitioned):
        return rule.of({label: _within(one, memory) for label, one in rule.update_of.items()})
    if isinstance(rule, Owned):  # whether an owner's new state is finite, the other ranks have to hear
        return rule.of(_within(rule.inner, alone))
    if isinstance(rule, OuterLocal):
        return partial(_alone, rule.of(_within(rule.inner, memory)), memory)
    return update if update is unchanged else partial(_step, update, memory)


def _alone(update: UpdateFn, memory: _Memory, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    before = len(memory.late or ())
    out, after = update(updates, state, params)
    if memory.late is not None and after.dropped is not state.dropped:  # the step is left out, with its states
        del memory.late[before:]
    return out, after


def _step(update: UpdateFn, memory: _Memory, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    rule, leaves, found = update.rule if isinstance(update, Step) else None, tree.leaves(updates), None
    has_numbers = is_concrete(*leaves)
    if leaves and has_numbers and all(x in memory.own for x in leaves):
        if isinstance(rule, OVER):
            return rule.applied(updates, params, out=updates), state
        if isinstance(rule, Adam) and isinstance(state, AdamState):
            out, after = rule.applied(updates, state, out=updates)
            memory.own.update((x, True) for x in tree.leaves(out))
            return out, after
    if isinstance(rule, Trace) and memory.late is not None and has_numbers and are_assumed():
        found = _late(rule, memory.late, updates, state)
    out, after = update(updates, state, params) if found is None else (found, state)
    for x in leaves:
        memory.own.pop(x, None)
    if isinstance(rule, NEW) or found is not None or (isinstance(rule, Trace) and rule.nesterov):
        given = {memory_of(x) for x in (*leaves, *tree.leaves(after)) if isinstance(x, Tensor)}  # and what it may keep
        memory.own.update((x, True) for x in tree.leaves(out) if is_concrete(x) and memory_of(x) not in given)
    return out, after


def _late(rule: Trace, late: list[Callable[[], None]], updates: Tree, state: Tree) -> Tree | None:
    """Return what becomes of the updates, and let the new momentum be written late; None if it is not finite."""
    check_state(state, MomentumState)
    tree.check_updates(updates, state.mu)
    mu = rule.moved(updates, state.mu)
    if not known(all_finite(tree.leaves(mu))):
        return None
    late.append(partial(rule.moved, updates, state.mu, out=state.mu))
    return rule.direction(updates, mu, out=mu)
