"""Codecs: what a vector looks like on the wire.

A codec is a pair of pure functions between rows of numbers and a payload, a tree of tensors whose first dimension
is the row; a row is what one rank receives. `sign` sends a bit per element and a scale per tensor or block,
`identity` the numbers themselves.

    >>> import torch, fn
    >>> codec = fn.sign()
    >>> payload = codec.encode(torch.tensor([[3.0, -1.0, 1.0, -3.0, 1.0, 1.0, -1.0, -1.0]]))
    >>> codec.decode(payload)
    tensor([[ 1.7321, -1.7321,  1.7321, -1.7321,  1.7321,  1.7321, -1.7321, -1.7321]])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tree = Any


class Segments(NamedTuple):
    """How several tensors share one vector: every row holds a piece of each tensor.

    widths: elements of each tensor in a row, padding included.
    valid: (R, S) int64, how many of them are real in row r.
    """

    widths: tuple[int, ...]
    valid: Tensor

    @property
    def row_length(self) -> int:
        """Return the number of elements of a row."""
        return sum(self.widths)

    def row(self, index: Tensor) -> Segments:
        """Return the segments of one row, chosen by a 0-d index."""
        return Segments(self.widths, self.valid.to(index.device).index_select(0, index.view(1)))

    def mask(self, device: torch.device) -> Tensor:
        """Return (R, n) bool, true at real elements."""
        places = torch.cat([torch.arange(w) for w in self.widths]).to(device)
        counts = self.valid.to(device).repeat_interleave(torch.tensor(self.widths, device=device), dim=1)
        return places < counts


class Codec(NamedTuple):
    """How rows of numbers travel.

    encode: (R, n) floating -> payload, a tree of tensors (R, ...).
    decode: payload -> (R, n) floating.
    align: n must be a multiple of it.
    bits: on the wire per element, scales of blocks included.
    decode_mean: payload of W rows -> (n,), the mean of the decoded rows, added in the order of the rows.
    segmented: Segments -> the same codec for several tensors in a row, blocks and scales not crossing from one
        tensor into the next. None: `segmented` does it tensor by tensor.
    """

    encode: Callable[[Tensor], Tree]
    decode: Callable[[Tree], Tensor]
    align: int
    bits: float
    decode_mean: Callable[[Tree], Tensor] | None = None
    segmented: Callable[[Segments], Codec] | None = None


class SignPayload(NamedTuple):
    """scales: (R, S) float32 or float64; bits: (R, n / 8) uint8."""

    scales: Tensor
    bits: Tensor


def sign(block: int | None = None, *, padding_counts: bool = False) -> Codec:
    """Send one bit per element and the root mean square of the tensor, or of each block, as its scale.

        C(x) = (||x||_2 / sqrt(n)) sgn(x),   sgn(0) = +1

    Args:
        block: elements of a block. None: one scale for the tensor (all rows that are encoded together).
        padding_counts: count padding elements as data, which is what DeepSpeed does: they dilute the scale and keep
            an error that oscillates.
    Raises: ValueError if block is not a positive multiple of 8.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), section 3, with the scale of Bernstein et al., signSGD with
        majority vote, taken in the 2-norm as the authors' code does.
    Differs: by default padding is neither counted nor given an error.
    """
    if block is not None and (block <= 0 or block % 8):
        raise ValueError(f"block: is {block}; allowed are None and positive multiples of 8")
    return _sign(block, padding_counts, None)


def _sign(block: int | None, padding_counts: bool, segments: Segments | None) -> Codec:
    def place(rows: int, n: int, device: torch.device) -> tuple[Tensor, list[int]]:
        if segments is None:
            widths: tuple[int, ...] = (n,)
            valid = torch.full((rows, 1), n, device=device)
        else:
            widths, valid = segments.widths, segments.valid.to(device).expand(rows, -1)
            if padding_counts:
                valid = torch.tensor(widths, device=device).expand(rows, -1)
        return (valid, [v for w in widths for v in (1, w)]) if block is None else tile(widths, valid, block)

    def encode(x: Tensor) -> SignPayload:
        rows, n = x.shape
        valid, runs = place(rows, n, x.device)
        if block is not None:
            bits, sums = torch.ops.fn.sign_encode(x, valid, runs)
        elif len(runs) == 2:  # one tensor: its rows are one vector, and its norm is taken as of one vector
            counts = valid.sum(0, keepdim=True)
            bits, sums = torch.ops.fn.sign_encode(x.reshape(1, rows * n), counts, [1, rows * n])
            bits, valid = bits.view(rows, -1), counts
        else:
            bits, sums = torch.ops.fn.sign_encode(x, valid, runs)
            sums, valid = sums.sum(0, keepdim=True), valid.sum(0, keepdim=True)
        scales = root_mean_square(sums, valid, torch.float64 if x.dtype == torch.float64 else torch.float32)
        return SignPayload(scales.expand(rows, -1), bits)

    def decode(payload: SignPayload) -> Tensor:
        valid, runs = place(payload.bits.shape[0], payload.bits.shape[1] * 8, payload.bits.device)
        return torch.ops.fn.sign_decode(payload.bits, payload.scales.contiguous(), valid, runs)

    def decode_mean(payload: SignPayload) -> Tensor:
        valid, runs = place(1, payload.bits.shape[1] * 8, payload.bits.device)
        mean = torch.ops.fn.sign_decode_mean(payload.bits[None], payload.scales.contiguous()[None], valid, runs)
        return mean[0]

    return Codec(
        encode,
        decode,
        align=8,
        bits=1.0 if block is None else 1.0 + 32.0 / block,
        decode_mean=decode_mean,
        segmented=lambda s: _sign(block, padding_counts, s),
    )


def root_mean_square(sums: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sqrt(sums / counts), rounded as norm / sqrt(count) in `dtype`; zero where the count is zero."""
    return sums.sqrt().to(dtype) / counts.clamp(min=1).double().sqrt().to(dtype)


def tile(widths: tuple[int, ...], valid: Tensor, block: int) -> tuple[Tensor, list[int]]:
    """Cut every segment into blocks, the last one shorter: return valid (R, blocks) and the runs."""
    runs: list[int] = []
    counts = []
    for s, width in enumerate(widths):
        whole, rest = divmod(width, block)
        runs += [whole, block] * (whole > 0) + [1, rest] * (rest > 0)
        starts = torch.arange(0, width, block, device=valid.device)
        counts.append((valid[:, s : s + 1] - starts).clamp(0, block).minimum(width - starts))
    return torch.cat([*counts, valid[:, :0]], 1), runs


def identity(dtype: torch.dtype | None = None) -> Codec:
    """Send the numbers themselves, rounded to `dtype` if one is given.

    Raises: TypeError if dtype is not a floating dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype: is {dtype}; allowed are floating dtypes and None")

    def decode(payload: Tensor) -> Tensor:
        return payload.float() if payload.dtype in (torch.float16, torch.bfloat16) else payload

    bits = float(torch.finfo(dtype or torch.float32).bits)
    return Codec(lambda x: x.to(dtype) if dtype else x, decode, 1, bits, segmented=lambda s: identity(dtype))


def mean_of_rows(codec: Codec, payload: Tree) -> Tensor:
    """Return the mean of the decoded rows (n,), added in the order of the rows so that every rank rounds alike."""
    if codec.decode_mean is not None:
        return codec.decode_mean(payload)
    rows = codec.decode(payload)
    total = rows[0]
    for row in rows[1:].unbind(0):
        total = total + row
    return total * (1.0 / rows.shape[0])


def segmented(codec: Codec, segments: Segments) -> Codec:
    """Return the codec for rows in which several tensors lie side by side; padding decodes to zero."""
    if codec.segmented is not None:
        return codec.segmented(segments)
    widths = list(segments.widths)

    def encode(x: Tensor) -> Tree:
        x = torch.where(segments.mask(x.device), x, 0.0)
        return tuple(codec.encode(part) for part in x.split(widths, dim=1))

    def decode(payload: Tree) -> Tensor:
        x = torch.cat([codec.decode(part) for part in payload], dim=1)
        return torch.where(segments.mask(x.device), x, 0.0)

    return codec._replace(encode=encode, decode=decode, decode_mean=None)
