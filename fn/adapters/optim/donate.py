"""Run a pure update in the buffers of its arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.consistency import worker_errors
from fn.adapters.optim.signals import begin_writing
from fn.base import UpdateFn
from fn.compiling import own_code
from fn.errors import expected
from fn.inplace.memory import among, is_folded, memory_of, written_into
from fn.kernels.schemas import ON_LISTS, SCHEMAS
from fn.kernels.table import warm, warm_halves
from fn.kernels.tracing import is_concrete
from fn.transforms.lamb import OnebitLambState
from fn.transforms.zero_one_adam import ZeroOneAdamState

Tree = Any


def donate(update: UpdateFn) -> UpdateFn:
    """Make a pure update write its new state back into the buffers of the old one.

    The returned function has the same signature and results, but the state that it returns *is* the state that it
    was given, with new contents: buffers keep their addresses from step to step. Under `torch.compile` the copies
    fuse into the update and nothing is allocated. An update that is a leaf of the old state is copied aside first.

    Raises: ValueError if the update changes the state's structure, a shape or a dtype, or if a leaf of the state lies
        in the memory of another one or of the params (not seen where a compiler traces); the state is then unchanged.

    >>> import torch, fn
    >>> tx = fn.adamw(0.1)
    >>> params = {"w": torch.zeros(2)}
    >>> state = tx.init(params)
    >>> update = fn.donate(tx.update(fn.Phase.WARMUP))
    >>> updates, after = update({"w": torch.tensor([1.0, -2.0])}, state, params)
    >>> after is state, [round(x, 4) for x in updates["w"].tolist()]
    (True, [-0.1, 0.1])
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
    seen, shared = set[int](), []
    for place, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.numel():
            if x.data_ptr() in seen or memory_of(x) in theirs:
                shared.append(place)
            seen.add(x.data_ptr())
    return shared


logger = logging.getLogger("fn")

CHANGES = 3
"""Steps that may come with other hyper-parameters: torch gives up after 8 compilations of a function."""


def compile_update(update: UpdateFn) -> UpdateFn:
    """Compile an update. Numbers are constants: as inputs of the graph, torch (2.13) hands some of them in stale."""
    import torch._dynamo.config as config

    run: UpdateFn = torch.compile(update, fullgraph=True)

    def step(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        with config.patch(specialize_float=True):
            return run(updates, state, params)

    return step


def check_changes(before: Mapping[str, Any], now: Mapping[str, Any], changed: set[int], step: int) -> None:
    """Refuse hyper-parameters that a scheduler writes in every step, for each of which a step would be compiled.

    Args: before, now: hyper-parameters. changed: steps in which they changed so far; this one, `step`, is added.
    Raises: ValueError that names those that changed.
    """
    if len(changed | {step}) > CHANGES:
        names = ", ".join(name for name in now if now[name] is not before.get(name))
        raise ValueError(
            f"{names}: changed in {CHANGES} steps before; with compile=True each value is compiled anew, for seconds; "
            f"build the optimizer without compile, or leave them alone: cycle_momentum=False of OneCycleLR, for one"
        )
    changed.add(step)


OF_STATES: dict[type, tuple[str, ...]] = {
    ZeroOneAdamState: ("drift",),
    OnebitLambState: ("lamb_moments_", "onebit_lamb_moments_", "lamb_step_"),
}
"""Kernels of one kind of states only, which others need in no dtype but that of their known answers."""


def warm_kernels(states: Tree, params: Iterable[Tensor]) -> None:
    """Have the kernels of an accelerator compiled now, at construction, where steps in codes come later.

    The first step of the compressed phase would otherwise wait for a compiler in the middle of a run.
    """
    dtypes: dict[torch.device, set[torch.dtype]] = {}
    for p in params:
        dtypes.setdefault(p.device, set()).add(p.dtype)
    dtypes = {device: kinds for device, kinds in dtypes.items() if device.type != "cpu"}
    if dtypes and tree.leaves(worker_errors(states)):
        absent = {op for kind, ops in OF_STATES.items() if not tree.instances(states, kind) for op in ops}
        for device, kinds in dtypes.items():
            logger.info("kernels for %r are compiled, unless they are kept from before", device.type)
            with torch.accelerator.device_index(device.index or 0):
                warm(SCHEMAS, device.type)
                warm_halves([op for op in ON_LISTS if op not in absent], device, kinds)
