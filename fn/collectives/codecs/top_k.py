"""The top-k codec: the elements of largest magnitude, and where they were. `top_k`."""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.base import check_number, check_whole
from fn.collectives.codecs.ballots import is_vote
from fn.collectives.codecs.codec import Codec, Segments, by_tensor, identity, pack, segmented, segments_of, tile, unpack
from fn.errors import expected
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan

Tree = Any

OVER = ("ranks", "senders")
"""What a mean may be taken over."""

AS_THEY_ARE = identity()
"""The codec of values where none is given; one object, so that two codecs of the same arguments are equal."""


class TopKPayload(NamedTuple):
    """indices: (R, bytes) uint8, of each kept element in its block; values: what they are, a codec's payload."""

    indices: Tensor
    values: Tree


class WholePayload(NamedTuple):
    """A row that is one tensor. length: (R, n, 0) uint8, no bytes: only its shape says something. tensor: its payload.

    A row of several tensors has no such entry: there the lengths are known.
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

    k = int(k) if isinstance(k, numbers.Integral) else float(k)
    block = None if block is None else int(block)  # also NumPy's whole numbers, which have no bit_length
    codec = AS_THEY_ARE if values is None else values
    bits = _bits(k, block, codec)

    def of_tensor(width: int, valid: Tensor) -> Codec:
        return _top_k(_blocks(width, block, k), over, codec, valid)._replace(bits=bits)

    @cached_plan
    def whole(n: int) -> Codec:
        return by_tensor(of_tensor, segments_of(None, 1, n, torch.device("cpu")))

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
    return Codec(
        encode, decode, 1, bits, decode_mean, segmented=cached_plan(lambda s: by_tensor(of_tensor, s)), make=make
    )


def _check(k: int | float, block: int | None) -> None:
    if block is not None:
        check_whole("block", block)
        if block < 1:
            raise ValueError(expected("block", "None or a whole number of at least 1", f"{block}"))
    check_number("k", k)
    if isinstance(k, numbers.Integral):
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

    def starts(self, device: torch.device) -> Tensor:
        """Return for each kept element where its block begins (kept,)."""
        counts = self.kept_of_each(device)
        first = torch.arange(counts.shape[0], dtype=torch.int64, device=device) * self.length
        return first.repeat_interleave(counts, output_size=self.kept)


def _blocks(width: int, block: int | None, k: int | float) -> _Blocks:
    length = max(1, width if block is None else min(block, width))
    whole, rest = divmod(width, length)
    runs = (((whole, length, _kept(length, k)),) if whole else ()) + (((1, rest, _kept(rest, k)),) if rest else ())
    return _Blocks(runs or ((0, length, 1),), length)


def _top_k(blocks: _Blocks, over: str, codec: Codec, valid: Tensor) -> Codec:
    """Return the codec for one tensor, of which valid (R, 1) elements are real in each row. codec: of the values."""
    inner, pad = _for_kept(codec, blocks, valid), -blocks.kept % codec.align

    def encode(x: Tensor) -> TopKPayload:
        x = x.to(scale_dtype(x))
        chosen, start = [], 0
        for count, length, kept in blocks.runs:
            part = x[:, start : start + count * length].reshape(x.shape[0], count, length)
            chosen.append(_largest(part, kept).flatten(1))
            start += count * length
        indices = torch.cat(chosen, dim=1)  # (R, kept), in their blocks
        numbers = x.gather(1, indices + blocks.starts(x.device))
        if not blocks.index_bits:
            indices = indices[:, :0]
        values = inner.encode(torch.nn.functional.pad(numbers, (0, pad)) if pad else numbers)
        return TopKPayload(pack(indices, blocks.index_bits or 8), values)

    def sent(payload: TopKPayload) -> tuple[Tensor, Tensor]:
        """Return the positions in the tensor, and the numbers (R, kept), of what was sent."""
        numbers = inner.decode(payload.values)[:, : blocks.kept]
        if not blocks.index_bits:
            return torch.arange(blocks.kept, dtype=torch.int64, device=numbers.device).expand(numbers.shape), numbers
        indices = unpack(payload.indices, blocks.index_bits, blocks.kept)
        return indices + blocks.starts(indices.device), numbers

    def decode(payload: TopKPayload) -> Tensor:
        positions, numbers = sent(payload)
        return numbers.new_zeros(numbers.shape[0], blocks.width).scatter(1, positions, numbers)

    def decode_mean(payload: TopKPayload) -> Tensor:
        positions, numbers = sent(payload)
        total = count = numbers.new_zeros(blocks.width)
        for index, row in zip(positions.unbind(0), numbers.unbind(0), strict=True):  # so that all ranks round alike
            total = total.scatter_add(0, index, row)
            if over == "senders":
                count = count.scatter_add(0, index, torch.ones_like(row))
        return total / count.clamp(min=1) if over == "senders" else total * (1.0 / numbers.shape[0])

    return Codec(encode, decode, 1, math.nan, decode_mean)


def _for_kept(values: Codec, blocks: _Blocks, valid: Tensor) -> Codec:
    """Return the values' codec for a tensor's kept elements; among them padding comes last, and does not count."""
    if values is AS_THEY_ARE:
        return values
    real = tile((blocks.width,), valid, blocks.length)[0]
    counts = real.minimum(blocks.kept_of_each(valid.device)).sum(1, keepdim=True)
    widths = blocks.kept + -blocks.kept % values.align, 0  # with a second one no row is taken for the rest of another
    return segmented(values, Segments(widths, torch.cat([counts, torch.zeros_like(counts)], dim=1)))


_INDEX_BITS = 29
"""Of a key, which has the 31 bits of a float32 without its sign in front of them."""


def _largest(x: Tensor, k: int) -> Tensor:
    """Return the indices (..., k), ascending, of the k largest sizes in x (..., n); of equal ones the first are taken.

    `topk` alone leaves open which of equal ones it takes, and ranks and devices would differ. NaN is the largest.
    """
    n = x.shape[-1]
    indices = torch.arange(n, dtype=torch.int64, device=x.device)
    if k == n:
        return indices.expand(x.shape)
    if x.dtype != torch.float32 or n > 2**_INDEX_BITS:
        return x.abs().sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values
    keys = (x.abs().view(torch.int32).long() << _INDEX_BITS) | (n - 1 - indices)  # no two are equal
    largest = keys.topk(k, dim=-1, sorted=False).values & (2**_INDEX_BITS - 1)
    return torch.sort(n - 1 - largest, dim=-1).values
