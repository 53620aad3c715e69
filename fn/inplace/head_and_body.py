"""A step in two parts: the head communicates, may fail, and is kept aside; the body behind it is written as it is made.

    average, clip              trace, orthogonalize | scale_by_adam, decay, rate
    head: results kept aside   body: a chunk of tensors goes through all links, and is written before the next one

The last link that communicates, needs all tensors at once, or says nothing of itself ends the head. Whether a step is
taken is judged by what the head returns. Behind it stand rules that take each tensor by itself (`tensorwise`), so what
they need beside the updates is memory for one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

from torch import Tensor

from fn import tree
from fn.base import Chained, UpdateFn, inner_updates, unchanged, with_inner_updates
from fn.compiling import original
from fn.inplace.memory import copy_into, move

Tree = Any
Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of a state, each with its next number."""

CHUNK = 1 << 26
"""Numbers of a chunk, at most; a tensor that is larger is a chunk of its own. 256 MiB in float32."""


def split(update: UpdateFn) -> tuple[UpdateFn, UpdateFn]:
    """Return the head and the body of an update. Each takes the state of the whole, and passes on the other's part."""
    update = original(update)
    if isinstance(update, Chained):
        heads, bodies = [*update.inner], [unchanged] * len(update.inner)
        for i, link in reversed([*enumerate(update.inner)]):
            heads[i], bodies[i] = split(link)
            if heads[i] is not unchanged:
                break
        return _without_nothing(heads), Chained((*bodies,))
    if not getattr(update, "tensorwise", False):
        return update, unchanged
    if not inner_updates(update):
        return unchanged, update
    if hasattr(update, "branches"):
        return _split_branches(update)
    return with_inner_updates(update, lambda inner: split(inner)[0]), with_inner_updates(
        update, lambda inner: split(inner)[1]
    )


def _without_nothing(links: Sequence[UpdateFn]) -> UpdateFn:
    return unchanged if all(link is unchanged for link in links) else Chained((*links,))


def _split_branches(update: Any) -> tuple[UpdateFn, UpdateFn]:
    heads: list[UpdateFn] = []

    def part(which: int, inner: UpdateFn) -> UpdateFn:
        inner = original(inner)
        # What skips a step of its own in one branch would do so for the body of all.
        is_single = inner_updates(inner) and not isinstance(inner, Chained) and not hasattr(inner, "branches")
        parts = (inner, unchanged) if is_single else split(inner)
        heads.append(parts[0])
        return parts[which]

    head, body = with_inner_updates(update, partial(part, 0)), with_inner_updates(update, partial(part, 1))
    return (unchanged if all(inner is unchanged for inner in heads) else head), body


class Plan(NamedTuple):
    """How tensors go through a body.

    lanes: of each tensor what it goes through; those of a lane can go together. run: (places of tensors of one lane,
    their updates) -> updates, and what changes in the state.
    """

    lanes: list[Any]
    run: Callable[[Sequence[int], list[Tensor]], tuple[list[Tensor], Pairs]]


def plan_of(body: UpdateFn, state: Tree, params: Tree) -> Plan:
    """Return how the tensors of params go through a body, whose parts of the state are found once."""
    body, leaves = original(body), tree.leaves(params)
    if body is unchanged:
        return Plan([()] * len(leaves), lambda places, updates: (updates, []))
    if isinstance(body, Chained):
        links = [(link, own) for link, own in zip(body.inner, state, strict=True) if original(link) is not unchanged]
        return _one_after_the_other([plan_of(link, own, params) for link, own in links], len(leaves))
    if hasattr(body, "branches"):
        return _by_branch(body.branches(state, params), leaves)
    if own := inner_updates(body):
        (inner,) = own
        return plan_of(inner, state[0], params)  # 0: `inner` of their states
    return _of_rule(body, state, params)


def _one_after_the_other(plans: Sequence[Plan], n: int) -> Plan:
    def run(places: Sequence[int], updates: list[Tensor]) -> tuple[list[Tensor], Pairs]:
        changed: Pairs = []
        for plan in plans:
            updates, more = plan.run(places, updates)
            changed += more
        return updates, changed

    return Plan([tuple(plan.lanes[i] for plan in plans) for i in range(n)], run)


def _by_branch(branches: Sequence[Any], leaves: Sequence[Tensor]) -> Plan:
    lanes: list[Any] = [None] * len(leaves)
    branch_of: dict[int, tuple[Any, Plan, list[int]]] = {}
    for name, branch in enumerate(branches):
        plan, numbers = plan_of(branch.update, branch.state, branch.shown(leaves, branch.chosen)), count()
        for i in branch.chosen:
            own = [*islice(numbers, len(branch.shown(leaves, [i])))]  # a tensor may be shown in parts
            branch_of[i], lanes[i] = (branch, plan, own), (name, *(plan.lanes[k] for k in own))

    def run(places: Sequence[int], updates: list[Tensor]) -> tuple[list[Tensor], Pairs]:
        if places[0] not in branch_of:
            return updates, []
        branch, plan, _ = branch_of[places[0]]
        shown = branch.shown(dict(zip(places, updates, strict=True)), places)
        made, changed = plan.run([k for i in places for k in branch_of[i][2]], shown)
        whole = branch.whole(made, places)
        return [whole[i] for i in places], changed

    return Plan(lanes, run)


def _of_rule(rule: UpdateFn, state: Tree, params: Tree) -> Plan:
    leaves, structure = tree.flatten(params)
    values = [*state] if hasattr(state, "_fields") else []
    flat = [tree.flatten(value) for value in values]
    # A field like the params has an entry for each tensor; counts, say, are of all.
    fields = [own if like == structure else None for own, like in flat]

    def run(places: Sequence[int], updates: list[Tensor]) -> tuple[list[Tensor], Pairs]:
        parts = [value if own is None else [own[i] for i in places] for value, own in zip(values, fields, strict=True)]
        before = type(state)(*parts) if parts else state
        updates, after = rule(updates, before, [leaves[i] for i in places])
        both = zip(tree.leaves(before), tree.leaves(after), strict=True)
        return updates, [(old, new) for old, new in both if new is not old]

    return Plan([()] * len(leaves), run)


def chunks(lanes: Sequence[Any], leaves: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of tensors that go through a body together: of one lane, equal shapes beside each other.

    The largest chunk comes first: where there is no memory for it, nothing is written yet.

    >>> import torch
    >>> chunks(["a", "b", "a"], [torch.zeros(2), torch.zeros(3), torch.zeros(4)])
    [[2, 0], [1]]
    """
    made: list[list[int]] = []
    for places in tree.places_by((lane, x.dtype, x.device) for lane, x in zip(lanes, leaves, strict=True)).values():
        room = -1
        for i in sorted(places, key=lambda i: (-leaves[i].numel(), leaves[i].shape)):
            room -= leaves[i].numel()
            if room < 0:
                made.append([])
                room = CHUNK - leaves[i].numel()
            made[-1].append(i)
    return sorted(made, key=lambda places: -sum(leaves[i].numel() for i in places))


def take(body: UpdateFn, updates: Tree, state: Tree, params: Tree) -> None:
    """Take the step of a body, and write it. Args: updates: those of the head, which are not written."""
    plan, leaves, moves = plan_of(body, state, params), tree.leaves(params), tree.leaves(updates)
    counts: dict[int, tuple[Tensor, Tensor]] = {}
    for places in chunks(plan.lanes, leaves):
        made, changed = plan.run(places, [moves[i] for i in places])
        move([leaves[i] for i in places], made)
        # Numbers of all tensors are the same in every chunk; written now, the next chunk would count on from them.
        counts.update((id(old), (old, new)) for old, new in changed if not old.dim())
        copy_into([(old, new) for old, new in changed if old.dim()])
    # What a compiled graph writes into a 0-d tensor of float64 itself, torch (2.13) loses: () -> (1,)
    copy_into([(old.view(1), new.view(1)) for old, new in counts.values()])
