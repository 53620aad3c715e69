"""Aliasing checks, and copying a new state into the old one's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import NewParams
from fn.errors import expected
from fn.kernels import rules
from fn.kernels.lists import elementwise
from fn.kernels.tracing import is_concrete

Tree = Any


def copy_plan(old: Tree, new: Tree, renewed: Tree = ()) -> Callable[[], None]:
    """Return a function that copies the leaves of `new` into those of `old`; those of `renewed` get other memory first.

    A leaf of `new` that lies in the memory of `old`, but is not the leaf at its place, is copied aside now: what is
    written first would change it.
    Raises: ValueError now, if structure, shapes or dtypes differ, or if a leaf cannot be written.
    """
    olds, news = _alike(old, new)
    changed = [(o, n) for o, n in zip(olds, news, strict=True) if n is not o]
    for o, _ in changed:
        if is_folded(o):
            path = next(path for path, x in zip(tree.paths(old), olds, strict=True) if x is o)
            raise ValueError(
                f"state: expected leaf {path or 'the root'!r} to have elements of its own, but those of the shape "
                f"{tuple(o.shape)} and the strides {o.stride()} share memory, as expand makes them; clone it in init"
            )
    # Copied aside before anything is written: the leaf may be one that an earlier copy overwrites.
    pairs = [*zip([o for o, _ in changed], aside([n for _, n in changed], olds), strict=True)]
    kept = {id(x) for x in tree.leaves(renewed)}

    def write() -> None:
        for o, _ in changed:
            if id(o) in kept:
                o.set_(torch.empty_like(o))
        # What a compiled graph writes into a 0-d tensor of float64 itself, torch (2.13) loses: () -> (1,)
        copy_into([(o, n) if o.dim() else (o.view(1), n.view(1)) for o, n in pairs])

    return write


def copy_into(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first tensor of each pair the second one, on a device by a launch for many."""
    listed: tuple[list[tuple[Tensor, Tensor]], ...] = [], []
    for x, y in pairs:
        if x.device.type != "cpu" and x.dim() > 0 and 0 not in y.stride():
            # Counts apart from floats: kernels for lists calculate in floating point.
            listed[x.is_floating_point()].append((x, y))
        else:
            x.copy_(y)
    counts, floats = ([*map(list, zip(*some, strict=True))] for some in listed)
    if counts:
        torch._foreach_copy_(counts[0], counts[1])
    if floats:
        elementwise(rules.same, (floats[1],), out=[floats[0]])


def successor(old: Tree, new: Tree) -> Callable[[], None]:
    """Return a function that gives the tensors of a state the memory of those of the next one.

    Raises: ValueError now, before anything is written, if structure, a shape or a dtype differs.
    """
    olds, news = _alike(old, new)

    def write() -> None:
        for o, n in zip(olds, news, strict=True):
            if o is not n:
                o.set_(n)  # no copy, and whoever holds the old tensor sees the new numbers

    return write


def _alike(old: Tree, new: Tree) -> tuple[list[Any], list[Any]]:
    """Return the leaves of two states. Raises: ValueError if structure, a shape or a dtype differs."""
    if tree.are_lists(old, new):
        olds, news = old, new
    else:
        (olds, structure), (news, new_structure) = map(tree.flatten, (old, new))
        if structure != new_structure:
            raise ValueError(
                f"update: changed the structure of the state from {structure} to {new_structure}; return the trees "
                "that init returned"
            )
    for o, n in zip(olds, news, strict=True):
        if n is not o and (o.shape != n.shape or o.dtype != n.dtype):
            raise ValueError(
                f"update: changed a leaf from {o.dtype} {tuple(o.shape)} to {n.dtype} {tuple(n.shape)}; keep the dtype "
                "and the shape that init gave it"
            )
    return olds, news


def memory_of(x: Tensor) -> int:
    """Return an identifier that tensors in the same memory share."""
    memory: int = x.untyped_storage()._cdata if is_concrete(x) else id(x)
    return memory


def _memories(tensors: Sequence[Any]) -> list[int]:
    """Return the memory of each leaf; of many at once, for a step asks for that of all its leaves."""
    if is_concrete(*tensors):
        return [x.untyped_storage()._cdata for x in tensors]
    return [*map(memory_of, tensors)]


def aside(tensors: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return tensors, copied where they lie in the memory of one of these leaves, which are to be written.

    While a compiler traces, for which memory is no constant: where they are one of them.
    """
    if torch.compiler.is_compiling():
        return [x.clone() if any(x is leaf for leaf in leaves) else x for x in tensors]
    known = {*_memories(leaves)}
    return [
        x.clone() if memory in known and isinstance(x, Tensor) else x
        for x, memory in zip(tensors, _memories(tensors), strict=True)
    ]


def is_folded(x: Tensor) -> bool:
    """Return whether elements of a tensor may share memory, as `expand` makes them; such a tensor cannot be written."""
    if x.is_contiguous():
        return False
    reach = 0  # where the dimensions with smaller strides end; beyond it no element can lie upon another
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += (size - 1) * stride if size else 0
    return False


def overlaps(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Find pairs of tensors where one begins within the other, by number and the earlier one first.

    Columns of one matrix do, too: only a list of all places would tell that they lie between each other.
    """
    starts = [(x.data_ptr(), i) for i, x in enumerate(tensors) if is_concrete(x) and x.numel() and x.data_ptr()]
    before: list[int] = []  # those that reach behind where the next one starts
    for start, i in sorted(starts):
        # Sorted by where they start, each tensor is compared with those only that reach behind its start.
        before = [j for j in before if tensors[j].data_ptr() + _bytes(tensors[j]) > start]
        yield from ((min(i, j), max(i, j)) for j in before if tensors[i].device == tensors[j].device)
        before.append(i)


def _bytes(x: Tensor) -> int:
    return x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))


def move(params: Tree, moves: Tree) -> None:
    """Add updates to parameters, in the wider of the two dtypes, rounded once; or copy `NewParams`, rounded."""
    pairs = [*zip(tree.leaves(params), tree.leaves(moves), strict=True)]
    if isinstance(moves, NewParams):
        copy_into(pairs)
        return
    if pairs and all(x.device.type != "cpu" for x in pairs[0]):
        # kernels calculate in float32, which would round a float64 update before it is added, and once more after
        fits = [(p, u) for p, u in pairs if p.dtype == u.dtype or u.dtype != torch.float64]
        if fits:
            olds, news = map(list, zip(*fits, strict=True))
            elementwise(rules.added, (olds, news), wide=True, out=[olds])
        pairs = [(p, u) for p, u in pairs if p.dtype != u.dtype and u.dtype == torch.float64]
    alike = [(p, u) for p, u in pairs if p.dtype == u.dtype]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for p, u in pairs:
        if p.dtype != u.dtype:
            # The sum is in the wider dtype of the two, and is rounded once, by the copy.
            p.copy_(p + u)


def check_apart(state: Tree, params: Tree) -> None:
    """Refuse a state whose leaves lie in the memory of one another or of the params, with a ValueError that names one.

    Writing one of them would overwrite the other one.
    """
    if shared := _shared(state, params):
        leaf = tree.paths(state)[shared[0]] or "the root"
        got = "that of another leaf or of the params, with which it would be overwritten"
        raise ValueError(expected("state", f"leaf {leaf!r} to have memory of its own", got, "clone it in init"))


def owned(state: Tree, params: Tree) -> Tree:
    """Return a state whose leaves have memory of their own, so that writing one changes no other one and no param."""
    leaves, structure = tree.flatten(state)
    shared = {*_shared(state, params), *(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and is_folded(x))}
    if not shared:
        return state
    return tree.unflatten(structure, [x.clone() if i in shared else x for i, x in enumerate(leaves)])


def _shared(state: Tree, params: Tree) -> list[int]:
    """Return the places of leaves that begin where a leaf before them does, or lie in the params' memory."""
    leaves = tree.leaves(state)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not is_concrete(*tensors):
        return []
    # The common case first, by sets: a step asks for hundreds of leaves.
    starts = [start for x in tensors if (start := x.data_ptr())]  # 0 where there is no memory
    theirs = {*_memories([p for p in tree.leaves(params) if isinstance(p, Tensor)])}
    if len({*starts}) == len(starts) and theirs.isdisjoint(_memories(tensors)):
        return []
    seen, shared = set[int](), []
    for place, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.numel():
            if x.data_ptr() in seen or memory_of(x) in theirs:
                shared.append(place)
            seen.add(x.data_ptr())
    return shared
