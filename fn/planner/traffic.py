"""What a step of each method sends: the collectives with their bytes, exactly as the ledger counts them.

A codec's bytes are those of the payload that it makes of one row on the meta device, where tensors have shapes and no
data; everything else is a product of shapes and ranks. So 10^5 ranks cost no more than two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from fn import tree
from fn.collectives.codecs.codec import Codec, Segments, identity, segmented
from fn.errors import expected
from fn.planner.network import Message
from fn.transforms.bases import Basis

BUCKET = 25 * 2**20
"""Bytes of gradients that DDP sends together."""

FIRST_BUCKET = 2**20
"""Bytes of its first bucket, which is small so that it can leave early."""

MIN_RATE = 2
"""PowerSGD sends a matrix as it is unless its factors are this many times smaller."""

EXACTLY = identity()
"""One object, so that what is known of it is found again."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Model(NamedTuple):
    """shapes: of the parameters. width: bytes of an element of the gradients."""

    shapes: tuple[tuple[int, ...], ...]
    width: int = 4

    @property
    def lengths(self) -> list[int]:
        """Return the number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def params(self) -> int:
        """Return the number of parameters."""
        return sum(self.lengths)


def model(params: int, tensors: int = 150, width: int = 4) -> Model:
    """Return a model of `params` parameters in about equal square matrices, where nothing better is known.

    Raises: ValueError if there are fewer parameters than tensors.
    """
    if not 1 <= tensors <= params:
        raise ValueError(expected("tensors", f"1 to {params}, the number of parameters", f"{tensors}"))
    side = math.isqrt(params // tensors)
    rest = params - side * side * (tensors - 1)
    last = [shape for shape in ((rest // side, side), (rest % side,)) if math.prod(shape)]
    return Model(((side, side),) * (tensors - 1) + tuple(last), width)


def buckets(whole: Model, limit: int = BUCKET, first: int = FIRST_BUCKET) -> list[Model]:
    """Return what DDP sends together: parameters from the last to the first, a bucket closed when it is full."""
    full: list[Model] = []
    shapes: list[tuple[int, ...]] = []
    size = 0
    for i, shape in enumerate(reversed(whole.shapes)):
        shapes.append(shape)
        size += math.prod(shape) * whole.width
        if size >= (limit if full else first) or i == len(whole.shapes) - 1:
            full.append(Model(tuple(shapes), whole.width))
            shapes, size = [], 0
    return full


Ranks = int | tuple[int, int]
"""Ranks of the axis "data"; or (ranks of a node, nodes), which are those of the axes ("local", "node")."""


def exact(shapes: Model, ranks: Ranks, width: int | None = None) -> list[Message]:
    """Return an all-reduce of all gradients; over two axes that of a shard, between the halves of a node's.

    Args: width: bytes of an element on the wire; None is that of the gradients.
    """
    local, outer, axis = _axes(ranks)
    shard = -(-shapes.params // local) * (width or shapes.width)
    between = [Message(axis, "all_reduce", _all_reduce(shard, outer))] if outer > 1 else []
    return [*_rows("local", "all_to_all", local, shard), *between, *_rows("local", "all_gather", local, shard)]


def share(shapes: Model, ranks: Ranks, density: float) -> list[Message]:
    """Return an average of one number of each 1/density, as `fn.sparse_average` sends it, in float32 at least."""
    piece = max(1, round(1 / density))
    return exact(Model(((sum(-(-n // piece) for n in shapes.lengths),),), max(4, shapes.width)), ranks)


def pairs(shapes: Model, ranks: int) -> list[Message]:
    """Return what `fn.pair_average` sends to one other rank: differences and anchors."""
    size = 2 * shapes.params * max(4, shapes.width)
    return [Message("data", "permute", size)] if ranks > 1 else []


def codes(
    shapes: Model, ranks: Ranks, codec: Codec, *, layout: str = "flat", servers: bool = True
) -> list[Message]:
    """Return the two halves of a compressed all-reduce, `fn.compressed_average`; without servers one all-gather.

    Over two axes it is one of shards of the node's exact mean, whose codes go on within the node as they came.

    Args: layout, servers: as for `fn.compressed_average`.
    """
    local, outer, axis = _axes(ranks)
    served = outer if servers else 1
    lengths = [sum(shapes.lengths)] if layout == "fused" else shapes.lengths
    messages = []
    for group in [lengths] if layout != "per_tensor" else [[n] for n in lengths]:
        whole = _padded(group, local * served, codec.align) * shapes.width
        # Over two axes a node's exact mean is encoded, which is float32 at least.
        row = row_bytes(codec, group, local * served, width=shapes.width if local == 1 else max(4, shapes.width))
        messages += _rows("local", "all_to_all", local, served * whole)
        messages += _rows(axis, "all_to_all", outer, row) if servers else []
        messages += _rows(axis, "all_gather", outer, row) + _rows("local", "all_gather", local, outer * row)
    return messages


def sharded(shapes: Model, ranks: Ranks, codec: Codec, gather: Codec) -> list[Message]:
    """Return a reduce-scatter of gradients in one codec and an all-gather of parameters in another: LoCo, ZeRO++.

    Within a node both are exact.
    """
    local, outer, axis = _axes(ranks)
    align = math.lcm(codec.align, gather.align)
    whole = _padded(shapes.lengths, local * outer, align) * shapes.width
    row = row_bytes(codec, shapes.lengths, local * outer, align, shapes.width)
    to = _rows("local", "all_to_all", local, outer * whole) + _rows(axis, "all_to_all", outer, row)
    return to + _back(shapes, ranks, gather, align)


def owned(shapes: Model, ranks: int, codec: Codec = EXACTLY, gather: Codec = EXACTLY) -> list[Message]:
    """Return what `fn.owned` sends in the mean over the ranks: gradients to owners, updates back, float32 at least."""

    def message(collective: str, codec: Codec, width: int) -> list[Message]:
        size = sum(_piece_bytes(codec, _padded([n], 1, codec.align), _DTYPES[width]) for n in shapes.lengths)
        return [Message("data", collective, -(-size * (ranks - 1) // ranks))] if ranks > 1 and size else []

    return message("all_to_all", codec, shapes.width) + message("all_gather", gather, max(4, shapes.width))


def apart(
    shapes: Model, ranks: Ranks, hidden: Callable[..., list[Message]], other: Callable[..., list[Message]]
) -> list[Message]:
    """Return what is sent of matrices, and behind it what is sent of the others.

    Args: hidden, other: (model, ranks) -> messages.
    """
    kinds = [Model(tuple(s for s in shapes.shapes if (len(s) == 2) is hid), shapes.width) for hid in (True, False)]
    return [m for kind, send in zip(kinds, (hidden, other), strict=True) if kind.shapes for m in send(kind, ranks)]


def largest_rows(shapes: Model, ranks: Ranks, fraction: float) -> list[Message]:
    """Return what `fn.scale_by_dion2` sends of matrices: the sizes of all rows of the smaller side, and some rows."""
    sizes, chosen = 0, 0
    for shape in shapes.shapes:
        rows, length = sorted(shape)
        sizes, chosen = sizes + rows, chosen + math.ceil(round(fraction * rows, 6)) * length
    width = max(4, shapes.width)  # momenta of half precision are float32
    return [m for n in (sizes, chosen) if n for m in exact(Model(((n,),), width), ranks)]


def sharded_momentum(shapes: Model, ranks: Ranks, codec: Codec) -> list[Message]:
    """Return a compressed all-reduce of the momentum, in float32, and an exact all-gather of the updates' shards."""
    wide = shapes._replace(width=max(4, shapes.width))
    return codes(wide, ranks, codec) + _back(shapes, ranks, EXACTLY, codec.align)


def _back(shapes: Model, ranks: Ranks, gather: Codec, align: int) -> list[Message]:
    local, outer, axis = _axes(ranks)
    whole = _padded(shapes.lengths, local * outer, align) * shapes.width
    row = row_bytes(gather, shapes.lengths, local * outer, align, shapes.width)
    return _rows(axis, "all_gather", outer, row) + _rows("local", "all_gather", local, outer * whole)


def _axes(ranks: Ranks) -> tuple[int, int, str]:
    """Return the ranks of a node, what they are repeated by, and the axis of the latter; flat is one rank a node."""
    return (1, ranks, "data") if isinstance(ranks, int) else (*ranks, "node")


def _padded(lengths: Sequence[int], rows: int, align: int) -> int:
    """Return the elements of a row when tensors are cut into so many pieces, each a multiple of `align`."""
    return sum(-(-n // (rows * align)) * align for n in lengths)


def _rows(axis: str, collective: str, ranks: int, size: int) -> list[Message]:
    """Return a collective in which every rank sends so many bytes to each other one; none if there is no other."""
    return [Message(axis, collective, (ranks - 1) * size)] if ranks > 1 else []


def row_bytes(codec: Codec, lengths: Sequence[int], ranks: int, align: int | None = None, width: int = 4) -> int:
    """Return the bytes of the row that one rank receives when tensors are cut into `ranks` pieces.

    Args: align: pieces are padded to a multiple of it; None is the codec's own. width: bytes of an element.
    """
    align = align or codec.align
    pieces = Counter(-(-n // (ranks * align)) * align for n in lengths)  # models repeat their shapes
    alone = sum(times * _piece_bytes(codec, n, _DTYPES[width]) for n, times in pieces.items())
    # Each piece was counted as a row of its own; what a row has once, whatever lies in it, is counted once.
    return alone - (len(lengths) - 1) * _bytes_of_a_row(codec, _DTYPES[width]) if lengths else 0


@cache
def _bytes_of_a_row(codec: Codec, dtype: torch.dtype) -> int:
    """Return the bytes that a row has once, however many pieces lie in it."""
    return 2 * payload_bytes(codec, (codec.align,), dtype) - payload_bytes(codec, (codec.align,) * 2, dtype)


PERIOD = 2**20
"""Units of a codec's `align` after which its payload repeats: blocks divide it."""


@cache
def _piece_bytes(codec: Codec, n: int, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor's piece of n elements; longer ones than torch has tensors for cost what they add."""
    if n == 0:  # what an empty tensor adds to others
        adds = payload_bytes(codec, (codec.align, 0), dtype) - payload_bytes(codec, (codec.align,), dtype)
        return adds + _bytes_of_a_row(codec, dtype)
    period = PERIOD * codec.align
    if n < 3 * period or math.isnan(codec.bits):  # what depends on the length is not periodic
        return payload_bytes(codec, (n,), dtype)
    return payload_bytes(codec, (period + n % period,), dtype) + (n // period - 1) * _bytes_of_a_period(codec, dtype)


@cache
def _bytes_of_a_period(codec: Codec, dtype: torch.dtype) -> int:
    period = PERIOD * codec.align
    return payload_bytes(codec, (2 * period,), dtype) - payload_bytes(codec, (period,), dtype)


def payload_bytes(codec: Codec, widths: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a row in which pieces of several tensors lie side by side, by making its payload."""
    segments = Segments(widths, torch.tensor([widths], dtype=torch.int64, device="cpu"))
    row = torch.empty((1, segments.row_length), device="meta", dtype=dtype)
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(segmented(codec, segments).encode(row)))


def power_sgd(shapes: Model, ranks: int, rank: int) -> list[Message]:
    """Return the all-reduces of torch's PowerSGD: what is not compressed, the left factors, the right factors."""
    whole, left, right = 0, 0, 0
    for shape in shapes.shapes:
        rows, columns = _sides(shape)
        if len(shape) > 1 and (rows + columns) * rank * MIN_RATE < rows * columns:
            left, right = left + rows * min(rank, rows, columns), right + columns * min(rank, rows, columns)
        else:
            whole += rows * columns
    return [m for n in (whole, left, right) if n for m in exact(Model(((n,),), shapes.width), ranks)]


def low_rank(shapes: Model, ranks: Ranks, rank: int | float, *, orthonormal: bool = False) -> list[Message]:
    """Return the two all-reduces of `fn.low_rank_average`: the left factors with what travels whole, the right ones.

    Args: rank, orthonormal: as for `fn.low_rank_average`.
    """
    first, second = 0, 0
    for shape in shapes.shapes:
        rows, columns = _sides(shape)
        least = min(rows, columns)
        r = math.ceil(round(rank * least, 6)) if isinstance(rank, float) else rank
        if len(shape) > 1 and r < least and (rows + columns) * r < rows * columns:
            left, right = (columns, rows) if orthonormal and rows < columns else (rows, columns)
            first, second = first + left * r, second + right * r
        else:
            first += rows * columns
    width = max(4, shapes.width)  # factors of half precision are float32
    return [m for n in (first, second) if n for m in exact(Model(((n,),), width), ranks)]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def in_basis(shapes: Model, ranks: Ranks, basis: Basis, codec_of: Callable[[int], Codec]) -> list[Message]:
    """Return what `fn.in_basis` sends without servers, a message for each length of chunks.

    Args: codec_of: the length of a chunk -> its codec.
    """
    parts: dict[int, list[tuple[int, ...]]] = {}
    for shape, times in Counter(shapes.shapes).items():
        for n, size in _chunks(shape, basis):
            parts.setdefault(n, []).extend([(size,)] * times)
    width = max(4, shapes.width)
    return [m for n in sorted(parts) for m in codes(Model(tuple(parts[n]), width), ranks, codec_of(n), servers=False)]


@cache
def _chunks(shape: tuple[int, ...], basis: Basis) -> list[tuple[int, int]]:
    """Return the length of the chunks of each part of a tensor, and its elements."""
    parts = basis.into(torch.empty(shape, dtype=torch.float32, device="meta"))
    return [(part.shape[1], part.numel()) for part in parts if part.numel()]


def textbook_onebit(shapes: Model, ranks: int) -> list[Message]:
    """Return what DeepSpeed sends: tensor by tensor, bits and scales apart, four collectives each."""
    messages = []
    for n in shapes.lengths:
        bits = (ranks - 1) * -(-n // (ranks * 8))
        scale = (ranks - 1) * 4
        messages += [Message("data", "all_to_all", bits), Message("data", "all_gather", scale)]
        messages += [Message("data", "all_gather", bits), Message("data", "all_gather", scale)]
    return messages if ranks > 1 else []


def _all_reduce(size: int, ranks: int) -> int:
    return -(-2 * (ranks - 1) * size // ranks)
