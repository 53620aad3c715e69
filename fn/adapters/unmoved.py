"""Warnings of what would go on without an error: nothing is compressed, or parameters do not move."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fn import tree
from fn.adapters.state_dict import ERROR, kinds
from fn.base import Phase

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer


def warn_of_schedule(optimizer: Optimizer, given: bool) -> None:
    """Warn of a schedule without a first warm-up step, and of none where several ranks could compress."""
    several = any(optimizer._binding.axes[axis].size > 1 for axis in optimizer._axes())
    if not given and several and ERROR in tree.leaves(kinds(optimizer.states)):
        text = "schedule: is None, so every step is a warm-up step; pass fn.freeze_after(n) for the compressed phase"
        warnings.warn(text, stacklevel=3)
    if optimizer.schedule(0) in (Phase.COMPRESSED, Phase.LOCAL) and tree.fields(optimizer.states, "nu"):
        text = "schedule: has no warm-up; the first step is one, for there is no second moment yet"
        warnings.warn(text, stacklevel=3)


def warn_of_late_group(optimizer: Optimizer) -> None:
    """Warn of a param group, the last one, that comes after the warm-up."""
    if optimizer.steps and optimizer.phase is not Phase.WARMUP and tree.fields(optimizer.states[-1], "nu"):
        text = "params: come after the warm-up; where it freezes the second moment, theirs is 0 and they never move"
        warnings.warn(text, stacklevel=3)


def warn_of_thawed(optimizer: Optimizer, places: Iterable[tuple[int, int]]) -> None:
    """Warn of parameters that get their first gradients after the warm-up.

    Args: places: (group, parameter) by index, of those that had no gradient up to now.
    """
    if optimizer.phase is Phase.WARMUP:
        return
    still = []
    for g, i in sorted(places):
        params, moments = optimizer.param_groups[g]["params"], tree.fields(optimizer.states[g], "nu")
        alike = [nu[i] for nu in moments if len(nu) == len(params) and nu[i].shape == params[i].shape]
        if alike and not any(bool(nu.any()) for nu in alike):
            names = optimizer.param_groups[g].get("param_names") or range(len(params))
            still.append(f"{names[i]} of group {g}")
    if still:
        text = "their second moment is 0 and frozen, so they do not move until the schedule returns to a warm-up step"
        warnings.warn(f"params: {', '.join(still)}: get first gradients after the warm-up; {text}", stacklevel=7)
