"""What a param group of torch holds for a transform."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def as_list(params: Any) -> list[Any]:
    """Return what an optimizer was given as a list. Raises TypeError if it is a single tensor, or has no order."""
    if isinstance(params, Tensor):
        raise TypeError("params: is a tensor; allowed are iterables of tensors, of (name, tensor), of param groups")
    if isinstance(params, set | frozenset):
        raise TypeError("params: is a set, whose order differs from rank to rank; allowed are lists and the like")
    return list(params)


def check_callable(argument: str, value: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as it is. Raises TypeError that names the argument and what is allowed if it is none."""
    if not callable(value):
        example = {"make": "partial(fn.onebit_adam, axis='data')", "schedule": "fn.freeze_after(1000)"}[argument]
        raise TypeError(f"{argument}: is {type(value).__name__}; allowed is a function such as {example}")
    return value


def hyper_parameters(group: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the entries of a param group that its transform is made from, the learning rate aside.

    Raises: TypeError if `make` does not take one of them.
    """
    found = {k: v for k, v in group.items() if k not in _OTHERS}
    names, takes_any = _arguments(make)
    for name in () if takes_any else found.keys() - set(names):
        called = getattr(getattr(make, "func", make), "__name__", "make")
        allowed = ", ".join(n for n in names if n != "lr")
        raise TypeError(f"{name}: is no argument of {called}; allowed are {allowed}")
    return found


def _arguments(make: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of a function's arguments, and whether it takes any others, too."""
    known = inspect.signature(make).parameters.values()
    return [p.name for p in known], any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known)


_OTHERS = frozenset({"params", "lr", "initial_lr", "param_names"})

_SCHEDULERS = frozenset({"max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""What torch's schedulers write into a group for themselves."""


def current(group: Mapping[str, Any], before: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the hyper-parameters that a group holds now: those of `before`, and new ones that `make` knows.

    Raises: KeyError if one of `before` is gone.
    """
    found = {k: group[k] for k in before}
    added = group.keys() - found.keys() - _OTHERS - _SCHEDULERS
    if added:
        names, takes_any = _arguments(make)
        found.update({k: group[k] for k in group if k in added and (takes_any or k in names)})
    return found


def learning_rate(group: Mapping[str, Any]) -> Tensor:
    """Return a group's learning rate as a new 0-d tensor. Raises ValueError if it is none."""
    given = group["lr"]
    wide = torch.float64 if any(p.dtype == torch.float64 for p in group["params"]) else torch.float32
    lr = torch.as_tensor(given if isinstance(given, numbers.Real | Tensor) else math.nan, dtype=wide).detach().clone()
    if lr.ndim or not 0 <= lr < math.inf:
        raise ValueError(f"lr: is {given!r}; allowed are finite numbers and 0-d tensors of at least 0")
    return lr


def follow(group: dict[str, Any], lr: Tensor) -> None:
    """Take over what was written into a group as its learning rate; `lr` is then the group's again.

    Raises: ValueError if it is no number, NaN or Inf, before anything is written: a step in place would carry it into
        the params.
    """
    given = group["lr"]
    if given is lr and lr.device.type != "cpu":  # nobody waits for a device here
        return
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"lr: is {given}; allowed are finite numbers and 0-d tensors")
    if given is not lr:
        lr.fill_(number)
        group["lr"] = lr


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tell whether hyper-parameters are the same; tensors only if they are the same object."""

    def equal(x: Any, y: Any) -> bool:
        return x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y))

    return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
