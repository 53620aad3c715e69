"""Compiled updates, in which numbers are constants, each of which takes a compilation of its own; compiled kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.state_kinds import worker_errors
from fn.base import Tree, UpdateFn
from fn.kernels.schemas import ON_LISTS, SCHEMAS
from fn.kernels.table import warm, warm_halves
from fn.transforms.lamb import OnebitLambState
from fn.transforms.zero_one_adam import ZeroOneAdamState

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
