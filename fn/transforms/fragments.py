"""Fragments: the parts of the params that are exchanged one after the other, and where their leaves are."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fn import tree
from fn.errors import expected

Tree = Any
Fragments = int | Callable[[Tree], Tree] | None
"""None: one fragment. A number P: leaf i is in fragment i mod P. A function: params -> a tree of numbers."""


def check_fragments(fragments: Any) -> None:
    """Refuse an argument `fragments` of another kind with a TypeError, a number below 1 with a ValueError."""
    if fragments is None or callable(fragments):
        return
    if not isinstance(fragments, int) or isinstance(fragments, bool):
        wanted = "a number, None, or a function from params to a tree of numbers"
        raise TypeError(expected("fragments", wanted, f"{fragments!r}"))
    if fragments < 1:
        raise ValueError(expected("fragments", "a number of at least 1", f"{fragments}"))


def fragment_places(fragments: Fragments, params: Tree) -> dict[int, list[int]]:
    """Return {number of a fragment: places of its leaves among the leaves of the params}, in the order of the numbers.

    Fragments without a leaf are left out, so that a state is no longer than the params whatever a function answers.

    Raises: ValueError if a function returns another structure than that of the params, or a number below 0; TypeError
        if it returns what is no whole number.
    """
    count = len(tree.leaves(params))
    if fragments is None:
        return {0: [*range(count)]}
    if isinstance(fragments, int):
        # At least one, even without leaves: a state has an entry for each fragment.
        return {f: [*range(f, count, fragments)] for f in range(min(fragments, max(count, 1)))}
    numbered = tree.in_order(fragments(params), params, "fragments")
    numbers_of = tree.leaves(numbered)
    for path, number in zip(tree.paths(numbered), numbers_of, strict=True):
        # True is a whole number in Python, and would be fragment 1.
        if not isinstance(number, numbers.Integral) or isinstance(number, bool):
            raise TypeError(expected("fragments", f"leaf {path!r} to be a whole number", f"{number!r}"))
        if number < 0:
            raise ValueError(expected("fragments", f"leaf {path!r} to be a number from 0", f"{number}"))
    parts: dict[int, list[int]] = {int(number): [] for number in sorted(numbers_of)} or {0: []}
    for place, number in enumerate(numbers_of):
        parts[number].append(place)
    return parts


def places_in(fragments: Fragments, params: Tree, fragment: int, field: str) -> tuple[int, Sequence[int]]:
    """Return which entry of a state is of the fragment that a round names, and the places of its leaves.

    A fragment behind the last leaf is empty: several param groups may have different numbers of leaves, and a function
    numbers them together.

    Raises: ValueError if there is none of that number.
    """
    parts = fragment_places(fragments, params)
    if fragment in parts:
        return [*parts].index(fragment), parts[fragment]
    count = fragments if isinstance(fragments, int) else len(parts)
    if callable(fragments) or fragment < count:
        return 0, ()
    cure = "give fn.every and fn.outer the same number of fragments"
    raise ValueError(expected(f"phase.{field}", f"one of {count} fragments, from 0", f"{fragment}", cure))


def put(leaves: Sequence[Tensor], places: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves, with new ones at some places."""
    new_at = dict(zip(places, new, strict=True))
    return [new_at.get(i, x) for i, x in enumerate(leaves)]
