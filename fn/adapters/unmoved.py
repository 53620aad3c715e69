"""Warnings of what would go on without an error: nothing is compressed, slowly, or not sent; or nothing moves."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from fn import tree
from fn.adapters.param_groups import names_of
from fn.adapters.training import Training
from fn.collectives.primitives import psum
from fn.kernels.table import cells
from fn.schedules import phase_of
from fn.transforms.sharded import ShardedState
from fn.transforms.shards import divisions

LARGE = 1 << 20
"""Elements from which it matters whether kernels are fused."""

_SHRINKS = "weight decay, if there is any, shrinks them all the same"


def warn_at_start(training: Training, given: bool) -> None:
    """Warn of a schedule without a warm-up, and, where there are other ranks, of what does not compress or send.

    Args: given: whether there is a schedule.
    """
    several = any(training.binding.axes[axis].size > 1 for axis in training.axes)
    compresses = several and bool(tree.leaves(tree.fields(training.states, "worker")))
    if several:
        _warn_of_no_axis(training)
    if compresses:
        _warn_of_plain_torch([p for group in training.groups for p in group["params"]])
    if not given and compresses:
        text = "schedule: is None, so every step is a warm-up step; pass fn.freeze_after(n) for the compressed phase"
        warnings.warn(text, stacklevel=3)
    phase = phase_of(training.schedule, 0)
    if training.needs_warmup(phase):
        text = f"schedule: has no warm-up; the first step is one, for {phase} of this optimizer needs one before it"
        warnings.warn(text, stacklevel=3)


def _warn_of_no_axis(training: Training) -> None:
    argument = inspect.signature(training.make).parameters.get("axis")
    is_open = argument is not None and argument.default is None
    if is_open and any(group.get("axis") is None for group in training.groups):
        bound = " or ".join(repr(axis) for axis in training.axes)
        text = f"axis: is None, so gradients are not averaged; pass partial(make, axis=...) with {bound}"
        hint = "or build the optimizer outside of fn.bind if something else averages them, such as DDP"
        warnings.warn(f"{text}, {hint}", stacklevel=4)


def _warn_of_plain_torch(params: list[Tensor]) -> None:
    for device in sorted({p.device.type for p in params}):
        count = sum(p.numel() for p in params if p.device.type == device)
        makers = [*cells("sign_encode_feedback", device), *cells("quantize_feedback", device)]
        if count >= LARGE and all(cell.provider == "torch" for cell in makers):
            text = "are fused, so codes are made in plain torch, which takes several times as long and more memory"
            hint = "`python -m fn` says what can be installed"
            warnings.warn(f"kernels: none for {device!r} {text}; {hint}", stacklevel=4)


def warn_of_late_group(training: Training) -> None:
    """Warn of a param group, the last one, that comes after the warm-up."""
    last = len(training.groups) - 1
    if training.steps and training.needs_warmup(training.phase, last):
        text = "come after the warm-up; where it freezes the second moment, theirs is 0 and no gradient moves them"
        warnings.warn(f"params: {text}; {_SHRINKS}", stacklevel=3)


def warn_of_thawed(training: Training, places: Iterable[tuple[int, int]]) -> None:
    """Warn of parameters that get their first gradients after the warm-up.

    Args: places: (group, parameter) by index, of those that had no gradient up to now.
    """
    places = [(g, i) for g, i in places if training.needs_warmup(training.phase, g)]
    still, shards = [], {g: _seen_in_shards(training, g) for g in sorted({g for g, _ in places})}
    for g, i in sorted(places):
        params, moments = training.groups[g]["params"], tree.fields(training.states[g], "nu")
        alike = [nu[i] for nu in moments if len(nu) == len(params) and nu[i].shape == params[i].shape]
        seen = shards[g] or {i: not alike or any(bool(nu.any()) for nu in alike)}
        if not seen[i]:
            still.append(f"{names_of(training.groups[g])[i]} of group {g}")
    if still:
        text = "their second moment is 0 and frozen, so no gradient moves them until the schedule returns to a warm-up"
        text = f"get first gradients after the warm-up; {text}; {_SHRINKS}"
        warnings.warn(f"params: {', '.join(still)}: {text}", stacklevel=8)


def _seen_in_shards(training: Training, g: int) -> dict[int, bool]:
    """Return whether each parameter of a group whose second moment rests has one on any rank, in shards.

    Empty where there are none. All ranks must call it; one number per parameter on the wire, and the memory of a state.
    """
    state, params = training.states[g], [p.detach() for p in training.groups[g]["params"]]
    if not isinstance(getattr(state, "inner", None), ShardedState):
        return {}
    with divisions.collected() as found:
        training.transforms[g].init(params)
    seen = torch.zeros(len(params), device=params[0].device)
    for nu in tree.fields(state, "nu"):
        for bucket, shard in zip(found[0].plan, tree.leaves(nu), strict=True):
            for i, there in zip(bucket.places, found[0].placed(bucket, shard != 0), strict=True):
                seen[i] += there.any()
    for axis in training.axes:
        seen = psum(seen, axis)
    return {i: bool(x) for i, x in enumerate(seen)}
