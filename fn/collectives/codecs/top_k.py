"""The top-k codec: the elements of largest magnitude, and where they were. `top_k`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.arguments import check_number, check_whole
from fn.collectives.codecs.ballots import is_vote
from fn.collectives.codecs.codec import Codec, Fused, Segments, identity, pack, segmented, segments_of, unpack
from fn.collectives.feedback import Classic, Decayed, Differences
from fn.errors import expected
from fn.kernels import memory_pool
from fn.kernels.layout import scale_dtype, tile
from fn.kernels.tracing import cached_plan, is_concrete, pooled

Tree = Any

OVER = ("ranks", "senders")
"""What a mean may be taken over."""

AS_THEY_ARE = identity()
"""The codec of values where none is given; one object, so that two codecs of the same arguments are equal."""


class TopKPayload(NamedTuple):
    """What S tensors of one length send.

    indices: (R, S, bytes) uint8, the packed index of each kept element in its block. values: the kept elements
    (R, S, kept), or their payload in a codec.
    """

    indices: Tensor
    values: Tree


class WholePayload(NamedTuple):
    """A row that is one tensor. length: (R, n, 0) uint8, without bytes; its shape holds n. tensor: the payload.

    A row of several tensors has no such entry: its segments hold the lengths.
    """

    length: Tensor
    tensor: Tree


def top_k(k: int | float, block: int | None = None, *, over: str = "ranks", values: Codec | None = None) -> Codec:
    """Send the k elements of largest magnitude of every block; the others are zero.

    Of elements that are equally large those with the lower index are sent. An index takes the bits that it needs in a
    block, and blocks of which everything is sent need none. The last block of a tensor may be shorter, and is sent
    whole if it has no more than k elements. Use it with feedback: what was not sent is sent later. Through servers, a
    block lies in the piece that a server gets, and the server sends the k largest of the mean. NaN counts as largest.

    >>> import torch, fn
    >>> codec = fn.top_k(2, block=4)
    >>> codec.decode(codec.encode(torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.1, 0.2]])))
    tensor([[ 0.0000, -3.0000,  2.0000,  0.0000,  0.1000,  0.2000]])

    Args:
        k: how many elements of a block, a whole number; or which fraction of them, a float in (0, 1], rounded up.
        block: elements of a block; blocks do not cross from one tensor into another. None: the whole tensor, or the
            whole piece of it that a server gets.
        over: what the mean of several ranks' messages is taken over. "ranks": all of them, those that did not send an
            element count as zero, so that together with feedback nothing is lost. "senders": for each element, those
            that sent it, as in DeMo and in the code of SparseLoCo: what one of W ranks sent then counts W times as
            much.
        values: the codec of the kept elements, which for it are a row in the order of their indices, a row for each
            tensor, such as `fn.bins(4, 6)`. None: float32, float64 for float64.
    Raises: TypeError if k is no number, block no whole number, or values no codec; ValueError if k or block is out of
        range, k is more than block, over is neither, or values are votes, which keep no magnitude.

    Paper: Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018); Sarfi et al., SparseLoCo (arXiv
        2508.15706), for blocks and values in bins; Peng et al., DeMo (arXiv 2411.19870), for means over senders.
    Differs: indices are packed; the authors of DeMo and SparseLoCo send 64 bits for each. Their blocks divide the
        sides of a tensor, so that of a prime length each element is a block of its own, and everything is sent.
    """
    _check(k, block)
    if over not in OVER:
        raise ValueError(expected("over", "'ranks' or 'senders'", f"{over!r}"))
    if values is not None and not isinstance(values, Codec):
        raise TypeError(expected("values", "None or a Codec, such as fn.int8()", f"{values!r}"))
    if values is not None and is_vote(values):
        raise ValueError(expected("values", "a codec that keeps magnitudes, such as fn.int8()", f"{values!r}"))

    k = int(k) if isinstance(k, Integral) else float(k)
    block = None if block is None else int(block)  # also NumPy's whole numbers, which have no bit_length
    codec = AS_THEY_ARE if values is None else values
    bits = _bits(k, block, codec)

    def codec_of(segments: Segments) -> Codec:
        return _segmented(segments, k, block, over, codec)._replace(bits=bits)

    @cached_plan
    def whole(n: int) -> Codec:
        return codec_of(segments_of(None, 1, n, torch.device("cpu")))

    def encode(x: Tensor) -> WholePayload:
        rows, n = x.shape
        return WholePayload(torch.empty((rows, n, 0), dtype=torch.uint8, device=x.device), whole(n).encode(x))

    def decode(payload: WholePayload) -> Tensor:
        return whole(payload.length.shape[1]).decode(payload.tensor)

    def decode_mean(payload: WholePayload) -> Tensor:
        mean = whole(payload.length.shape[1]).decode_mean
        assert mean is not None
        return mean(payload.tensor)

    make = partial(top_k, k, block, over=over, values=values)
    return Codec(encode, decode, 1, bits, decode_mean, segmented=cached_plan(codec_of), make=make)


def _check(k: int | float, block: int | None) -> None:
    if block is not None:
        check_whole("block", block)
        if block < 1:
            raise ValueError(expected("block", "None or a whole number of at least 1", f"{block}"))
    check_number("k", k)
    if isinstance(k, Integral):
        most = "" if block is None else f" and at most {block}, the block"
        if k < 1 or (block is not None and k > block):
            raise ValueError(expected("k", f"a whole number of at least 1{most}", f"{k}"))
    elif not 0 < k <= 1:
        raise ValueError(expected("k", "a whole number of elements, or a fraction of them in (0, 1]", f"{k}"))


def _kept(n: int, k: int | float) -> int:
    """Return how many of n elements are sent."""
    return min(k, n) if isinstance(k, int) else max(min(n, 1), math.ceil(round(k * n, 6)))  # 0.07 * 100 > 7


def _bits(k: int | float, block: int | None, codec: Codec) -> float:
    """Return the bits per element; NaN where an index takes more of them in a longer tensor."""
    if block is None:
        return math.nan
    kept = _kept(block, k)
    index = _index_bits(block) if kept < block else 0
    return kept / block * (index + codec.bits)


def _index_bits(n: int) -> int:
    return (n - 1).bit_length()


class _Blocks(NamedTuple):
    """How a tensor of some length is cut: runs of (blocks, length, kept of each). length: of all but the last."""

    runs: tuple[tuple[int, int, int], ...]
    length: int

    @property
    def index_bits(self) -> int:
        """Return the bits of an index; 0 if all elements are sent."""
        return 0 if all(length == kept for _, length, kept in self.runs) else _index_bits(self.length)

    @property
    def width(self) -> int:
        """Return the number of elements."""
        return sum(blocks * length for blocks, length, _ in self.runs)

    @property
    def kept(self) -> int:
        """Return the number of elements that are sent."""
        return sum(blocks * kept for blocks, _, kept in self.runs)

    def kept_of_each(self, device: torch.device) -> Tensor:
        """Return how many elements of each block are sent (blocks,)."""
        return torch.cat([torch.full((n,), kept, dtype=torch.int64, device=device) for n, _, kept in self.runs])


def _blocks(width: int, block: int | None, k: int | float) -> _Blocks:
    length = max(1, width if block is None else min(block, width))
    whole, rest = divmod(width, length)
    runs = (((whole, length, _kept(length, k)),) if whole else ()) + (((1, rest, _kept(rest, k)),) if rest else ())
    return _Blocks(runs or ((0, length, 1),), length)


class _Alike(NamedTuple):
    """The tensors of one length in a row, which are encoded together.

    starts: the first element of each in the row. blocks: how each is cut. valid: (R, S), how many elements of each are
    real. values: the codec of the kept elements of one tensor.
    """

    starts: tuple[int, ...]
    blocks: _Blocks
    valid: Tensor
    values: Codec

    def choose(self, x: Tensor) -> Tensor:
        """Return which elements of x (R, n) are sent: their indices in their blocks (R, S, kept), in order."""
        rows, chosen, offset = x.shape[0], [], 0
        for count, length, kept in self.blocks.runs:
            if kept == length or not count:
                indices = torch.arange(length, dtype=torch.int64, device=x.device)[:kept]
                # (kept,) -> (R, S, count, kept)
                indices = indices.expand(rows, len(self.starts), count, kept)
            else:
                indices = _largest(_batches(x, self.starts, offset, count, length), length, kept)
            # (R, S count, kept) -> (R, S, count kept)
            chosen.append(indices.reshape(rows, len(self.starts), count * kept))
            offset += count * length
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=2)

    def positions(self, indices: Tensor) -> Tensor:
        """Return the positions in the row (R, S kept) of indices in blocks."""
        parts, done = [], 0
        firsts = _first_elements(self.starts, self.blocks, indices.device)
        for (count, _, kept), first in zip(self.blocks.runs, firsts, strict=True):
            part = indices[:, :, done : done + count * kept]
            # (R, S, count kept) -> (R, S, count, kept) + (S, count, 1) -> (R, S, count kept)
            parts.append((part.unflatten(2, (count, kept)) + first).flatten(2))
            done += count * kept
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).flatten(1)

    def encode(self, x: Tensor) -> tuple[TopKPayload, Tensor, Tensor]:
        """Return the payload of x (R, n), and the positions and numbers (R, S kept) of what is sent."""
        indices = self.choose(x)
        positions = self.positions(indices)
        # (R, n) -> (R, S kept)
        numbers = x.gather(1, positions)
        values = numbers.view(indices.shape)
        if self.values is not AS_THEY_ARE:
            # (R, S, kept) -> (R, S padded): each tensor begins at a multiple of `align`
            row = F.pad(values, (0, -self.blocks.kept % self.values.align)).flatten(1)
            values = _of_kept(self).encode(row)
        if not self.blocks.index_bits:
            # All elements are sent, so the receiver knows their indices.
            indices = indices[:, :, :0]
        width = self.blocks.index_bits or 8
        # (R, S, kept) -> (R S, kept) -> (R S, bytes) -> (R, S, bytes)
        packed = pack(indices.flatten(0, 1), width).unflatten(0, indices.shape[:2])
        return TopKPayload(packed, values), positions, numbers

    def numbers(self, payload: TopKPayload) -> Tensor:
        """Return the numbers (R, S kept) that were sent."""
        values = payload.values
        if self.values is not AS_THEY_ARE:
            row = _of_kept(self).decode(values)
            # (R, S padded) -> (R, S, padded) -> (R, S, kept)
            values = row.unflatten(1, (len(self.starts), -1))[:, :, : self.blocks.kept]
        numbers: Tensor = values.flatten(1)
        return numbers

    def sent(self, payload: TopKPayload) -> tuple[Tensor, Tensor]:
        """Return the positions in the row and the numbers (R, S kept) of what was sent."""
        shape = *payload.indices.shape[:2], self.blocks.kept
        if self.blocks.index_bits:
            # (R, S, bytes) -> (R S, bytes) -> (R S, kept) -> (R, S, kept)
            indices = unpack(payload.indices.flatten(0, 1), self.blocks.index_bits, shape[2]).view(shape)
        else:
            each = [torch.arange(length, dtype=torch.int64, device=payload.indices.device).repeat(count)
                    for count, length, _ in self.blocks.runs]  # fmt: skip
            # (kept,) -> (R, S, kept)
            indices = torch.cat(each).expand(shape)
        return self.positions(indices), self.numbers(payload)


def _segmented(segments: Segments, k: int | float, block: int | None, over: str, values: Codec) -> Codec:
    """Return the codec for tensors side by side in a row; a payload has an entry for each length."""
    starts = [0, *accumulate(segments.widths)]
    lengths = [
        _Alike(tuple(starts[s] for s in chosen), _blocks(width, block, k), segments.valid[:, chosen], values)
        for width, chosen in segments.places.items()
    ]
    n = segments.row_length

    def encode(x: Tensor) -> tuple[TopKPayload, ...]:
        x = segments.cleared(x.to(scale_dtype(x)))
        return tuple([alike.encode(x)[0] for alike in lengths])

    def decode(payload: tuple[TopKPayload, ...]) -> Tensor:
        sent = [alike.sent(part) for alike, part in zip(lengths, payload, strict=True)]
        rows = sent[0][1].shape[0]
        # The pool has vectors: (R n,) -> (R, n)
        out = _zeros(rows * n, sent[0][1], sent[0][1].dtype).view(rows, n)
        for positions, numbers in sent:
            out = _into(out, Tensor.scatter, positions, numbers)
        return segments.cleared(out)

    def sent_by_ranks(payload: tuple[TopKPayload, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield positions and numbers (some ranks, S kept), about `BATCH` of them at a time."""
        for alike, part in zip(lengths, payload, strict=True):
            # A few ranks at a time: unpacked indices are int64, and those of all ranks could outgrow the tensors.
            several = max(1, BATCH // max(1, alike.blocks.kept * len(alike.starts)))
            for first in range(0, part.indices.shape[0], several):
                yield alike.sent(tree.map(lambda leaf, some=slice(first, first + several): leaf[some], part))

    def decode_mean(payload: tuple[TopKPayload, ...]) -> Tensor:
        ranks = payload[0].indices.shape[0]
        # Counts are as many as elements: one byte holds those of up to 255 ranks, in an eighth of the memory.
        counts = torch.uint8 if ranks < 256 else torch.int64
        one = torch.ones((), dtype=counts, device=payload[0].indices.device)
        total: Any = None
        count: Any = None
        for positions, numbers in sent_by_ranks(payload):
            if total is None:
                total = _zeros(n, numbers, numbers.dtype)
                count = _zeros(n, numbers, counts) if over == "senders" else None
            # (ranks, S kept) -> (S kept,) of each rank, whose positions all differ: no order of additions matters.
            for index, row in zip(positions.unbind(0), numbers.unbind(0), strict=True):  # so that all ranks round alike
                total = _into(total, Tensor.scatter_add, index, row)
                if count is not None:
                    count = _into(count, Tensor.scatter_add, index, one.expand_as(index))
        out = total if is_concrete(total) else None
        if count is None:
            return segments.cleared(torch.mul(total, 1.0 / ranks, out=out), 0)
        return segments.cleared(torch.div(total, count.clamp(min=1), out=out), 0)

    def fused(rule: Any) -> Fused | None:
        # Here nobody clears padding, which could then be chosen: rows with padding take the long way.
        knows = isinstance(rule, Classic | Decayed | Differences) and not segments.padded
        return _with_feedback(lengths, rule) if knows else None

    return Codec(encode, decode, 1, math.nan, decode_mean, fused=fused)


def _with_feedback(lengths: Sequence[_Alike], rule: Classic | Decayed | Differences) -> Fused:
    """Return the codec and a feedback in one, which decodes the elements that were sent, and no whole vector."""

    def init(x: Tensor) -> Tensor:
        return torch.zeros_like(x.reshape(-1), dtype=scale_dtype(x))

    def accepts(x: Tensor, error: Tree) -> bool:
        return isinstance(error, Tensor) and error.shape == (x.numel(),) and error.dtype == scale_dtype(x)

    def encode(x: Tensor, error: Tensor, *, over: bool = False) -> tuple[Tree, Tensor]:
        vector, room = x.reshape(-1), pooled(error, x)
        if isinstance(rule, Differences):
            may_write = over and vector.dtype == error.dtype and is_concrete(vector, error)
            message = torch.sub(vector, error, out=vector if may_write else room.get("out"))
        elif isinstance(rule, Decayed):
            faded = torch.mul(error, rule.keep, **room)
            message = faded.add_(vector) if is_concrete(vector, error) else vector + faded
        else:
            message = torch.add(vector, error, out=room.get("out"))
        rows = message.view(x.shape)
        # All tensors are encoded before anything is written: the next error takes the memory of the message.
        sent = [alike.encode(rows) for alike in lengths]
        if isinstance(rule, Differences):  # a zero of either sign is 0 then, as in the sum with a vector of zeros
            rows = torch.add(error, 0.0, out=message if is_concrete(message, error) else None).view(x.shape)
        for alike, (payload, positions, values) in zip(lengths, sent, strict=True):
            delivered = alike.numbers(payload)
            if isinstance(rule, Differences):
                kept = rows.gather(1, positions) + delivered.to(rows.dtype)
            else:
                kept = values - (rule.deliver * delivered if isinstance(rule, Decayed) else delivered)
            # Elsewhere nothing was delivered: what stands in `rows` is the next error already.
            rows = _into(rows, Tensor.scatter, positions, kept.to(rows.dtype))
        return tuple([payload for payload, _, _ in sent]), rows.reshape(-1)

    def to_plain(error: Tensor, rows: int) -> Tensor:
        if isinstance(rule, Decayed):
            return rule.keep * error
        return -error if isinstance(rule, Differences) else error

    return Fused(init, accepts, encode, to_plain, encode_over=partial(encode, over=True))


def _zeros(n: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (n,) zeros on the device of a tensor, in memory of the pool where it may be."""
    return memory_pool.empty((n,), dtype, like.device).zero_() if is_concrete(like) else like.new_zeros(n, dtype=dtype)


def _into(x: Tensor, scatter: Callable[..., Tensor], positions: Tensor, numbers: Tensor) -> Tensor:
    """Scatter numbers into x, which nobody else holds: in place where tensors hold numbers."""
    if is_concrete(x, positions, numbers):
        scatter = Tensor.scatter_ if scatter is Tensor.scatter else Tensor.scatter_add_
    return scatter(x, x.ndim - 1, positions, numbers)


@cached_plan
def _first_elements(starts: tuple[int, ...], blocks: _Blocks, device: torch.device) -> list[Tensor]:
    """Return for each run where the blocks of each tensor begin (S, count, 1)."""
    firsts, offset = [], 0
    begin = torch.tensor(starts, dtype=torch.int64, device="cpu")[:, None]
    for count, length, _ in blocks.runs:
        first = begin + offset + length * torch.arange(count, dtype=torch.int64, device="cpu")
        # (S, count) -> (S, count, 1)
        firsts.append(first[:, :, None].to(device))
        offset += count * length
    return firsts


@cached_plan
def _of_kept(alike: _Alike) -> Codec:
    """Return the values' codec for what is kept of each tensor; among it padding comes last, and does not count."""
    blocks, values, (rows, tensors) = alike.blocks, alike.values, alike.valid.shape
    # (R, S) -> (R S, 1) -> (R S, blocks)
    real = tile((blocks.width,), alike.valid.reshape(-1, 1), blocks.length)[0]
    # (R S, blocks) -> (R S,) -> (R, S)
    counts = real.minimum(blocks.kept_of_each(real.device)).sum(1).view(rows, tensors)
    # Behind each lies an empty one: so no row is taken for the rest of another.
    # (R, S) -> (R, S, 2) -> (R, 2 S)
    counts = torch.stack([counts, torch.zeros_like(counts)], dim=2).flatten(1)
    return segmented(values, Segments((blocks.kept + -blocks.kept % values.align, 0) * tensors, counts))


BATCH_OF_CPU, BATCH = 1 << 17, 1 << 27
"""Elements among which is chosen at once: on a CPU their keys stay in a cache, on others they take a GiB."""


def _batches(x: Tensor, starts: Sequence[int], offset: int, count: int, length: int) -> list[Tensor]:
    """Return blocks (R, blocks, length) of x (R, n): `count` of each tensor, a list of as many as are taken at once."""
    most = BATCH_OF_CPU if x.device.type == "cpu" else BATCH
    together = max(1, most // max(1, length * x.shape[0]))
    if not is_concrete(x):
        # Batches spare memory in eager steps. A graph that is traced has one part, whatever the device.
        together = count * len(starts)
    runs: list[list[tuple[int, int]]] = [[]]  # (first element, blocks) of what is taken at once
    room = together
    for start in starts:
        first, left = start + offset, count
        while left:
            taken = min(left, room)
            before = runs[-1][-1] if runs[-1] else (0, 0)
            if runs[-1] and before[0] + before[1] * length == first:
                runs[-1][-1] = before[0], before[1] + taken  # neighbours are a view
            else:
                runs[-1].append((first, taken))
            first, left, room = first + taken * length, left - taken, room - taken
            if not room:
                runs.append([])
                room = together
    # (R, n) -> (R, n length) -> (R, n, length)
    views = [[x.narrow(1, first, n * length).unflatten(1, (n, length)) for first, n in run] for run in runs if run]
    return [run[0] if len(run) == 1 else torch.cat(run, dim=1) for run in views]


_INDEX_BITS = 29
"""Of a key, which has the 31 bits of a float32 without its sign in front of them."""


def _largest(batches: Iterable[Tensor], n: int, k: int) -> Tensor:
    """Return the indices (..., k), ascending, of the k largest sizes in each x (R, blocks, n), end to end along blocks.

    Of equal ones the first are taken: `topk` alone leaves open which, and ranks and devices would differ. NaN is the
    largest.
    """
    chosen = []
    for x in batches:
        if x.dtype != torch.float32 or n > 2**_INDEX_BITS:
            # No key holds these dtypes and lengths. A stable sort takes the first of equal ones, too.
            chosen.append(x.abs().sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values)
            continue
        last = 2**_INDEX_BITS - 1
        # A key is the size's bits, which as integers are in the order of the sizes, NaN last; below them the index,
        # counted backwards, so that of equal sizes the first has the largest key.
        backwards = torch.arange(last, last - n, -1, dtype=torch.int64, device=x.device)
        keys = torch.add(backwards, x.abs().view(torch.int32), alpha=1 << _INDEX_BITS)  # no two are equal
        chosen.append(last - (keys.topk(k, dim=-1, sorted=False).values & last))
    # (R, some blocks, k) of each batch -> (R, blocks, k)
    indices = chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=1)
    return indices.sort(dim=-1).values
