"""How a tree becomes the vectors that travel.

Every tensor is padded to W equal pieces and piece r of every tensor goes into row r, so each rank serves a part of
each tensor, and scales and blocks of a codec never cross from one tensor into another.

    tensor a (5)        tensor b (3)          W = 2, align = 4
    a0 a1 a2 a3 a4      b0 b1 b2              row 0:  a0 a1 a2 a3 | b0 b1 b2 0
                                              row 1:  a4  0  0  0 |  0  0  0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.collectives.codecs.codec import Segments
from fn.collectives.hierarchy import pieces
from fn.errors import expected
from fn.kernels import memory_pool
from fn.kernels.layout import clear_padding, paired_views, scale_dtype
from fn.kernels.tracing import cached_plan, is_concrete, is_recorded

Tree = Any

LAYOUTS = ("flat", "per_tensor", "fused")


class Bucket(NamedTuple):
    """Tensors that travel together, as one vector (n,) of W rows.

    leaf_indices: their places in the list of leaves. shapes: their shapes. segments: their pieces in a row.
    fused: whether they are laid end to end as one tensor, which is the only segment.
    """

    leaf_indices: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    segments: Segments
    fused: bool = False


def check_layout(layout: str) -> None:
    """Refuse what is not one of `LAYOUTS` with a ValueError."""
    if layout not in LAYOUTS:
        raise ValueError(expected("layout", f"one of {LAYOUTS}", f"{layout!r}"))


def buckets(
    leaves: Sequence[Tensor], world_size: int, align: int, layout: str, *, half_with_float32: bool = False
) -> list[Bucket]:
    """Group leaves into buckets: one per tensor for "per_tensor", else one per (dtype, device).

    "flat" keeps the tensors apart as in the picture above; "fused" lays them end to end, with one scale for all.

    Args: half_with_float32: whether leaves of half precision and of float32 share a bucket.

    Raises: ValueError if the layout is not one of `LAYOUTS`.
    """
    check_layout(layout)
    if layout != "per_tensor" and len({leaf.dtype for leaf in leaves}) == 1 == len({leaf.device for leaf in leaves}):
        groups = {None: [*range(len(leaves))]}  # the common case, without hashing each leaf's key in every step
    else:
        kinds = [(scale_dtype(leaf) if half_with_float32 else leaf.dtype, leaf.device) for leaf in leaves]
        groups = tree.places_by(range(len(leaves)) if layout == "per_tensor" else kinds)
    return [
        _bucket(tuple(places), tuple(leaves[i].shape for i in places), world_size, align, layout == "fused")
        for places in groups.values()
    ]


@cached_plan
def _bucket(
    places: tuple[int, ...], shapes: tuple[torch.Size, ...], world_size: int, align: int, fused: bool
) -> Bucket:
    lengths = [shape.numel() for shape in shapes]
    lengths = [sum(lengths)] if fused else lengths
    # of each tensor, its elements in a row: ceil(n / W) rounded up to the codec's alignment; row r has the r-th run
    widths = [-(-n // (world_size * align)) * align for n in lengths]
    # (W, S): how many elements are real in row r of tensor s; the last rows may have none
    valid = [[min(max(n - r * w, 0), w) for n, w in zip(lengths, widths, strict=True)] for r in range(world_size)]
    counts = torch.tensor(valid, dtype=torch.int64, device="cpu")  # also where the default device is "meta"
    return Bucket(places, shapes, Segments(tuple(widths), counts), fused)


def join(leaves: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Return the bucket's leaves as one vector (n,), n = W rows of `bucket.segments`, zeros in the padding."""
    world_size = bucket.segments.valid.shape[0]
    tensors = [leaves[i].reshape(-1) for i in bucket.leaf_indices]  # (n_i,) each
    if bucket.fused:
        # (n_i,) each -> one vector, which is the only segment
        tensors = [end_to_end(tensors)]
    elif world_size == 1 and list(bucket.segments.widths) == [t.shape[0] for t in tensors]:
        # One row without padding: where leaves lie end to end, nothing is copied.
        return end_to_end(tensors)
    if len(tensors) > 1 and tensors[0].device.type == "cpu" and is_concrete(*tensors) and not is_recorded(tensors):
        # Into memory that is used again in each step: fresh pages would cost more than the copy.
        table = memory_pool.empty((world_size, bucket.segments.row_length), tensors[0].dtype, tensors[0].device)
        clear_padding(table, [t.shape[0] for t in tensors], bucket.segments.widths)
        # (n_i,) each -> their places in the table (W, n / W)
        flats, rows = paired_views([t.detach() for t in tensors], table, bucket.segments.widths)
        if flats:
            torch._foreach_copy_(rows, flats)
        return table.view(-1)
    pieces = []
    for flat, width in zip(tensors, bucket.segments.widths, strict=True):
        pad = world_size * width - flat.shape[0]
        pieces.append((F.pad(flat, (0, pad)) if pad else flat).view(world_size, width))  # (n_i,) -> (W, width)
    if len(pieces) == 1:
        # (W, width) -> (n,), without a copy
        return pieces[0].reshape(-1)
    return torch.cat(pieces, dim=1).reshape(-1)  # (W, n / W) -> (n,)


def parts(bucket: Bucket) -> list[Bucket]:
    """Cut a bucket into those of its `pieces`, in which tensors travel exactly; a fused one is a single piece."""
    cuts = pieces(bucket.segments)
    if bucket.fused or len(cuts) == 1:
        return [bucket]
    cut_buckets = []
    for first, end in cuts:
        segments = Segments(bucket.segments.widths[first:end], bucket.segments.valid[:, first:end].contiguous())
        cut_buckets.append(Bucket(bucket.leaf_indices[first:end], bucket.shapes[first:end], segments))
    return cut_buckets


def is_fresh(x: Tensor, leaves: Sequence[Tensor], bucket: Bucket) -> bool:
    """Return whether a vector that `join` made of leaves has memory of its own, so that it may be overwritten.

    Else it is a view of the leaves, which lie end to end in memory, so that the first of them tells.
    """
    first = leaves[bucket.leaf_indices[0]]
    # By storages: in a trace there are none to compare, and nothing is written over.
    return is_concrete(x, first) and x.untyped_storage()._cdata != first.untyped_storage()._cdata


def rows_of(leaves: Sequence[Tensor], bucket: Bucket) -> Sequence[Tensor] | Tensor:
    """Return the W rows of what `join` returns, without copying those that are contiguous in memory already.

    Outside of vmap and compilation. As one tensor (W, n / W) where they have to be joined: a collective of a device
    sends it as it is.
    """
    rows, width = bucket.segments.valid.shape[0], bucket.segments.row_length
    on_device = leaves[bucket.leaf_indices[0]].device.type != "cpu"
    if on_device or (not bucket.fused and len(bucket.leaf_indices) > 1):
        return join(leaves, bucket).view(rows, width)
    # (n_i,) each -> (n,) without the padding behind it
    flat = end_to_end([leaves[i].reshape(-1) for i in bucket.leaf_indices])
    # W views of (n / W,); the last ones may be shorter, or empty, and are padded
    cuts = [flat[r * width : (r + 1) * width] for r in range(rows)]
    return [row if row.shape[0] == width else _padded(row, width) for row in cuts]


def _padded(row: Tensor, width: int) -> Tensor:
    # (k,) -> (width,)
    out = memory_pool.empty((width,), row.dtype, row.device)
    out[: row.shape[0]].copy_(row)
    out[row.shape[0] :].zero_()
    return out


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Return vectors as one. If they lie end to end in memory, as with `flatten_parameters`, it is a view of them."""
    eager = is_concrete(*tensors) and not is_recorded(tensors)
    if eager and adjoin(tensors):
        # (n_i,) each -> (n,), a view of all of them
        return tensors[0].as_strided((sum(t.shape[0] for t in tensors),), (1,))
    if eager and tensors[0].device.type == "cpu":
        # Memory that is used again: fresh pages would cost more than the copy.
        out = memory_pool.empty((sum(t.shape[0] for t in tensors),), tensors[0].dtype, tensors[0].device)
        return torch.cat(list(tensors), out=out)
    return torch.cat(list(tensors))


def adjoin(tensors: Sequence[Tensor]) -> bool:
    """Return whether vectors lie end to end in memory."""
    storage, end = tensors[0].untyped_storage()._cdata, tensors[0].storage_offset()
    for t in tensors:
        # A vector of one element may have any stride, and one of none may lie anywhere.
        if t.shape[0] > 1 and t.stride(0) != 1:
            return False
        if t.shape[0] and (t.storage_offset() != end or t.untyped_storage()._cdata != storage):
            return False
        end += t.shape[0]
    return True


def split(vector: Tensor, bucket: Bucket) -> list[Tensor]:
    """Take a vector (n,) apart into tensors of the bucket's shapes, the padding left out."""
    if bucket.fused:
        lengths = [shape.numel() for shape in bucket.shapes]
        ends = vector[: sum(lengths)].split(lengths)
        # (n_i,) -> the shape of the leaf; the padding is behind all of them
        return [piece.view(shape) for piece, shape in zip(ends, bucket.shapes, strict=True)]
    pieces = _columns(vector.view(bucket.segments.valid.shape[0], -1), list(bucket.segments.widths))  # (W, width) each
    # (W, width) -> (W width,), of which the first are the leaf's
    return [p.reshape(-1)[: shape.numel()].view(shape) for p, shape in zip(pieces, bucket.shapes, strict=True)]


def _columns(rows: Tensor, widths: list[int]) -> Sequence[Tensor]:
    """Cut rows (W, n / W) into columns (W, width); on a device several rows are copied, by one kernel for all columns.

    Each column would be copied by itself where it is made a vector; one row's is a vector already.
    """
    if rows.device.type == "cpu" or rows.shape[0] == 1 or not is_concrete(rows) or is_recorded([rows]):
        cuts: Sequence[Tensor] = rows.split(widths, dim=1)
        return cuts
    columns = [rows.new_empty((rows.shape[0], width)) for width in widths]
    torch.split_with_sizes_copy(rows, widths, dim=1, out=columns)
    return columns


def split_into(tensors: Sequence[Tensor], vector: Tensor, bucket: Bucket) -> None:
    """Write a vector (n,), taken apart, into contiguous tensors of the bucket's shapes, rounding to their dtypes."""
    if bucket.fused:
        for tensor, piece in zip(tensors, split(vector, bucket), strict=True):
            tensor.copy_(piece)
        return
    table, widths = vector.view(bucket.segments.valid.shape[0], -1), list(bucket.segments.widths)
    rows = table.shape[0]
    on_device = table.device.type != "cpu" and all(t.dtype == table.dtype for t in tensors)
    if on_device and all(t.numel() == rows * width for t, width in zip(tensors, widths, strict=True)):
        # one kernel; for a list of views with gaps, `_foreach_copy_` launches one each
        # Detached: with gradients on, torch refuses an `out` that requires one.
        columns = [t.detach().view(rows, width) for t, width in zip(tensors, widths, strict=True)]
        torch.split_with_sizes_copy(table, widths, dim=1, out=columns)
        return
    # (W, n / W) -> (n_i,) each, piece by piece
    flats, pieces = paired_views([t.view(-1) for t in tensors], table, widths)
    if flats:
        torch._foreach_copy_(flats, pieces)


def cuts(bucket: Bucket, row: int) -> list[int]:
    """Return how many elements of a row belong to each tensor, padding included."""
    if not bucket.fused:
        return list(bucket.segments.widths)
    width, ends = bucket.segments.row_length, [*accumulate(shape.numel() for shape in bucket.shapes)]
    ends[-1] = width * bucket.segments.valid.shape[0]  # the padding is behind the last one
    inside = [min(max(end - row * width, 0), width) for end in ends]
    return [end - start for start, end in zip([0, *inside], inside, strict=False)]


def part(vector: Tensor, bucket: Bucket, row: int, s: int) -> Tensor:
    """Return what tensor s has of a vector, with its padding, in its memory.

    Args: vector: of the bucket, (n,), or row `row` of that, (n / W,).
    """
    rows, width = bucket.segments.valid.shape[0], bucket.segments.row_length
    if vector.shape[0] == width:
        lengths, at = cuts(bucket, row), vector
    elif bucket.fused:
        lengths, at = [sum(of_rows) for of_rows in zip(*(cuts(bucket, r) for r in range(rows)), strict=True)], vector
    else:
        lengths, at = cuts(bucket, row), vector.view(rows, width)  # (n,) -> (W, n / W), of which it has columns
    return at.narrow(-1, sum(lengths[:s]), lengths[s])


def spread(numbers: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Return for each element of a bucket's rows the number of its tensor, (W, n / W). Args: numbers: 0-d each."""
    rows, width = bucket.segments.valid.shape[0], bucket.segments.row_length
    if not bucket.fused:
        # (width_s,) each -> (n / W,); the rows are alike
        return torch.cat([x.expand(w) for x, w in zip(numbers, bucket.segments.widths, strict=True)]).expand(rows, -1)
    lengths = [shape.numel() for shape in bucket.shapes]
    lengths[-1] += rows * width - sum(lengths)
    # (n_i,) each -> (n,) -> (W, n / W)
    return torch.cat([x.expand(n) for x, n in zip(numbers, lengths, strict=True)]).view(rows, width)


def nonzero(row: Tensor, bucket: Bucket, index: int | Tensor) -> Tensor:
    """Return for each tensor whether its part of a row (n / W,) has a number other than zero, (S,) bool.

    Args: index: of the row; 0-d in a trace or under vmap.
    """
    if isinstance(index, int):
        return torch.stack([x.any() for x in row.split(cuts(bucket, index))])
    # The ends of the parts in all rows, (W, S + 1) -> in this one, (S + 1,)
    of_rows = [[0, *accumulate(cuts(bucket, r))] for r in range(bucket.segments.valid.shape[0])]
    ends = torch.tensor(of_rows, dtype=torch.int64, device=row.device)
    ends = ends.index_select(0, index.to(row.device).view(1)).view(-1)
    up_to = F.pad((row != 0).cumsum(0), (1, 0))  # (n / W + 1,)
    return up_to.gather(0, ends).diff() > 0


def restore(structure: Any, leaf_at: dict[int, Tensor]) -> Tree:
    """Return the tree of leaves that were made bucket by bucket. leaf_at: place -> leaf."""
    return tree.unflatten(structure, [leaf_at[i] for i in range(len(leaf_at))])
