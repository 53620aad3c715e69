"""Run a pure update in the buffers of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.signals import begin_writing
from fn.base import UpdateFn
from fn.compiling import own_code
from fn.errors import expected
from fn.inplace.memory import among, is_folded, memory_of, written_into
from fn.kernels.tracing import is_concrete

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
        check_apart(state, params)
        updates, after = update(updates, state, params)
        is_old = among(tree.leaves(state))
        updates = tree.map(lambda u: u.clone() if is_old(u) else u, updates)
        write_back(state, after)
        return updates, state

    return own_code(donated)


def check_apart(state: Tree, params: Tree) -> None:
    """Refuse a state whose leaves lie in the memory of one another or of the params, with a ValueError that names one.

    Writing one of them would overwrite the other one.
    """
    if shared := _shared(state, params):
        leaf = tree.paths(state)[shared[0]] or "the root"
        got = "that of another leaf or of the params, with which it would be overwritten"
        raise ValueError(expected("state", f"leaf {leaf!r} to have memory of its own", got, "clone it in init"))


def write_back(old: Tree, new: Tree) -> None:
    """Copy the leaves of `new` into those of `old`, as `written_into` says.

    Raises: ValueError if structure, shapes or dtypes differ, or if a leaf cannot be written; nothing is written then.
    """
    write = written_into(old, new)
    if not torch.compiler.is_compiling():
        begin_writing()
    write()


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
    starts = [start for x in tensors if (start := x.data_ptr())]  # 0 where there is no memory
    theirs = {memory_of(p) for p in tree.leaves(params) if isinstance(p, Tensor)}
    if len({*starts}) == len(starts) and theirs.isdisjoint(map(memory_of, tensors)):
        return []
    seen, found = set[int](), []
    for place, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.numel():
            if x.data_ptr() in seen or memory_of(x) in theirs:
                found.append(place)
            seen.add(x.data_ptr())
    return found

