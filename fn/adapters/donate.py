"""Run a pure update in the buffers of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.interrupts import begin_writing
from fn.base import UpdateFn
from fn.kernels.eager import is_eager

Tree = Any


def donate(update: UpdateFn) -> UpdateFn:
    """Make a pure update write its new state back into the buffers of the old one.

    The returned function has the same signature and results, but the state that it returns *is* the state that it
    was given, with new contents: buffers keep their addresses from step to step. Under `torch.compile` the copies
    fuse into the update and nothing is allocated. An update that is a leaf of the old state is copied aside first.

    Raises: ValueError if the update changes the state's structure, a shape or a dtype, or if a leaf of the state lies
        in the memory of another one or of the params (not seen where a compiler traces); the state is then unchanged.
    """

    def donated(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        shared = _shared(state, params)
        if shared:
            leaf = tree.paths(state)[shared[0]] or "the root"
            raise ValueError(
                f"state: leaf {leaf!r} lies in the memory of another leaf or of the params, and would be overwritten "
                f"with it; allowed is memory of its own: clone it in init"
            )
        updates, after = update(updates, state, params)
        is_old = _among(tree.leaves(state))
        updates = tree.map(lambda u: u.clone() if is_old(u) else u, updates)
        write_back(state, after)
        return updates, state

    return donated


def write_back(old: Tree, new: Tree) -> None:
    """Copy the leaves of `new` into those of `old`.

    A leaf of `new` that is an old leaf from another place, or a view of one, is copied aside first, before that one is
    overwritten.
    Raises: ValueError if structure, shapes or dtypes differ; nothing is written then.
    """
    olds, structure = tree.flatten(old)
    news, found = tree.flatten(new)
    if structure != found:
        raise ValueError(f"update: changed the structure of the state from {structure} to {found}")
    is_old = _among(olds)
    pairs = [(o, n.clone() if is_old(n) else n) for o, n in zip(olds, news, strict=True) if n is not o]
    for o, n in pairs:
        if o.shape != n.shape or o.dtype != n.dtype:
            raise ValueError(f"update: changed a leaf from {o.dtype} {tuple(o.shape)} to {n.dtype} {tuple(n.shape)}")
    if not torch.compiler.is_compiling():
        begin_writing()
    for o, n in pairs:
        _at_least_1d(o).copy_(_at_least_1d(n))


def _at_least_1d(x: Tensor) -> Tensor:
    """Return a view of a 0-d tensor: what a compiled graph writes into one of float64 itself, torch (2.13) loses."""
    return x if x.dim() else x.view(1)


def owned(state: Tree, params: Tree) -> Tree:
    """Return a state whose leaves have memory of their own, so that writing one changes no other one and no param."""
    leaves, structure = tree.flatten(state)
    shared = {*_shared(state, params), *(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and _is_folded(x))}
    if not shared:
        return state
    return tree.unflatten(structure, [x.clone() if i in shared else x for i, x in enumerate(leaves)])


def _is_folded(x: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as `expand` makes them; such a tensor cannot be written."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _shared(state: Tree, params: Tree) -> list[int]:
    """Return the places of leaves that begin where a leaf before them does, or lie in the params' memory."""
    leaves = tree.leaves(state)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not is_eager(*tensors):
        return []
    starts = [start for x in tensors if (start := x.data_ptr())]  # 0 where there is no memory
    theirs = {_memory(p) for p in tree.leaves(params) if isinstance(p, Tensor)}
    if len({*starts}) == len(starts) and theirs.isdisjoint(map(_memory, tensors)):
        return []
    seen, found = set[int](), []
    for place, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.numel():
            if x.data_ptr() in seen or _memory(x) in theirs:
                found.append(place)
            seen.add(x.data_ptr())
    return found


def _memory(x: Tensor) -> int:
    """Return what tensors in the same memory have in common."""
    found: int = x.untyped_storage()._cdata if is_eager(x) else id(x)
    return found


def _among(leaves: list[Tensor]) -> Callable[[Any], bool]:
    """Return what tells whether something lies in the memory of one of these leaves.

    While a compiler traces, for which memory is no constant: whether it is one of them.
    """
    if torch.compiler.is_compiling():
        return lambda x: any(x is leaf for leaf in leaves)
    known = {_memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return lambda x: isinstance(x, Tensor) and _memory(x) in known
