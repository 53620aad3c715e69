"""Pure steps in memory of their own: the peak of Muon's step is a quarter lower, 21 bytes a parameter in place of 29.

Counted are parameters, gradients, state and temporaries of a GPT of 1.3 billion parameters, all of whose matrices every
rank steps (`tests/scripts/gpu_counts.py`). Where matrices have owners, decay and rate are written over what
arrived: 5.4 bytes a parameter in place of 8.8. Where all are one batch a ninth is saved.

A link of a chain takes memory for what it returns while what it was given is still held: behind an average of low rank
a scale by shape, a decay and a rate are three times the params. What links return whose rules say is_fresh lies in
memory that nobody else has, so that rules behind them that say takes_out, directly or in a partition, may write over
it. So may Adam's direction over the mean of gradients. The numbers are the same.
Any other link may keep what it is given, in its state say: what has gone through one is written by nobody.

A momentum is nearly as cheap to form as to copy. So where its new state is to be written over the old one, a rule with
`late`, such as that of `trace`, leaves it as it is, makes its direction where the new momentum was formed, and forms
that once more when the step is written. With it Muon's step takes memory for the updates and for one batch, whatever
there is of momenta. `fn.base.UpdateFn` says what a rule may have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fn import roles, tree
from fn.base import Guarded, UpdateFn, rules_in, unchanged
from fn.compiling import original
from fn.inplace.memory import memory_of
from fn.kernels.flags import are_assumed
from fn.kernels.tracing import is_concrete

Tree = Any


class _Memory(NamedTuple):
    """own: the tensors that may be written, as keys. late: writes of states that wait for the step to be written."""

    own: Any
    late: list[Callable[[], None]] | None


def in_own_memory(update: UpdateFn, late: list[Callable[[], None]] | None = None) -> UpdateFn:
    """Return an update that returns the same, for a single step: it remembers whose the tensors of that are.

    Args: late: is filled with what writes those parts of the new state that it returns as they were. They come before
        all else that is written, if the step is taken and all flags that were assumed are true. None: none are late.
    """
    update = original(update)
    # where ranks leave out a step together, one would see alone that its momentum is not finite, and step again alone
    together = any(getattr(rule, "together", ()) for rule in rules_in(update))
    memory = _Memory(WeakIdKeyDictionary(), None if together else late)
    if isinstance(update, Guarded):  # that of the whole, which decides about all that is late
        return update.mapped(partial(_within, memory))
    return _within(memory, update)


def _within(memory: _Memory, update: UpdateFn) -> UpdateFn:
    update = original(update)
    if not hasattr(update, "mapped"):
        return update if update is unchanged else partial(_step, update, memory)
    if not getattr(update, "hands_down", False):
        # A guard may keep the old state of its links, of which nothing must be written then; and whether an owner's new
        # state is finite, the other ranks have to hear.
        memory = memory._replace(late=None)
    fresh = getattr(update, "is_fresh", False)
    return partial(_unless_dropped, update.mapped(partial(_within, memory)), memory, fresh)


def _unless_dropped(
    update: UpdateFn, memory: _Memory, fresh: bool, updates: Tree, state: Tree, params: Tree, /
) -> tuple[Tree, Tree]:
    """Take a step; where it leaves itself out and counts that, forget what its links would write late."""
    before = len(memory.late or ())
    out, after = update(updates, state, params)
    if fresh:
        _own(memory, out, updates, after)
    if memory.late is not None and hasattr(state, "_fields"):
        counts = roles.roles_of(state).dropped
        if any(getattr(after, name) is not getattr(state, name) for name in counts):
            del memory.late[before:]
    return out, after


def _step(update: UpdateFn, memory: _Memory, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    leaves = tree.leaves(updates)
    has_numbers = is_concrete(*leaves)
    rule: Any = update
    late = getattr(rule, "late", None)
    # All of it was made in this step and is held by nobody else, so the rule may write its result into it.
    if getattr(rule, "takes_out", False) and leaves and has_numbers and all(x in memory.own for x in leaves):
        out, after = rule(updates, state, params, out=updates)
        memory.own.update((x, True) for x in tree.leaves(out))
        return out, after
    postponed = None
    if late is not None and memory.late is not None and has_numbers and are_assumed():
        postponed = late(updates, state)
    if postponed is None:
        out, after = update(updates, state, params)
    else:
        assert memory.late is not None
        (out, write), after = postponed, state
        memory.late.append(write)
    for x in leaves:
        # This rule may keep what it was given, so from now on nobody writes over it.
        memory.own.pop(x, None)
    if getattr(update, "is_fresh", False) or postponed is not None:
        _own(memory, out, updates, after)
    return out, after


def _own(memory: _Memory, out: Tree, updates: Tree, after: Tree) -> None:
    """Count what a rule returned as its own, but for what it was given and what it may keep in its state."""
    given = {memory_of(x) for x in (*tree.leaves(updates), *tree.leaves(after)) if isinstance(x, Tensor)}
    memory.own.update((x, True) for x in tree.leaves(out) if is_concrete(x) and memory_of(x) not in given)
