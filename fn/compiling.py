"""Functions with code objects of their own, whose compilations `torch.compile` counts apart.

All functions that one factory made share a code object, and all callable objects share a wrapper of torch's. torch
gives up after 8 compilations of one code object, so a process could compile no more than 8 updates in all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

KEPT = 32
"""Functions that are kept, so that an update that is asked for again is not compiled again."""

_kept: dict[int, Callable[..., Any]] = {}


def own_code(f: F) -> F:
    """Give a function that its factory has just made a code object of its own; return it. Other objects stay as is."""
    if isinstance(f, FunctionType) and not torch.compiler.is_compiling():
        # A copy with equal contents: torch.compile counts by the identity of the code object.
        f.__code__ = f.__code__.replace()
    return f


def memoized(f: Callable[[K], R]) -> Callable[[K], R]:
    """Return a function of one hashable argument that keeps its results, as `functools.cache` does.

    torch.compile looks through `functools.cache` with a warning, and may not write into a dict of ours while it traces.
    """
    results: dict[K, R] = {}

    def call(key: K) -> R:
        if key in results:
            return results[key]
        result = f(key)
        if not torch.compiler.is_compiling():
            results[key] = result
        return result

    return call


def compilable(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f itself if it is a function, else a cached wrapper, one per object; `original` takes it off again."""
    if isinstance(f, FunctionType) or torch.compiler.is_compiling():  # the second: it is part of what is compiled
        return f
    if id(f) not in _kept:

        def call(*args: Any) -> Any:
            return f(*args)

        made: Any = own_code(update_wrapper(call, f))  # which keeps f, so that no other one has its id
        _kept[id(f)] = made.itself = made  # a wrapper of somebody else's has a copy of this, but is not it
        for oldest in [*_kept][:-KEPT]:
            _kept.pop(oldest, None)
    return _kept[id(f)]


def original(f: Any) -> Any:
    """Return the object for which `compilable` made this function; whatever else it is, as it is.

    `inspect.unwrap` would also drop what somebody does in a wrapper of their own.
    """
    is_made_here = f is not None and getattr(f, "itself", None) is f
    return f.__wrapped__ if is_made_here else f
