"""How a tree becomes the vectors that travel.

Every tensor is padded to W equal pieces and piece r of every tensor goes into row r, so each rank serves a part of
each tensor, and scales and blocks of a codec never cross from one tensor into another.

    tensor a (5)        tensor b (3)          W = 2, align = 4
    a0 a1 a2 a3 a4      b0 b1 b2              row 0:  a0 a1 a2 a3 | b0 b1 b2 0
                                              row 1:  a4  0  0  0 |  0  0  0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.collectives.codec import Segments
from fn.kernels import buffers
from fn.kernels.eager import is_eager

Tree = Any

LAYOUTS = ("flat", "per_tensor", "fused")


class Bucket(NamedTuple):
    """Tensors that travel together.

    places: where they are in the list of leaves. shapes: theirs. segments: their pieces in a row.
    fused: they are laid end to end as one tensor, which is the only segment.
    """

    places: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    segments: Segments
    fused: bool = False


def buckets(leaves: Sequence[Tensor], world_size: int, align: int, layout: str) -> list[Bucket]:
    """Group leaves into buckets: one per tensor for "per_tensor", else one per (dtype, device).

    "flat" keeps the tensors apart as in the picture above; "fused" lays them end to end, with one scale for all.

    Raises: ValueError if the layout is not one of `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: is {layout!r}; allowed are {LAYOUTS}")
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        key = i if layout == "per_tensor" else (leaf.dtype, leaf.device)
        groups.setdefault(key, []).append(i)
    bucket = _bucket if torch.compiler.is_compiling() else _cached_bucket
    return [
        bucket(tuple(places), tuple(leaves[i].shape for i in places), world_size, align, layout == "fused")
        for places in groups.values()
    ]


def _bucket(
    places: tuple[int, ...], shapes: tuple[torch.Size, ...], world_size: int, align: int, fused: bool
) -> Bucket:
    lengths = [shape.numel() for shape in shapes]
    lengths = [sum(lengths)] if fused else lengths
    widths = [-(-n // (world_size * align)) * align for n in lengths]
    valid = [[min(max(n - r * w, 0), w) for n, w in zip(lengths, widths, strict=True)] for r in range(world_size)]
    return Bucket(places, shapes, Segments(tuple(widths), torch.tensor(valid, dtype=torch.int64)), fused)


_cached_bucket = lru_cache(maxsize=256)(_bucket)  # a step finds the arrangement of the one before


def join(leaves: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Return the bucket's leaves as one vector (n,), n = W rows of `bucket.segments`, zeros in the padding."""
    world_size = bucket.segments.valid.shape[0]
    tensors = [leaves[i].reshape(-1) for i in bucket.places]
    if bucket.fused:
        tensors = [_end_to_end(tensors)]
    elif world_size == 1 and list(bucket.segments.widths) == [t.shape[0] for t in tensors]:
        return _end_to_end(tensors)
    pieces = []
    for flat, width in zip(tensors, bucket.segments.widths, strict=True):
        pad = world_size * width - flat.shape[0]
        pieces.append((F.pad(flat, (0, pad)) if pad else flat).view(world_size, width))
    if len(pieces) == 1:
        return pieces[0].reshape(-1)
    if pieces[0].device.type == "cpu" and is_eager(*pieces):
        row = (world_size, bucket.segments.row_length)
        return torch.cat(pieces, dim=1, out=buffers.empty(row, pieces[0].dtype)).view(-1)
    return torch.cat(pieces, dim=1).reshape(-1)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Return vectors as one; if they lie end to end in memory, as `flatten_parameters` lays gradients, without a copy.

    The result may share memory with the tensors.
    """
    eager = is_eager(*tensors) and not any(t.requires_grad for t in tensors)
    if eager and _adjoin(tensors):
        return tensors[0].as_strided((sum(t.shape[0] for t in tensors),), (1,))
    if eager and tensors[0].device.type == "cpu":
        return torch.cat(list(tensors), out=buffers.empty((sum(t.shape[0] for t in tensors),), tensors[0].dtype))
    return torch.cat(list(tensors))


def _adjoin(tensors: Sequence[Tensor]) -> bool:
    storage, end = tensors[0].untyped_storage()._cdata, tensors[0].storage_offset()
    for t in tensors:
        if t.shape[0] > 1 and t.stride(0) != 1:
            return False
        if t.shape[0] and (t.storage_offset() != end or t.untyped_storage()._cdata != storage):
            return False
        end += t.shape[0]
    return True


def part(vector: Tensor, bucket: Bucket) -> list[Tensor]:
    """Take a vector (n,) apart into tensors of the bucket's shapes, the padding left out."""
    if bucket.fused:
        lengths = [shape.numel() for shape in bucket.shapes]
        ends = vector[: sum(lengths)].split(lengths)
        return [piece.view(shape) for piece, shape in zip(ends, bucket.shapes, strict=True)]
    rows = vector.view(bucket.segments.valid.shape[0], -1)
    pieces = rows.split(list(bucket.segments.widths), dim=1)
    return [p.reshape(-1)[: shape.numel()].view(shape) for p, shape in zip(pieces, bucket.shapes, strict=True)]


def restore(structure: Any, found: dict[int, Tensor]) -> Tree:
    """Put leaves that were found bucket by bucket back into their tree."""
    return tree.unflatten(structure, [found[i] for i in range(len(found))])
