"""Codecs: what a vector looks like on the wire, and how several tensors share a row of it.

A codec is a pair of pure functions between rows of numbers and a payload, a tree of tensors whose first dimension
is the row; a row is what one rank receives. The payload holds quantized values and their scales, here called codes.
`fn.sign` sends a bit per element, `fn.int4` and `fn.int8` 4 or 8, `identity` the numbers themselves.

    >>> import torch, fn
    >>> codec = fn.sign()
    >>> payload = codec.encode(torch.tensor([[3.0, -1.0, 1.0, -3.0, 1.0, 1.0, -1.0, -1.0]]))
    >>> codec.decode(payload)
    tensor([[ 1.7321, -1.7321,  1.7321, -1.7321,  1.7321,  1.7321, -1.7321, -1.7321]])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.collectives.codecs.pickling import invalidates
from fn.errors import expected
from fn.kernels.tracing import cached_plan, is_concrete, pooled

Tree = Any


class Fused(NamedTuple):
    """A codec and a feedback in one kernel. What it computes is what the two compute one after the other.

    init: x (R, n) -> the error in the form that is fastest; only shape, dtype and device of x matter.
    accepts: (x (R, n), error) -> whether the kernels can take this error.
    encode: (x (R, n), error) -> payload, next error.
    encode_over: the same for an x whose memory becomes the error's. None: `encode` does.
    to_plain: (error, R) -> the error as a plain vector (R * n,). None: as the feedback has it.
    serve: (payload of W rows, error) -> payload of their mean, one row, and the next error. None: in two steps.
    averages: (mu, grads, decay, error=, rows=R) -> payload, next error: encode of the moving averages
        decay * mu + (1 - decay) * grad of the tensors that are the segments. None: they are formed first.
    block: elements of a tensor that have a scale together, 0 for all of them.
    """

    init: Callable[[Tensor], Tree]
    accepts: Callable[[Tensor, Tree], bool]
    encode: Callable[[Tensor, Tree], tuple[Tree, Tree]]
    to_plain: Callable[[Tree, int], Tensor] | None
    serve: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None
    averages: Callable[..., tuple[Tree, Tree]] | None = None
    encode_over: Callable[[Tensor, Tree], tuple[Tree, Tree]] | None = None
    block: int = 0


@invalidates({"encode", "decode"}, {"decode_mean", "segmented", "fused", "make"})
class Codec(NamedTuple):
    """How rows of numbers become codes for a message, and codes become numbers again.

    encode: (R, n) floating -> payload, a tree of tensors (R, ...). Deterministic: the same numbers, the same payload.
    decode: payload -> (R, n) floating.
    align: n must be a multiple of it; the collectives pad each rank's piece of a tensor to one.
    bits: bits on the wire per element, scales of blocks included. NaN: they depend on the length of the tensor.
    decode_mean: payload of W rows -> (n,), the mean of the decoded rows, added in the order of the rows; or of those
        rows that hold the element, where rows need not hold all.
    segmented: Segments -> the same codec for several tensors in a row, blocks and scales not crossing from one
        tensor into the next. None: `segmented` does it tensor by tensor.
    fused: a feedback's `rule` -> encoding with that feedback in one kernel, or None where there is no such kernel.
    make: a function without arguments that makes this codec again, which is what is pickled. None: no pickle.

    `_replace` of encode or decode also sets the last four to None, unless they are given: they belong to the old pair.
    Of any other field it sets `make` to None.
    """

    encode: Callable[[Tensor], Tree]
    decode: Callable[[Tree], Tensor]
    align: int
    bits: float
    decode_mean: Callable[[Tree], Tensor] | None = None
    segmented: Callable[[Segments], Codec] | None = None
    fused: Callable[[Any], Fused | None] | None = None
    make: Callable[[], Codec] | None = None


def identity(dtype: torch.dtype | None = None) -> Codec:
    """Send the numbers themselves, rounded to `dtype` if one is given.

    >>> import torch, fn
    >>> fn.identity(torch.bfloat16).encode(torch.tensor([[1.0, 1.001]]))
    tensor([[1., 1.]], dtype=torch.bfloat16)

    Raises: TypeError if dtype is not a floating dtype.
    """
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(expected("dtype", "float16, bfloat16, float32, float64 or None", f"{dtype}"))

    def decode(payload: Tensor) -> Tensor:
        # Widened before ranks are added up: in half precision their sum may overflow where the mean does not.
        return payload.float() if payload.dtype in (torch.float16, torch.bfloat16) else payload

    bits = float(torch.finfo(dtype or torch.float32).bits)
    made: dict[str, Any] = {"segmented": lambda s: identity(dtype), "make": partial(identity, dtype)}
    return Codec(lambda x: x.to(dtype) if dtype else x, decode, 1, bits, **made)


def is_exact(codec: Codec) -> bool:
    """Return whether a codec is `identity()`, which rounds nothing."""
    # Known by `make`: the functions are made anew in every call, and are never equal.
    make = codec.make
    return isinstance(make, partial) and make.func is identity and make.args == (None,)


def mean_of_rows(codec: Codec, payload: Tree) -> Tensor:
    """Return the mean of the decoded rows (n,)."""
    if codec.decode_mean is not None:
        return codec.decode_mean(payload)
    # Added in the order of the rows: a sum in another order rounds otherwise, and the replicas would drift apart.
    # (W, n)
    rows = codec.decode(payload)
    total, in_place = rows[0], rows.device.type != "cpu" and is_concrete(rows) and not rows.requires_grad
    # `identity` decodes to the payload itself, so the first sum is a new tensor. Only that one is written over.
    for place, row in enumerate(rows[1:].unbind(0)):
        out = total if in_place and place else pooled(total, row).get("out")
        total = torch.add(total, row, out=out)
    out = total if in_place and len(rows) > 1 else pooled(total).get("out")
    return torch.mul(total, 1.0 / rows.shape[0], out=out)


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

    @property
    def runs(self) -> list[int]:
        """Return the segments as the kernels take them: (1, width) each."""
        return [value for width in self.widths for value in (1, width)]

    def row(self, index: Tensor | int) -> Segments:
        """Return the segments of one row, chosen by a 0-d index or a number."""
        if isinstance(index, int) or is_concrete(index, self.valid):
            return self if self.valid.shape[0] == 1 else _row(self, int(index))
        # A simulated rank is a batched tensor, which has no number to index by: (R, S) -> (1, S)
        return Segments(self.widths, self.valid.to(index.device).index_select(0, index.view(1)))

    @property
    def places(self) -> dict[int, list[int]]:
        """Return the indices of segments by width. Empty segments are left out; if all are empty, one stays."""
        places: dict[int, list[int]] = {}
        for s, width in enumerate(self.widths):
            if width:
                places.setdefault(width, []).append(s)
        return places or {0: [0]}

    @property
    def padded(self) -> bool:
        """Return whether some elements may be padding; what is traced or batched may."""
        return _is_padded(self) if is_concrete(self.valid) else True

    def mask(self, device: torch.device) -> Tensor:
        """Return (R, n) bool, true at real elements."""
        widths, ends = _ends(self, device)
        # (R, S) -> (R, n); without `output_size` the host would wait for the device to know the length
        ends = ends.repeat_interleave(widths, dim=1, output_size=self.row_length)
        # (n,) < (R, n)
        return torch.arange(self.row_length, dtype=torch.int64, device=device) < ends

    def clear(self, x: Tensor, rows: slice | int = slice(None)) -> Tensor:
        """Return x with zeros in its padding. x: all rows (R, n), or those that `rows` names."""
        return torch.where(self.mask(x.device)[rows], x, 0.0)

    def cleared(self, x: Tensor, rows: slice | int = slice(None)) -> Tensor:
        """Do what `clear` does, and nothing where there is no padding: a mask (R, n) costs time and memory."""
        return self.clear(x, rows) if self.padded else x


def segments_of(segments: Segments | None, rows: int, n: int, device: torch.device) -> Segments:
    """Return the segments of so many rows (n,) on a device; None: each row is one tensor."""
    if segments is None:
        return Segments((n,), torch.full((rows, 1), n, dtype=torch.int64, device=device))
    return Segments(segments.widths, segments.valid.to(device).expand(rows, -1))


@cached_plan
def _is_padded(segments: Segments) -> bool:
    return any(row != [*segments.widths] for row in segments.valid.tolist())


@cached_plan
def _ends(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the widths (S,), and where what is real in each segment ends (R, S)."""
    widths = torch.tensor(segments.widths, dtype=torch.int64, device=device)
    return widths, widths.cumsum(0) - widths + segments.valid.to(device)


@cached_plan  # the same object in every step, so that the plans of kernels, which are kept by object, are found again
def _row(segments: Segments, index: int) -> Segments:
    return Segments(segments.widths, segments.valid[index : index + 1])


def segmented(codec: Codec, segments: Segments | None) -> Codec:
    """Return the codec for rows in which several tensors lie side by side, if any; padding decodes to zero."""
    if segments is None:
        return codec
    if codec.segmented is not None:
        return codec.segmented(segments)
    return by_tensor(lambda width, valid: codec, segments)


def by_tensor(of_tensor: Callable[[int, Tensor], Codec], segments: Segments) -> Codec:
    """Return a codec for rows in which several tensors lie side by side, each in a codec of its own.

    Args: of_tensor: (width, valid (R, 1)) -> the codec for rows of one tensor; `align` and `bits` are the same for all.
        It encodes numbers whose padding is zero, and may decode padding to any numbers.
    Returns: the codec; its payload is a tuple with an entry for each tensor that has elements.
    """
    with_elements = [s for s, width in enumerate(segments.widths) if width]  # an empty tensor has nothing to say
    widths = [segments.widths[s] for s in with_elements] or [0]
    counts = [segments.valid[:, s : s + 1] for s in with_elements] or [segments.valid.new_zeros(1, 1)]
    codecs = [of_tensor(width, valid) for width, valid in zip(widths, counts, strict=True)]

    def encode(x: Tensor) -> Tree:
        # (R, n) -> (R, width) of each tensor
        parts = segments.cleared(x).split(widths, dim=1)
        return tuple(codec.encode(part) for codec, part in zip(codecs, parts, strict=True))

    def decode(payload: Tree) -> Tensor:
        # (R, width) of each tensor -> (R, n)
        rows = torch.cat([codec.decode(part) for codec, part in zip(codecs, payload, strict=True)], dim=1)
        return segments.cleared(rows)

    def decode_mean(payload: Tree) -> Tensor:
        # (W, ...) of each tensor -> (width,) -> (n,)
        row = torch.cat([mean_of_rows(codec, part) for codec, part in zip(codecs, payload, strict=True)])
        return segments.cleared(row, 0)

    with_mean = codecs[0].decode_mean is not None
    return Codec(encode, decode, codecs[0].align, codecs[0].bits, decode_mean if with_mean else None)


def by_width(of_rows: Callable[[int, Tensor], Codec], segments: Segments) -> Codec:
    """Return a codec for rows in which several tensors lie side by side; those of one width are encoded at once.

    Args: of_rows: (width, valid (rows, 1)) -> a codec that looks at each row alone; the rest as for `by_tensor`. Its
        rows are those of all tensors of a width.
    Returns: the codec; its payload is a tuple with an entry for each width, whose leaves are (R, tensors, ...).
    """
    places = segments.places
    order = [s for chosen in places.values() for s in chosen]
    # What was sorted by width goes back into the order of the tensors.
    back = sorted(range(len(order)), key=order.__getitem__)

    @cached_plan
    def codec_of(width: int, rows: int, device: torch.device) -> Codec:
        # (R, S) or (1, S) -> (R tensors, 1), in the order in which `encode` flattens rows
        valid = segments.valid[:, places[width]]
        return of_rows(width, valid.expand(rows, -1).reshape(-1, 1).to(device))

    def encode(x: Tensor) -> Tree:
        parts, payload = segments.cleared(x).split([*segments.widths], dim=1), []
        for width, chosen in places.items():
            # (R, width) of each tensor -> (R, tensors, width)
            rows = torch.stack([parts[s] for s in chosen], dim=1)
            # (R tensors, width) -> leaves (R tensors, ...)
            coded = codec_of(width, x.shape[0], x.device).encode(rows.flatten(0, 1))
            # Leaves become (R, tensors, ...): the first dimension of a payload has to be the row, by which it is sent.
            payload.append(tree.map(lambda leaf, shape=rows.shape[:2]: leaf.unflatten(0, shape), coded))
        return tuple(payload)

    def decode(payload: Tree) -> Tensor:
        parts: list[Tensor] = []
        for (width, chosen), part in zip(places.items(), payload, strict=True):
            first = tree.leaves(part)[0]
            # (R, tensors, ...) -> (R tensors, ...)
            rows = tree.map(lambda leaf: leaf.flatten(0, 1), part)
            decoded = codec_of(width, first.shape[0], first.device).decode(rows)
            # (R tensors, width) -> (R, width) of each tensor
            parts += decoded.unflatten(0, (-1, len(chosen))).unbind(1)
        return segments.cleared(torch.cat([parts[i] for i in back], dim=1))

    one = of_rows(0, segments.valid.new_zeros(1, 1))
    return Codec(encode, decode, one.align, one.bits)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Return whole numbers (R, n) of `width` bits each as bytes (R, ceil(n width / 8)) uint8.

    The first number lies in the lowest bits:

    >>> pack(torch.tensor([[1, 2, 3, 0]]), 2)               # 0b00_11_10_01
    tensor([[57]], dtype=torch.uint8)
    """
    rows, n = numbers.shape
    if width == 8:
        return numbers.to(torch.uint8)
    if 8 % width:
        return _packed_across(numbers, width)
    per_byte = 8 // width
    # (R, n) -> (R, bytes, per_byte)
    numbers = F.pad(numbers.to(torch.uint8), (0, -n % per_byte)).view(rows, -1, per_byte)
    shifts = width * torch.arange(per_byte, device=numbers.device, dtype=torch.uint8)
    # The numbers of a byte share no bit, so their sum is their union. Without a dtype it would be int64.
    return (numbers << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, width: int, n: int) -> Tensor:
    """Return the n numbers (R, n) int64 of `width` bits that `pack` made bytes (R, ceil(n width / 8)) of."""
    if width == 8:
        return packed.long()
    if 8 % width:
        return _unpacked_across(packed, width, n)
    shifts = width * torch.arange(8 // width, device=packed.device, dtype=torch.uint8)
    # (R, bytes, 1) >> (per_byte,) -> (R, bytes, per_byte) -> (R, n)
    numbers: Tensor = ((packed[:, :, None] >> shifts) & (2**width - 1)).flatten(1)
    return numbers[:, :n].to(torch.int64)


def _packed_across(numbers: Tensor, width: int) -> Tensor:
    """Pack numbers that lie across the bounds of bytes, groups of 8: each byte takes bits from a few numbers."""
    n, packed = numbers.shape[1], torch.zeros((), dtype=torch.int64, device=numbers.device)
    # (R, n) -> (R, groups, 8)
    groups = F.pad(numbers, (0, -n % 8)).unflatten(1, (-1, 8))
    for places, left, right in _numbers_of_bytes(width, numbers.device):
        # (R, groups, 8) -> (R, groups, width), the bytes of a group
        packed = packed | (groups.index_select(2, places) << left >> right)
    return packed.to(torch.uint8).flatten(1)[:, : -(-n * width // 8)]  # of a number its lowest 8 bits


def _unpacked_across(packed: Tensor, width: int, n: int) -> Tensor:
    """Unpack numbers that lie across the bounds of bytes, groups of 8: each takes bits from a few bytes."""
    # (R, bytes) -> (R, groups, width)
    groups = F.pad(packed, (0, -packed.shape[1] % width)).unflatten(1, (-1, width))
    places, right = _bytes_of_numbers(width, packed.device)
    numbers = groups.index_select(2, places[0]).long()
    # (R, groups, 8): for each number the bytes that it lies in, the first one lowest
    for k, several in enumerate(places[1:], 1):
        numbers = torch.add(numbers, groups.index_select(2, several), alpha=1 << 8 * k)
    unpacked: Tensor = ((numbers >> right) & (2**width - 1)).flatten(1)
    return unpacked[:, :n]


@cached_plan
def _numbers_of_bytes(width: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each byte of 8 numbers the places of a few of them, and how far each is shifted left and right."""
    first_bit = 8 * torch.arange(width, dtype=torch.int64, device="cpu")
    plans = []
    for k in range(-(-7 // width) + 1):
        place = first_bit // width + k
        shift = place * width - first_bit
        left = torch.where(place < 8, shift.clamp(0, 8), 8)  # 8 bits further to the left nothing of it is in the byte
        plans.append((place.clamp(max=7).to(device), left.to(device), (-shift).clamp(min=0).to(device)))
    return plans


@cached_plan
def _bytes_of_numbers(width: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return for each of 8 numbers the places of a few bytes, and how far these, joined, are shifted right."""
    first_bit = width * torch.arange(8, dtype=torch.int64, device="cpu")
    several = max(width * i % 8 + width + 7 for i in range(8)) // 8
    # A number ends inside of its group. So a byte that was clamped lands above its bits, and is masked away.
    places = [(first_bit // 8 + k).clamp(max=width - 1).to(device) for k in range(several)]
    return places, (first_bit % 8).to(device)
