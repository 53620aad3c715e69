"""Refuse parameters whose elements share memory: a step would write one of them twice, or stop between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fn.adapters.optim.param_groups import names_of
from fn.inplace.memory import is_folded, overlaps


def check_params(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse parameters that a step cannot write, or would write twice, with a ValueError that names them."""
    for g in range(len(groups)):
        check_writable(groups, g)
    owners = [f"{name} of group {g}" for g, group in enumerate(groups) for name in names_of(group)]
    found = next(overlaps([p for group in groups for p in group["params"]]), None)
    if found is not None:
        first, second = (f"parameter {owners[i]}" for i in found)
        raise ValueError(
            f"params: expected each parameter to have memory of its own, but {second} shares memory with {first}; "
            f"clone one of them, or make them one torch.nn.Parameter, which modules may share"
        )


def check_writable(groups: Sequence[Mapping[str, Any]], g: int) -> None:
    """Refuse parameters of a group that no step can write with a ValueError that names the first."""
    params = groups[g]["params"]
    if all(map(Tensor.is_contiguous, params)) and not any(map(Tensor.is_inference, params)):
        return  # a step looks at many
    for name, p in zip(names_of(groups[g]), params, strict=True):
        if is_folded(p):
            raise ValueError(
                f"params: expected elements of their own, but those of parameter {name} of group {g}, of the shape "
                f"{tuple(p.shape)} and the strides {p.stride()}, share memory, as expand makes them; clone it"
            )
        if p.is_inference():
            raise ValueError(
                f"params: expected tensors that can be written, but parameter {name} of group {g} was made under "
                f"torch.inference_mode(); make it outside, or clone it there"
            )
