"""States of another number of ranks, as rows of each rank's own, moved to the ranks that are bound now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.collectives.compressed import ErrorFeedbackState
from fn.transforms.resharding import Orders, Reshape
from fn.transforms.sharded import ShardedState

Tree = Any


class Rows(NamedTuple):
    """Some rows of what was saved: (k, ...) from row `first` of `world`."""

    rows: Tensor
    first: int
    world: int


class Move(NamedTuple):
    """How states move from the rows of another world.

    notes: how the states that were made here take their own from addends. rows: some rows of what was saved. add: the
    sum over all ranks. orders: for each note, see `Reshape`; () where all are in the order of the shapes.
    """

    notes: Sequence[tuple[Tree, Reshape]]
    rows: Rows
    add: Callable[[Tree], Tree]
    orders: Sequence[Orders] = ()

    def walk(self, fresh: Tree, found: Tree) -> Tree:
        """Return `found`, a tree like a fresh state with `Rows` for what is one rank's own, as that state."""
        for i, (state, reshape) in enumerate(self.notes):
            if state is fresh:
                return reshape.adopt(self._total(reshape, fresh, found, self.orders[i] if self.orders else ()), fresh)
        if isinstance(fresh, ErrorFeedbackState | ShardedState):
            raise ValueError("state: is of another world, and nothing says how errors of several axes move")
        if isinstance(found, Rows):
            return mean_of_rows(found, self.add).to(fresh)
        if isinstance(fresh, Tensor):
            return found
        keys = fresh if isinstance(fresh, dict) else range(len(fresh))
        below = [self.walk(fresh[k], found[k]) for k in keys]
        if isinstance(fresh, dict):
            return dict(zip(keys, below, strict=True))
        return type(fresh)(*below) if hasattr(fresh, "_fields") else type(fresh)(below)

    def _total(self, reshape: Reshape, fresh: Tree, found: Tree, orders: Orders) -> Tree:
        def of_rank(take: Callable[[Tensor], Tensor]) -> Tree:
            return tree.map(lambda _, x: take(x.rows) if isinstance(x, Rows) else x, fresh, found)

        rows, first, world = self.rows
        try:
            nothing = of_rank(lambda rows: rows.new_zeros(rows.shape[1:]))
            total = tree.map(torch.zeros_like, reshape.addends(nothing, world, 0, orders))
            for j in range(rows.shape[0]):
                mine = of_rank(lambda rows, j=j: rows[j])  # type: ignore[misc]
                share = reshape.addends(mine, world, first + j, orders)
                total = tree.map(torch.add, total, share)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(f"state: its errors do not fit these parameters on {world} ranks: {error}") from error
        return self.add(total)


def rounds_off(found: Iterable[Any]) -> bool:
    """Return whether there are errors in few bits among what was saved, which the move rounds once more."""
    return any(isinstance(x, Rows) and x.rows.dtype in (torch.int8, torch.bfloat16) for x in found)


def mean_of_rows(x: Rows, add: Callable[[Tree], Tree]) -> Tensor:
    """Return the mean of all rows, in their dtype; `add` adds up what each rank has of them."""
    mean: Tensor = add(x.rows.double().sum(0)) / x.world
    return mean.to(x.rows.dtype) if x.rows.is_floating_point() else mean.round().to(x.rows.dtype)
