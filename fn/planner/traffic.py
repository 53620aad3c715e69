"""The messages of a step of each method: collectives with their bytes, exactly as the ledger counts them.

A codec's bytes are those of the payload that it makes of one row of zeros; everything else is a product of shapes and
ranks. So 10^5 ranks cost no more than two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import accumulate, groupby, pairwise, product
from typing import NamedTuple

import torch

from fn import tree
from fn.collectives.codecs.codec import Codec, Segments, identity, segmented
from fn.errors import expected
from fn.kernels.table import only_references
from fn.planner.gpt import Gpt, gpt
from fn.planner.network import Message

BUCKET = 25 * 2**20
"""Bytes of gradients that DDP sends together."""

FIRST_BUCKET = 2**20
"""Bytes of its first bucket, which is small so that it can leave early."""

MIN_RATE = 2
"""PowerSGD sends a matrix as it is unless its factors are this many times smaller."""

EXACTLY = identity()
"""One object, so that caches find its sizes again."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


Shape = tuple[int, ...]


class Run(NamedTuple):
    """Tensors of a shape, one behind the other: how many, and whether they are matrices of hidden layers."""

    shape: Shape
    times: int
    hidden: bool


class Model(NamedTuple):
    """shapes: of the parameters, in their order. width: bytes of an element of the gradients.

    times: how often each of the shapes comes, one behind the other: what is calculated of a model takes as long as it
    has different shapes. (): each comes once.
    hidden: whether those of a shape are matrices of hidden layers, or stacks of them, as `fn.labels_of` says. (): all
    matrices count as such, as for optimizers that are given no labels.
    """

    shapes: tuple[Shape, ...]
    width: int = 4
    times: tuple[int, ...] = ()
    hidden: tuple[bool, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """Return each shape, how often it comes, and whether it is hidden."""
        hidden = self.hidden or [len(shape) == 2 for shape in self.shapes]
        return [Run(*run) for run in zip(self.shapes, self.times or [1] * len(self.shapes), hidden, strict=True)]

    @property
    def lengths(self) -> Counter[int]:
        """Return the number of elements of the tensors, and how many have so many."""
        counts: Counter[int] = Counter()
        for shape, times, _ in self.runs:
            counts[math.prod(shape)] += times
        return counts

    @property
    def tensors(self) -> int:
        """Return the number of tensors."""
        return sum(run.times for run in self.runs)

    @property
    def params(self) -> int:
        """Return the number of parameters."""
        return sum(math.prod(run.shape) * run.times for run in self.runs)

    @property
    def hidden_share(self) -> float:
        """Return the part of the parameters that is in matrices of hidden layers."""
        return self.of_kind(hidden=True).params / self.params

    def of_kind(self, *, hidden: bool) -> Model:
        """Return the model of matrices of hidden layers alone, or of the other tensors."""
        return of_runs([run for run in self.runs if run.hidden is hidden], self.width)


def of_runs(runs: Iterable[Run], width: int) -> Model:
    """Return the model of runs; those that come no time are left out."""
    some = [run for run in runs if run.times]
    shapes, times = tuple(run.shape for run in some), tuple(run.times for run in some)
    return Model(shapes, width, times, tuple(run.hidden for run in some))


def in_slices(shapes: Model) -> Model:
    """Return the model whose stacks of hidden matrices, such as experts (e, m, n), are e tensors, as owners count them.

    What else has three dimensions, such as a convolution, is one.
    """
    runs = [
        Run(shape[1:], times * shape[0], hidden) if hidden and len(shape) > 2 else Run(shape, times, hidden)
        for shape, times, hidden in shapes.runs
    ]
    return of_runs(runs, shapes.width)


def of_shapes(shapes: Iterable[Shape], width: int, hidden: Iterable[bool] = ()) -> Model:
    """Return the model of parameters of these shapes. Args: hidden: as for `Model`, of each of them."""
    each = Model(tuple(shapes), width, hidden=tuple(hidden))
    alike = [(run, len(list(same))) for run, same in groupby(each.runs)]
    return of_runs([run._replace(times=count) for run, count in alike], width)


def model(params: int, tensors: int | None = None, width: int = 4, share: float | None = None) -> Model:
    """Return a model of so many parameters, where nothing better is known: the one that `gpt` assumes.

    Args: tensors: about equal squares in place of layers, so many. share: the part of the parameters in hidden
        matrices; None is that of `gpt`.
    Raises: ValueError if there are fewer parameters than tensors.
    """
    if tensors is not None and not 1 <= tensors <= params:
        raise ValueError(expected("tensors", f"1 to {params}, the number of parameters", f"{tensors}"))
    assumed = gpt(params, share)
    if tensors is None:
        return of_runs([*_embeddings(assumed), *_layers(assumed)], width)
    kinds = ((assumed.other, False), (assumed.hidden, True))
    return of_runs([run for n, hidden in kinds for run in _squares(n, round(tensors * n / params), hidden)], width)


def _embeddings(assumed: Gpt) -> list[Run]:
    """Return the embeddings, two vectors for each layer and one behind them, as far as there are parameters."""
    wide = assumed.wide
    vectors = min(2 * assumed.layers + 1, assumed.other // wide)
    rows, rest = divmod(assumed.other - vectors * wide, wide)
    return [Run((rows, wide), bool(rows), False), Run((wide,), vectors, False), Run((rest,), bool(rest), False)]


def _layers(assumed: Gpt) -> list[Run]:
    """Return the matrices of attention, queries and keys apart, and those of the MLPs; and of a layer that is cut off.

    Alike stand one behind the other, which shortens what is calculated, and of an MLP both as the first one lies.
    """
    wide = assumed.wide
    layers, left = divmod(assumed.hidden, 12 * wide**2)
    return [Run((wide, wide), 4 * layers, True), Run((4 * wide, wide), 2 * layers, True), *_rows_of(left, wide)]


def _squares(params: int, tensors: int, hidden: bool) -> list[Run]:
    tensors = max(1, tensors)
    side = math.isqrt(params // tensors)
    if not side:  # there are none
        return []
    # What the other squares leave are rows of the same length.
    rest = _rows_of(params - side * side * (tensors - 1), side)
    return [run._replace(hidden=hidden) for run in (Run((side, side), tensors - 1, hidden), *rest)]


def _rows_of(params: int, wide: int) -> list[Run]:
    """Return a hidden matrix with rows of this length, and one of a row of what is left."""
    rows, rest = divmod(params, wide)
    return [Run((rows, wide), bool(rows), True), Run((1, rest), bool(rest), True)]


@cache
def buckets(whole: Model, limit: int = BUCKET, first: int = FIRST_BUCKET) -> list[Model]:
    """Return the buckets of DDP: parameters from the last to the first, a bucket closed when it is full."""
    full: list[Model] = []
    inside: list[Run] = []
    size = 0
    for shape, left, hidden in reversed(whole.runs):
        each = math.prod(shape) * whole.width
        while left:
            room = (limit if full else first) - size
            # As many of these tensors as fill the bucket; the one that fills it still belongs to it.
            fit = min(left, max(1, -(-room // each))) if each else left
            inside.append(Run(shape, fit, hidden))
            size, left = size + fit * each, left - fit
            if size >= (limit if full else first):
                full.append(of_runs(inside, whole.width))
                inside, size = [], 0
    return [*full, of_runs(inside, whole.width)] if inside else full


def fragments(whole: Model, count: int) -> list[Model]:
    """Return a model's tensors dealt out to so many fragments in turn, those that get none left out."""
    ends = [0, *accumulate(run.times for run in whole.runs)]
    found = []
    for i in range(count):  # of the tensors start .. end of a run, those whose place divided by `count` leaves i
        dealt = [(i - start) // count - (i - end) // count for start, end in pairwise(ends)]
        if any(dealt):
            runs = zip(whole.runs, dealt, strict=True)
            found.append(of_runs([run._replace(times=times) for run, times in runs], whole.width))
    return found


Ranks = int | tuple[int, int]
"""Ranks of the axis "data"; or (ranks of a node, nodes), which are those of the axes ("local", "node")."""


def exact(shapes: Model, ranks: Ranks, width: int | None = None) -> list[Message]:
    """Return an all-reduce of all gradients; over two axes that of a shard, between the halves of a node's.

    Args: width: bytes of an element on the wire; None is that of the gradients.
    """
    local, outer, axis = _axes(ranks)
    # Within a node gradients are scattered and gathered in rows; between nodes each rank reduces its own row.
    shard = -(-shapes.params // local) * (width or shapes.width)
    between = [Message(axis, "all_reduce", _all_reduce(shard, outer))] if outer > 1 else []
    return [*_rows("local", "all_to_all", local, shard), *between, *_rows("local", "all_gather", local, shard)]


def codes(
    shapes: Model, ranks: Ranks, codec: Codec, *, layout: str = "flat", servers: bool = True
) -> list[Message]:
    """Return the two halves of a compressed all-reduce, `fn.compressed_average`; without servers one all-gather.

    Over two axes it is one of shards of the node's exact mean, whose codes go on within the node as they came.

    Args: layout, servers: as for `fn.compressed_average`.
    """
    local, outer, axis = _axes(ranks)
    # Without servers nobody cuts the vector into a piece for each rank: whole rows are gathered.
    served = outer if servers else 1
    lengths = Counter([shapes.params]) if layout == "fused" else shapes.lengths
    messages = []
    for group in [lengths] if layout != "per_tensor" else [Counter([n]) for n in lengths.elements()]:
        whole = _padded(group, local * served, codec.align) * shapes.width
        # Over two axes a node's exact mean is encoded, which is float32 at least.
        row = row_bytes(codec, group, local * served, width=shapes.width if local == 1 else max(4, shapes.width))
        # Order as in the collective: exact rows within the node, codes to the servers, and back the same way.
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


def owned(shapes: Model, ranks: Ranks, codec: Codec = EXACTLY, gather: Codec = EXACTLY) -> list[Message]:
    """Return the messages of `fn.owned`, a mean over ranks: gradients to owners, updates back, float32 at least.

    Whatever its label, each tensor has an owner; of stacks of hidden matrices slices have.

    Over two axes a node's exact means travel to the owners, and what comes back goes on within the node as it came.
    """
    shapes = in_slices(shapes)
    local, outer, across = _axes(ranks)
    wide = max(4, shapes.width)

    def message(axis: str, collective: str, codec: Codec, width: int) -> list[Message]:
        sizes = {n: _piece_bytes(codec, _padded({n: 1}, 1, codec.align), _DTYPES[width]) for n in shapes.lengths}
        size = sum(sizes[n] * times for n, times in shapes.lengths.items())
        size, count = (size * (local - 1), local) if axis == "local" else (size * (outer - 1), outer * local)
        return [Message(axis, collective, -(-size // count))] if size else []

    there = message("local", "all_to_all", EXACTLY, shapes.width)
    there += message(across, "all_to_all", codec, shapes.width if local == 1 else wide)
    return there + message(across, "all_gather", gather, wide) + message("local", "all_gather", gather, wide)


def unsharded(shapes: Model, ranks: Ranks, codec: Codec = EXACTLY, gather: Codec = EXACTLY) -> list[Message]:
    """Return the messages of Muon on shards: pieces of hidden matrices to their owners and back, and a flag.

    Pieces are rows, float32 at least. A slice of a stack lies on one rank and stays there. Over two axes shards lie
    within a node; replicas of them send nothing. Where several axes of a mesh divide a matrix, give all their ranks.
    """
    among, axis = shard_ranks(ranks)
    wide, there, back = _DTYPES[max(4, shapes.width)], 0, 0
    for shape, times, hidden in shapes.runs:
        if hidden and len(shape) == 2:
            n = -(-shape[0] // among) * shape[1]
            there += times * _piece_bytes(codec, _padded({n: 1}, 1, codec.align), wide)
            back += times * _piece_bytes(gather, _padded({n: 1}, 1, gather.align), wide)
    if among == 1 or not there:
        return []
    exchange = [Message(axis, "all_to_all", -(-size * (among - 1) // among)) for size in (there, back)]
    # Before all that, all ranks of the mesh learn whether all gradients are finite.
    world = ranks if isinstance(ranks, int) else math.prod(ranks)
    return [Message("data", "all_reduce", _all_reduce(4, world)), *exchange]


def of_fsdp(shapes: Model, ranks: Ranks) -> list[Message]:
    """Return what FSDP2 sends itself, by rows: gradients to their shards, and params from them, once a step.

    Over two axes shards lie within a node, and gradients of replicas are averaged between the nodes (HSDP).
    """
    (among, axis), nodes = shard_ranks(ranks), 1 if isinstance(ranks, int) else ranks[1]
    elements = sum(-(-(shape or (1,))[0] // among) * math.prod(shape[1:]) * times for shape, times, _ in shapes.runs)
    shard = elements * shapes.width
    between = [Message("node", "all_reduce", _all_reduce(shard, nodes))] if nodes > 1 else []
    return [*_rows(axis, "reduce_scatter", among, shard), *between, *_rows(axis, "all_gather", among, shard)]


def shard_ranks(ranks: Ranks) -> tuple[int, str]:
    """Return among how many ranks FSDP2 divides params, and over which axis: within a node, if there are two."""
    return (ranks, "data") if isinstance(ranks, int) else (ranks[0], "local")


def apart(
    shapes: Model, ranks: Ranks, hidden: Callable[..., list[Message]], other: Callable[..., list[Message]]
) -> list[Message]:
    """Return the messages of hidden matrices, and behind these those of the other tensors.

    Args: hidden, other: (model, ranks) -> messages.
    """
    kinds = [(shapes.of_kind(hidden=True), hidden), (shapes.of_kind(hidden=False), other)]
    return [m for kind, send in kinds if kind.shapes for m in send(kind, ranks)]


def largest(shapes: Model, ranks: int, fraction: float) -> list[Message]:
    """Return what `fn.top_k(fraction)` sends of whole tensors to all: the largest numbers, float32 at least, and where.

    It is counted here and not by the codec's payload: that depends on the length, so whole tensors would be encoded.
    """
    row = 0
    for n, times in shapes.lengths.items():
        kept = max(min(n, 1), math.ceil(round(fraction * n, 6)))
        index = (n - 1).bit_length() if kept < n else 0
        row += times * (-(-kept * index // 8) + kept * max(4, shapes.width))
    return _rows("data", "all_gather", ranks, row)


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


def _padded(lengths: Mapping[int, int], rows: int, align: int) -> int:
    """Return the elements of a row when tensors are cut into so many pieces, each a multiple of `align`."""
    return sum(-(-n // (rows * align)) * align * times for n, times in lengths.items())


def _rows(axis: str, collective: str, ranks: int, size: int) -> list[Message]:
    """Return a collective in which every rank sends so many bytes to each other one; none if there is no other."""
    return [Message(axis, collective, (ranks - 1) * size)] if ranks > 1 else []


def row_bytes(
    codec: Codec, lengths: Iterable[int] | Mapping[int, int], ranks: int, align: int | None = None, width: int = 4
) -> int:
    """Return the bytes of the row that one rank receives when tensors are cut into `ranks` pieces.

    Args: lengths: of the tensors, or how many there are of each length. align: pieces are padded to a multiple of it;
        None is the codec's own. width: bytes of an element.
    """
    align = align or codec.align
    counts = Counter(lengths)
    pieces: Counter[int] = Counter()  # models repeat their shapes
    for n, times in counts.items():
        # A tensor's piece in a row: ceil(n / W), rounded up to the codec's alignment.
        pieces[-(-n // (ranks * align)) * align] += times
    alone = sum(times * _piece_bytes(codec, n, _DTYPES[width]) for n, times in pieces.items())
    # Each piece was counted as a row of its own; what a row has once, whatever lies in it, is counted once.
    return alone - (counts.total() - 1) * _bytes_of_a_row(codec, _DTYPES[width]) if counts else 0


@cache
def _bytes_of_a_row(codec: Codec, dtype: torch.dtype) -> int:
    """Return the bytes that a row has once, however many pieces lie in it."""
    # Two rows of one piece each, less one row of two pieces: what only the second row adds.
    return 2 * payload_bytes(codec, (codec.align,), dtype) - payload_bytes(codec, (codec.align,) * 2, dtype)


PERIOD = 2**20
"""Units of a codec's `align` after which its payload repeats, where no less is known: blocks divide it."""


@cache
def period_of(codec: Codec) -> int:
    """Return the elements after which a codec's payload repeats.

    Blocks are among the numbers that a codec is made with. Eight times a multiple of all of them is a multiple of the
    blocks, and whatever bits a block has, those of eight are whole bytes.
    """
    known = _numbers_in(codec)
    shortest = PERIOD if known is None else 8 * math.lcm(codec.align, *known) // codec.align
    return min(shortest, PERIOD) * codec.align


def _numbers_in(value: object) -> list[int] | None:
    """Return the numbers above zero that a codec, and codecs inside of it, are made with; None if that is not known."""
    if isinstance(value, Codec):
        if not isinstance(value.make, partial):
            return None
        parts = [_numbers_in(x) for x in (*value.make.args, *value.make.keywords.values())]
        return None if None in parts else [n for part in parts if part is not None for n in part]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value] if value > 0 else []
    return [] if value is None or isinstance(value, str | bool | float | torch.dtype) else None


@cache
def _piece_bytes(codec: Codec, n: int, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor's piece of n elements; longer ones than torch has tensors for cost what they add."""
    if n == 0:  # what an empty tensor adds to others
        adds = payload_bytes(codec, (codec.align, 0), dtype) - payload_bytes(codec, (codec.align,), dtype)
        return adds + _bytes_of_a_row(codec, dtype)
    period = period_of(codec)
    if n < 3 * period or math.isnan(codec.bits):  # what depends on the length is not periodic
        return payload_bytes(codec, (n,), dtype)
    # One period and the rest are encoded; the other periods add the same bytes each.
    return payload_bytes(codec, (period + n % period,), dtype) + (n // period - 1) * _bytes_of_a_period(codec, dtype)


@cache
def _bytes_of_a_period(codec: Codec, dtype: torch.dtype) -> int:
    period = period_of(codec)
    return payload_bytes(codec, (2 * period,), dtype) - payload_bytes(codec, (period,), dtype)


LARGEST = 2**17
"""Elements of the longest row that is made of zeros. Of a longer one the meta device makes shapes, an operation of
which takes ten times as long as one on a few zeros."""


@cache
def payload_bytes(codec: Codec, widths: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a row in which pieces of several tensors lie side by side, by making its payload."""
    segments = Segments(widths, torch.tensor([widths], dtype=torch.int64, device="cpu"))
    shape = (1, segments.row_length)
    coded = segmented(codec, segments)
    if shape[1] > LARGEST:
        payload = coded.encode(torch.empty(shape, device="meta", dtype=dtype))
    else:
        with only_references():  # no kernel is compiled for a few zeros
            payload = coded.encode(torch.zeros(shape, device="cpu", dtype=dtype))
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(payload))


def power_sgd(shapes: Model, ranks: int, rank: int) -> list[Message]:
    """Return the all-reduces of torch's PowerSGD: what is not compressed, the left factors, the right factors."""
    whole, left, right = 0, 0, 0
    for shape, times, _ in shapes.runs:
        rows, columns = _sides(shape)
        if len(shape) > 1 and (rows + columns) * rank * MIN_RATE < rows * columns:
            r = min(rank, rows, columns) * times
            left, right = left + rows * r, right + columns * r
        else:
            whole += rows * columns * times
    return [m for n in (whole, left, right) if n for m in exact(Model(((n,),), shapes.width), ranks)]


def low_rank(
    shapes: Model, ranks: Ranks, rank: int | float, *, orthonormal: bool = False, labels: bool = False
) -> list[Message]:
    """Return the two all-reduces of `fn.low_rank_average`: the left factors with what travels whole, the right ones.

    Args: rank, orthonormal: as for `fn.low_rank_average`. labels: whether only hidden matrices have factors.
    """
    first, second = 0, 0
    for shape, times, hidden in shapes.runs:
        rows, columns = _sides(shape)
        least = min(rows, columns)
        r = math.ceil(round(rank * least, 6)) if isinstance(rank, float) else rank
        if len(shape) > 1 and (hidden or not labels) and r < least and (rows + columns) * r < rows * columns:
            left, right = (columns, rows) if orthonormal and rows < columns else (rows, columns)
            first, second = first + left * r * times, second + right * r * times
        else:
            first += rows * columns * times
    width = max(4, shapes.width)  # factors of half precision are float32
    return [m for n in (first, second) if n for m in exact(Model(((n,),), width), ranks)]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def in_tiles(
    shapes: Model, ranks: Ranks, tile: int, codec_of: Callable[[int], Codec], *, squares: bool = False
) -> list[Message]:
    """Return the messages of `fn.in_basis` in `fn.dct(tile)` without servers, a message for each length of chunks.

    Args: codec_of: the length of a chunk -> its codec. squares: in `fn.tiles(tile)`, which cuts matrices.
    """
    parts: dict[int, list[Run]] = {}
    for shape, times, hidden in shapes.runs:
        for n, size in chunks(_sides(shape) if squares else shape or (1,), tile):
            parts.setdefault(n, []).append(Run((size,), times, hidden))
    width = max(4, shapes.width)
    return [m for n in sorted(parts) for m in codes(of_runs(parts[n], width), ranks, codec_of(n), servers=False)]


def chunks(sides: Shape, tile: int) -> list[tuple[int, int]]:
    """Return the length of the chunks of each part of a tensor that is cut into tiles, and the part's elements."""
    cuts = [((tile, n - n % tile), (n % tile, n % tile)) for n in sides]  # of each side the whole tiles, and the rest
    parts = [[math.prod(numbers) for numbers in zip(*part, strict=True)] for part in product(*cuts)]
    return [(n, size) for n, size in parts if size]


def _all_reduce(size: int, ranks: int) -> int:
    return -(-2 * (ranks - 1) * size // ranks)
