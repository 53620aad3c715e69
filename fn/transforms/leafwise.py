"""A rule of `fn.kernels.rules` on the leaves of trees: `tree.map` for what is element-wise, one launch on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fn import tree
from fn.kernels.lists import Number, elementwise

Tree = Any


def apply(
    rule: Callable[..., Any],
    trees: tuple[Tree, ...],
    *numbers: Number,
    like: int = 0,
    wide: bool = False,
) -> Any:
    """Apply a rule to the corresponding leaves of trees of the same structure.

        >>> import torch
        >>> from fn.kernels import rules
        >>> apply(rules.decayed, ({"w": torch.ones(2)}, {"w": torch.tensor([1.0, -3.0])}), 0.5)     # u + 0.5 p
        {'w': tensor([ 1.5000, -0.5000])}

    Args: as for `fn.kernels.lists.elementwise`, with trees in place of lists.
    Returns: a tree, or a tuple of trees for a rule with several results.
    Raises: ValueError where the structures differ.
    """
    def on_lists(lists: list[list[Tensor]]) -> Any:
        return elementwise(rule, lists, *numbers, like=like, wide=wide)

    return tree.map_lists(on_lists, trees, like)
