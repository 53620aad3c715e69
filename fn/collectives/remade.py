"""Codecs and feedbacks are functions inside of functions, which pickle does not take: they are made again instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def reduced(found: tuple[Any, ...], make: Callable[[], tuple[Any, ...]] | None) -> tuple[Any, ...]:
    """Return what pickle needs of a NamedTuple of functions, for its `__reduce__`.

    Args: found: it; its last field is `make`, what makes it again, None if not known. One that was changed since is
        taken as it is: it can be copied, and pickled where its functions can.
    """
    if make is not None and _same(found[:-1], make()[:-1]):
        return make, ()
    return type(found), tuple(found)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Return whether entries are functions of the same code, or equal."""
    return all(getattr(x, "__code__", x) == getattr(y, "__code__", y) for x, y in zip(a, b, strict=True))
