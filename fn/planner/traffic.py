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
from fn.collectives.codecs.codec import Codec, segmented
from fn.collectives.codecs.segments import Segments
from fn.errors import expected
from fn.planner.network import Message
from fn.transforms.bases import Basis

BUCKET = 25 * 2**20
"""Bytes of gradients that DDP sends together."""

FIRST_BUCKET = 2**20
"""Bytes of its first bucket, which is small so that it can leave early."""

MIN_RATE = 2
"""PowerSGD sends a matrix as it is unless its factors are this many times smaller."""


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
    found: list[Model] = []
    taken: list[tuple[int, ...]] = []
    size = 0
    for place, shape in enumerate(reversed(whole.shapes)):
        taken.append(shape)
        size += math.prod(shape) * whole.width
        if size >= (limit if found else first) or place == len(whole.shapes) - 1:
            found.append(Model(tuple(taken), whole.width))
            taken, size = [], 0
    return found


def exact(shapes: Model, ranks: int, axis: str = "data", width: int | None = None) -> list[Message]:
    """Return an all-reduce of all gradients, in one message; `width` is the bytes of an element on the wire."""
    return [Message(axis, "all_reduce", _all_reduce(shapes.params * (width or shapes.width), ranks))]


def halves(shapes: Model, ranks: int, axis: str = "local") -> list[Message]:
    """Return an exact reduce-scatter and an all-gather of everything, as ZeRO makes them.

    What codes between the nodes pad single tensors with, of which the ledger counts every byte, is left out.
    """
    size = (ranks - 1) * -(-shapes.params // ranks) * shapes.width
    return [Message(axis, "reduce_scatter", size), Message(axis, "all_gather", size)]


def codes(
    shapes: Model, ranks: int, codec: Codec, axis: str = "data", *, layout: str = "flat", servers: bool = True
) -> list[Message]:
    """Return the two halves of a compressed all-reduce, `fn.compressed_average`; without servers one all-gather.

    Args: layout: "flat", "per_tensor" or "fused", as there. servers: as there.
    """
    if ranks == 1:
        return []
    lengths = [sum(shapes.lengths)] if layout == "fused" else shapes.lengths
    together = [lengths] if layout != "per_tensor" else [[n] for n in lengths]
    found = []
    for group in together:
        size = (ranks - 1) * row_bytes(codec, group, ranks if servers else 1, width=shapes.width)
        found += [Message(axis, name, size) for name in (("all_to_all", "all_gather") if servers else ("all_gather",))]
    return found


def sharded(shapes: Model, ranks: int, codec: Codec, gather: Codec, axis: str = "data") -> list[Message]:
    """Return a reduce-scatter of gradients in one codec and an all-gather of parameters in another: LoCo, ZeRO++."""
    align = math.lcm(codec.align, gather.align)
    to_all, to_gather = (row_bytes(c, shapes.lengths, ranks, align, shapes.width) for c in (codec, gather))
    found = [Message(axis, "all_to_all", (ranks - 1) * to_all), Message(axis, "all_gather", (ranks - 1) * to_gather)]
    return found if ranks > 1 else []


def row_bytes(codec: Codec, lengths: Sequence[int], ranks: int, align: int | None = None, width: int = 4) -> int:
    """Return the bytes of the row that one rank receives when tensors are cut into `ranks` pieces.

    Args: align: pieces are padded to a multiple of it; None is the codec's own. width: bytes of an element.
    """
    align = align or codec.align
    pieces = Counter(-(-n // (ranks * align)) * align for n in lengths)  # models repeat their shapes
    each = sum(times * _piece_bytes(codec, n, _DTYPES[width]) for n, times in pieces.items())
    return each - (len(lengths) - 1) * _bytes_of_a_row(codec, _DTYPES[width]) if lengths else 0


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
    more = payload_bytes(codec, (2 * period,), dtype) - payload_bytes(codec, (period,), dtype)
    return payload_bytes(codec, (period + n % period,), dtype) + (n // period - 1) * more


def payload_bytes(codec: Codec, widths: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a row in which pieces of several tensors lie side by side, by making its payload."""
    segments = Segments(widths, torch.tensor([widths], device="cpu"))
    row = torch.empty((1, segments.row_length), device="meta", dtype=dtype)
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(segmented(codec, segments).encode(row)))


def power_sgd(shapes: Model, ranks: int, rank: int) -> list[Message]:
    """Return PowerSGD's all-reduces: what is not compressed, the left factors, the right factors."""
    whole, left, right = 0, 0, 0
    for shape in shapes.shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if len(shape) > 1 and (rows + columns) * rank * MIN_RATE < rows * columns:
            left, right = left + rows * min(rank, rows, columns), right + columns * min(rank, rows, columns)
        else:
            whole += rows * columns
    sizes = [_all_reduce(n * shapes.width, ranks) for n in (whole, left, right)]
    return [Message("data", "all_reduce", size) for size in sizes if size]


def low_rank(shapes: Model, ranks: int, rank: int) -> list[Message]:
    """Return the two all-reduces of `fn.low_rank_average`: the left factors with what travels whole, the right ones."""
    first, second = 0, 0
    for shape in shapes.shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if len(shape) > 1 and rank < min(rows, columns) and (rows + columns) * rank < rows * columns:
            first, second = first + rows * rank, second + columns * rank
        else:
            first += rows * columns
    width = max(4, shapes.width)  # factors of half precision are float32
    return [Message("data", "all_reduce", _all_reduce(n * width, ranks)) for n in (first, second) if n and ranks > 1]


def in_basis(
    shapes: Model, ranks: int, basis: Basis, codec_of: Callable[[int], Codec], axis: str = "data"
) -> list[Message]:
    """Return what `fn.in_basis` sends straight to all ranks, a message for each length of chunks.

    Args: codec_of: the length of a chunk -> its codec.
    """
    sizes: dict[int, list[int]] = {}
    for shape, times in Counter(shapes.shapes).items():
        for part in basis.into(torch.empty(shape, device="meta")):
            if part.numel():
                sizes.setdefault(part.shape[1], []).extend([part.numel()] * times)
    width = max(4, shapes.width)
    rows = [row_bytes(codec_of(n), sizes[n], 1, width=width) for n in sorted(sizes)]
    return [Message(axis, "all_gather", (ranks - 1) * row) for row in rows] if ranks > 1 else []


def textbook_onebit(shapes: Model, ranks: int) -> list[Message]:
    """Return what DeepSpeed sends: tensor by tensor, bits and scales apart, four collectives each."""
    found = []
    for n in shapes.lengths:
        bits = (ranks - 1) * -(-n // (ranks * 8))
        scale = (ranks - 1) * 4
        found += [Message("data", "all_to_all", bits), Message("data", "all_gather", scale)]
        found += [Message("data", "all_gather", bits), Message("data", "all_gather", scale)]
    return found if ranks > 1 else []


def _all_reduce(size: int, ranks: int) -> int:
    return -(-2 * (ranks - 1) * size // ranks)
