"""MuonBP: Muon of whole matrices now and then, and of blocks of them between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_is_transform, check_whole, checked
from fn.base import combine, missing, unchanged
from fn.collectives.axis import AxisNames
from fn.errors import expected
from fn.transforms.average import agreed
from fn.transforms.mask_and_partition import Labels, hidden_and_other
from fn.transforms.unsharded import labelled

__all__ = ["in_blocks", "muon_bp"]

Tree = Any


@checked("blocks")
def in_blocks(inner: fn.Transform, blocks: int | AxisNames, dim: int = 0) -> fn.Transform:
    """Cut each tensor into blocks along a dimension, let a transform work on the blocks, and join what it returns.

        >>> import torch, fn
        >>> tx = fn.contrib.in_blocks(fn.orthogonalize(scale=None), 2)
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
        count = fn.axis_size(blocks) if isinstance(blocks, str | tuple | list) else blocks
        return [x.chunk(count, dim) if x.ndim > dim else (x,) for x in leaves]  # (n, ...) -> ceil(n / count) rows each

    def pieces(leaves: list[Tensor]) -> list[Tensor]:
        # one list of the blocks of all tensors, which inner takes for its leaves
        return [piece for some in cut(leaves) for piece in some]

    def init(params: Tree) -> Tree:
        tree.check_real(params, "params")
        return inner.init(pieces(tree.leaves(params)))

    def compose(phase: fn.Phase, updates_of: list[fn.UpdateFn]) -> fn.UpdateFn:
        (move,) = updates_of

        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            tree.check_real(updates, "updates")
            leaves, structure = tree.flatten(updates)
            own = None if params is None else pieces(tree.leaves(tree.in_order(params, updates, "params")))
            moved, state = move(pieces(leaves), state, own)
            each = iter(moved)
            parts = [[next(each) for _ in some] for some in cut(leaves)]
            # blocks (ceil(n / count), ...) -> (n, ...)
            joined = [torch.cat(some, dim) if len(some) > 1 else some[0] for some in parts]
            return tree.unflatten(structure, joined), state

        return update

    return combine([inner], init, compose, fn.Facts(whole=("in_blocks",)))


@checked("shards", "blocks")
def muon_bp(
    lr: float | Tensor = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    blocks: int | None = None,
    dim: int = 0,
    block_rate: float = 0.5,
    other: fn.Transform | None = None,
    other_rate: float = 1.0,
    dtype: torch.dtype | None = None,
    shards: fn.Shards | str | None = None,
) -> fn.Transform:
    """MuonBP: Muon of whole matrices one step in P, of blocks of them between, each kind at a rate of its own.

    Take it on FSDP2's shards, where steps of blocks send nothing; elsewhere their iterations cost less.

        m <- momentum m + g;    z = momentum m + g
        warm-up:     p <- p - lr (s NS(z) + weight_decay p)
        compressed:  p <- p - block_rate lr (s NS(z_B) for each block B + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.contrib.muon_bp(0.3, axis="data"), fn.periodic(5))
        Loss(before=0.944, after=0.023)

    Args:
        lr: of steps of whole matrices, a float or a 0-d tensor; start with AdamW's rate times 4. block_rate: of steps
            of blocks, as a multiple of it.
        momentum, dtype: as for `scale_by_muon`, with its scale "rms_norm" and coefficients "jordan"; of a block, s is
            that of its own shape. weight_decay: of all tensors, at the step's rate.
        axis: the ranks that train together, which average all gradients exactly in every step; None for none.
        blocks: into how many blocks a matrix is cut; None: as many as the axis has ranks. dim: along which dimension.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`.
        other: what gives the direction of the others; None: `scale_by_adam(0.9, 0.95)`. other_rate: their rate, as a
            multiple of lr.
        shards: as for `muon`: on FSDP2's shards a block is what a rank has of a matrix, and its steps send nothing.
    Returns: a transform with a warm-up, the steps of whole matrices, and a compressed phase, those of blocks;
        `periodic(p)` is its schedule.
    Raises: TypeError or ValueError that names the argument.

    Paper: Khaled et al., MuonBP: faster Muon via block-periodic orthogonalization (arXiv 2510.16981).
    Differs: where params are whole every rank takes the steps of all blocks; in the paper they lie in shards.
    """
    check_interval("block_rate", block_rate, "(0, inf)")
    check_interval("momentum", momentum, "[0, 1)")
    check_interval("other_rate", other_rate, "[0, inf)")
    waits = axis is not None and shards is None
    other = fn.scale_by_adam(0.9, 0.95, await_gradient=waits) if other is None else other
    check_is_transform("other", other)
    if shards is not None and blocks is not None:
        raise ValueError(expected("blocks", "None, where blocks are shards", f"{blocks}"))
    named = hidden_and_other(labels, {"hidden": "muon", "other": "other"}, lambda p: p.ndim == 2)
    iterations = fn.orthogonalize(eps=1e-7, scale="rms_norm", coefficients="jordan", dtype=dtype)
    if shards is not None:
        kind_of, shards_of = labelled(shards, named, labels)
        whole = fn.unsharded(iterations, shards_of("muon"))
        pieces = iterations._replace(facts=fn.Facts())  # a shard is all that they are to see
    else:
        cut = axis if blocks is None else blocks
        if cut is None:
            raise ValueError(expected("blocks", "a whole number, where there is no axis", "None"))
        kind_of, whole, pieces = named, iterations, in_blocks(iterations, cut, dim)
    # Each works in one phase and passes in the other, so both kinds of steps share one momentum in front.
    whole, pieces = whole._replace(compressed_update=unchanged), pieces._replace(warmup_update=unchanged)
    slower = fn.scale(block_rate)._replace(warmup_update=unchanged)
    decay, rate = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    kinds = {
        # Decay stands in front of the rates, to be taken at the step's rate.
        "muon": fn.chain(fn.trace(momentum, nesterov=True), whole, pieces, decay, slower, rate),
        "other": fn.chain(other, decay, fn.scale(other_rate), rate),
    }
    # Unfrozen: `average` alone would pass gradients in the compressed phase, and ranks would go apart.
    tx = fn.chain(fn.unfrozen(fn.average(axis)), fn.partition(kinds, kind_of))
    return agreed(fn.skip_nonfinite(tx._replace(local_update=missing(fn.Phase.LOCAL, "muon_bp"))), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    return [planner.Row("muon_bp", planner.traffic.exact, iterated=16, compressed=False)]
