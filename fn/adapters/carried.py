"""What was undelivered when the number of ranks changed and errors of few bits do not hold.

Errors in 8 bits are rounded once more when they move to another number of ranks. What that loses is a tensor per
parameter, the same on all ranks, in float32. The first step in which ranks hear of each other adds it to the gradients,
once; then it is gone, and so is its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PREFIX = "carried."

Carried = tuple[list[Tensor], ...]
"""A list of tensors like the parameters for each param group, empty where there is nothing; or ()."""


def added(carried: Carried, grads: tuple[list[Tensor], ...]) -> tuple[list[Tensor], ...]:
    """Return the gradients of the param groups with what is carried."""
    if not carried:
        return grads
    pairs = zip(carried, grads, strict=True)
    return tuple([g + r.to(g) for g, r in zip(each, rest, strict=True)] if rest else each for rest, each in pairs)


def flat(carried: Carried) -> dict[str, Tensor]:
    """Return {key: tensor}."""
    return {f"{PREFIX}{g}.{i}": r for g, rest in enumerate(carried) for i, r in enumerate(rest)}


def restored(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Carried:
    """Return what `flat` made of it, for these param groups.

    Raises: ValueError if the tensors are not like the parameters.
    """
    strange = {key for key in saved if key.startswith(PREFIX)}
    if not strange:
        return ()
    found = []
    for g, group in enumerate(groups):
        keys = [f"{PREFIX}{g}.{i}" for i in range(len(group["params"]))]
        rest = [saved[key] for key in keys if key in saved]
        strange.difference_update(keys)
        if rest and [r.shape for r in rest] != [p.shape for p in group["params"]]:
            raise ValueError(f"state_dict: '{PREFIX}{g}' is not like the parameters of group {g}")
        found.append([r.to(p.device, torch.float32, copy=True) for r, p in zip(rest, group["params"], strict=False)])
    if strange:
        raise ValueError(f"state_dict: {min(strange)!r} is unexpected; it belongs to no parameter of this optimizer")
    return tuple(found)
