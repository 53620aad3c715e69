"""What a param group of torch holds for a transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def as_list(params: Any) -> list[Any]:
    """Return what an optimizer was given as a list. Raises TypeError if it is a single tensor, as torch does."""
    if isinstance(params, Tensor):
        raise TypeError("params: is a tensor; allowed are iterables of tensors, of (name, tensor), of param groups")
    return list(params)


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a param group that its transform is made from, the learning rate aside."""
    return {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr", "param_names")}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tell whether hyper-parameters are the same; tensors only if they are the same object."""

    def equal(x: Any, y: Any) -> bool:
        return x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y))

    return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
