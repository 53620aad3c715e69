"""One rank's shard of a tree: taken without joining the rest, and its troubles shown to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fn import roles, tree
from fn.collectives.primitives import is_recorded
from fn.kernels import memory_pool
from fn.kernels.tracing import is_concrete
from fn.transforms.flat_layout import Bucket, adjoin, end_to_end, join, split
from fn.transforms.resharding import Notes
from fn.transforms.skip_nonfinite import all_finite

Tree = Any


class Division(NamedTuple):
    """How params are divided. plan: the vectors that they make. row: which row of each is this rank's, 0-d int64."""

    plan: list[Bucket]
    row: Tensor

    def placed(self, bucket: Bucket, shard: Tensor) -> list[Tensor]:
        """Return tensors of the bucket's shapes with a shard (n / W,) where it belongs, and zeros elsewhere."""
        full = shard.new_zeros(bucket.segments.valid.shape[0], shard.shape[0])
        full[int(self.row)] = shard
        return split(full.view(-1), bucket)


divisions: Notes[Division] = Notes()
"""From each init of `sharded`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a shard is updated: float32 for half precision, else the params' own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def row(vector: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return row `index` of a vector (n,) that is so many rows; it may share memory with the vector."""
    table = vector.view(rows, -1)
    if is_concrete(index, vector):
        return table[int(index)]
    return table.index_select(0, index.to(vector.device).view(1)).view(-1)


def take(leaves: Sequence[Tensor], bucket: Bucket, index: Tensor) -> Tensor:
    """Return row `index` of the joined bucket, (n / W,); where tensors hold numbers, without joining the other rows.

    Args: leaves, bucket: as for `layout.join`. index: 0-d int64.
    Returns: a vector that may share memory with a leaf.
    """
    tensors = [leaves[i].reshape(-1) for i in bucket.leaf_indices]
    if not is_concrete(index, *tensors):
        return row(join(leaves, bucket), index, bucket.segments.valid.shape[0])
    if bucket.fused and adjoin(tensors):
        tensors = [end_to_end(tensors)]
    number, starts = int(index), [0] * len(tensors)
    widths = list(bucket.segments.widths)
    if bucket.fused:  # the tensors lie end to end, so each begins where the one before it ends
        widths = widths * len(tensors)
        starts = [sum(t.shape[0] for t in tensors[:i]) for i in range(len(tensors))]
    pieces = [_piece(t, number * w - s, w) for t, w, s in zip(tensors, widths, starts, strict=True)]
    missing = bucket.segments.row_length - sum(p.shape[0] for p in pieces)
    if bucket.fused:
        pieces += [tensors[0].new_zeros(missing)] if missing else []
    elif missing:
        pieces = [F.pad(p, (0, w - p.shape[0])) for p, w in zip(pieces, widths, strict=True)]
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].device.type == "cpu" and not is_recorded(pieces):
        out = memory_pool.empty((sum(p.shape[0] for p in pieces),), pieces[0].dtype, pieces[0].device)
        return torch.cat(pieces, out=out)
    return torch.cat(pieces)


def followed(master: Tensor, leaves: Sequence[Tensor], bucket: Bucket, index: Tensor) -> Tensor:
    """Return a master shard (n / W,) with what was written into the params since they were rounded from it.

    A model's checkpoint that is loaded, say, or a clamp after each step. Args: leaves, bucket, index: as for `take`.
    """
    here = take(leaves, bucket, index)
    if is_concrete(master, here) and here.device.type == "cpu" and not is_recorded([master, here]):
        rounded = memory_pool.empty(here.shape, here.dtype, here.device).copy_(master)
        found, left = here.view(torch.int16).numpy(), rounded.view(torch.int16).numpy()
        if np.array_equal(found, left):  # torch's takes twenty times as long
            return master
    return torch.where(master.to(here.dtype) == here, master, here.to(master.dtype))


def _piece(tensor: Tensor, start: int, width: int) -> Tensor:
    """Return the elements of a vector in [start, start + width), of which some may lie outside."""
    return tensor[max(start, 0) : max(start + width, 0)]


def shown(moves: Tree, before: Tree, after: Tree) -> tuple[Tree, Tree]:
    """Make what one rank alone knows visible in its moves: NaN where its state is not finite or a guard skipped.

    The moves are gathered, so all ranks see it and skip together. Skip counts inside are left as they were: what
    skips is the whole, and it counts.

    Args: moves: of this rank's shard. before, after: the inner states of this step.
    Returns: the moves, and the state after.
    """
    olds, (news, structure) = tree.leaves(before), tree.flatten(after)
    changed = [new for new, old in zip(news, olds, strict=True) if new is not old and new.is_floating_point()]
    ok = all_finite(changed)
    skipped = roles.find(before, "skips")
    counts = [any(old is count for count in skipped) for old in olds]
    for new, old, is_count in zip(news, olds, counts, strict=True):
        if is_count:
            ok = ok & (new == old)
    kept = [old if is_count else new for new, old, is_count in zip(news, olds, counts, strict=True)]
    if is_concrete(ok) and ok.device.type == "cpu" and ok:
        return moves, tree.unflatten(structure, kept)
    return tree.map(lambda m: torch.where(ok, m, float("nan")), moves), tree.unflatten(structure, kept)
