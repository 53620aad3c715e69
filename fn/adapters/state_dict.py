"""An optimizer's state as a flat {path: tensor}, which `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fn import tree
from fn.schedules import FreezeWhenStable

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer


def flat_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the steps, every group's learning rate and state, and a fed schedule's memory, by path."""
    found = {"steps": torch.tensor(optimizer.steps)}
    for i, group in enumerate(optimizer.param_groups):
        found[f"groups.{i}.lr"] = torch.as_tensor(group["lr"]).detach()
        if "initial_lr" in group:
            found[f"groups.{i}.initial_lr"] = torch.as_tensor(group["initial_lr"]).detach()
    named = zip(tree.paths(optimizer.states), tree.leaves(optimizer.states), strict=True)
    found.update({f"state.{path}": leaf for path, leaf in named})
    schedule = optimizer.schedule
    if isinstance(schedule, FreezeWhenStable):
        found["schedule.norms"] = torch.tensor(schedule.norms, dtype=torch.float64)
        found["schedule.frozen_at"] = torch.tensor(-1 if schedule.frozen_at is None else schedule.frozen_at)
    return found


def restore_flat(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Copy a `flat_state` into an optimizer's buffers.

    Raises: ValueError that names the first path that is missing, unexpected or of another shape or dtype; nothing
        is copied then.
    """
    check_fits(flat_state(optimizer), saved)
    _copy(optimizer, saved)


def check_fits(own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Compare a flat state with one to be loaded.

    Raises: ValueError that names the first path that is missing, unexpected, of another shape or dtype, or of the
        shard of another rank.
    """
    optional = {path for path in {*own, *saved} if path.endswith(".initial_lr")}
    for path in sorted((set(own) ^ set(saved)) - optional):
        raise ValueError(f"state_dict: {path!r} is {'missing' if path in own else 'unexpected'}")
    for path, mine in own.items():
        theirs = saved.get(path, mine)
        if not isinstance(theirs, Tensor):
            raise ValueError(f"state_dict: {path!r} is {type(theirs).__name__}, not a tensor")
        fits = path == "schedule.norms" or theirs.shape == mine.shape
        if not fits or theirs.dtype != mine.dtype:
            raise ValueError(
                f"state_dict: {path!r} is {theirs.dtype} {tuple(theirs.shape)}, but this has {mine.dtype} "
                f"{tuple(mine.shape)}; errors belong to the world size they were made for"
            )
        if path.endswith(".place") and theirs.tolist() != mine.tolist():
            raise ValueError(
                f"state_dict: {path!r} says shard {theirs[0]} of {theirs[1]}, but this rank has shard {mine[0]} of "
                f"{mine[1]}; shards belong to the ranks and the order of axes they were made for"
            )


def _copy(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    optimizer.steps = int(saved["steps"])
    with torch.no_grad():
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = torch.as_tensor(group["lr"]).fill_(float(saved[f"groups.{i}.lr"]))
            if f"groups.{i}.initial_lr" in saved:
                group["initial_lr"] = float(saved[f"groups.{i}.initial_lr"])
        for path, leaf in zip(tree.paths(optimizer.states), tree.leaves(optimizer.states), strict=True):
            leaf.copy_(saved[f"state.{path}"])
    if isinstance(optimizer.schedule, FreezeWhenStable):
        optimizer.schedule.norms = saved["schedule.norms"].tolist()
        frozen_at = int(saved["schedule.frozen_at"])
        optimizer.schedule.frozen_at = None if frozen_at < 0 else frozen_at
