"""Blocks of tensors in place of the tensors: `in_blocks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import Facts, Phase, Transform, UpdateFn, check_is_transform, check_whole, combine
from fn.collectives.axis import AxisNames, axis_size

Tree = Any


def in_blocks(inner: Transform, blocks: int | AxisNames, dim: int = 0) -> Transform:
    """Cut each tensor into blocks along a dimension, let a transform work on the blocks, and join what it returns.

        >>> import torch, fn
        >>> tx = fn.in_blocks(fn.orthogonalize(scale=None), 2)
        >>> g = torch.tensor([[3.0, 0.0], [0.0, 0.1], [0.0, 2.0], [5.0, 0.0]])
        >>> tx.update(fn.Phase.WARMUP)(g, tx.init(g), g)[0]
        tensor([[0.9792, 0.0000],
                [0.0000, 1.0106],
                [0.0000, 1.0247],
                [0.9796, 0.0000]])

    Args:
        inner: what works on the blocks; it sees the list of all of them.
        blocks: their number, or the axis whose number of ranks it is. They are cut as `torch.chunk` cuts, and FSDP2:
            all but the last are equal, and of a tensor with fewer rows there are fewer.
        dim: the dimension, 0 or more; tensors that lack it are not cut.
    Returns: a transform with the phases and the state of inner, of blocks.
    Raises: TypeError or ValueError that names the argument.
    """
    check_is_transform("inner", inner)
    check_whole("dim", dim, 0)
    if not isinstance(blocks, str | tuple | list):
        check_whole("blocks", blocks, 1)

    def cut(leaves: list[Tensor]) -> list[tuple[Tensor, ...]]:
        count = axis_size(blocks) if isinstance(blocks, str | tuple | list) else blocks
        return [x.chunk(count, dim) if x.ndim > dim else (x,) for x in leaves]

    def pieces(leaves: list[Tensor]) -> list[Tensor]:
        return [piece for some in cut(leaves) for piece in some]

    def init(params: Tree) -> Tree:
        tree.check_real(params, "params")
        return inner.init(pieces(tree.leaves(params)))

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        (move,) = updates_of

        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            tree.check_real(updates, "updates")
            leaves, structure = tree.flatten(updates)
            own = None if params is None else pieces(tree.leaves(tree.in_order(params, updates, "params")))
            moved, state = move(pieces(leaves), state, own)
            each = iter(moved)
            parts = [[next(each) for _ in some] for some in cut(leaves)]
            joined = [torch.cat(some, dim) if len(some) > 1 else some[0] for some in parts]
            return tree.unflatten(structure, joined), state

        return update

    return combine([inner], init, compose, Facts(whole=("in_blocks",)))
