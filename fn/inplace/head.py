"""What stands in front of the moments: links that run purely, and whose new states wait for the step to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Link
from fn.inplace.memory import written_into
from fn.kernels import ops

Tree = Any


class Head(NamedTuple):
    """The links in front of the one that keeps the moments."""

    links: Sequence[Link]

    def run(self, updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Callable[[], None]]:
        """Return the updates that the links make, and what writes their new states.

        Args: updates, state, params: of the whole chain.
        """
        writes = []
        for link in self.links:
            before = link.state(state)
            updates, after = link.update(updates, before, params)
            if after is not before:
                writes.append(written_into(before, after))

        def write() -> None:
            for each in writes:
                each()

        return updates, write

    def gradients(
        self, updates: Tree, state: Tree, params: Tree, mu: Tree
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Return the same for moments like `mu`, as their kernels take it: dense, and in the moments' dtype."""
        updates, write = self.run(updates, state, params)
        tree.check_updates(updates, mu)
        leaves = zip(tree.leaves(updates), tree.leaves(mu), strict=True)
        return [u.to(m.dtype).contiguous() for u, m in leaves], write


def largest_of(leaves: list[Tensor], like: Tensor) -> Tensor:
    """Return the largest magnitude, 0-d; NaN where an element is. like: is on the device where it is zero of none."""
    found: Tensor = ops.direct("largest_magnitude", leaves) if leaves else torch.zeros((), device=like.device)
    return found
