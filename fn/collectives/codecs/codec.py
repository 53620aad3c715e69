"""Codecs: what a vector looks like on the wire.

A codec is a pair of pure functions between rows of numbers and a payload, a tree of tensors whose first dimension
is the row; a row is what one rank receives. `sign_codec` sends a bit per element, `int_codec` 4 or 8, `identity` the
numbers themselves.

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
from torch import Tensor

from fn.collectives.codecs.pickling import invalidates, reduced
from fn.collectives.codecs.segments import Segments
from fn.errors import expected
from fn.kernels.tracing import is_concrete, pooled

Tree = Any


class Fused(NamedTuple):
    """A codec and a feedback in one kernel. What it computes is what the two compute one after the other.

    init: x (R, n) -> the error in the form that is fastest; only shape, dtype and device of x matter.
    accepts: (x (R, n), error) -> whether the kernels can take this error.
    encode: (x (R, n), error) -> payload, next error.
    encode_over: the same for an x whose memory becomes the error's. None: `encode` does.
    settle: (error, R) -> the error as a plain vector (R * n,).
    serve: (payload of W rows, error) -> payload of their mean, one row, and the next error. None: in two steps.
    averages: (mu, grads, decay, error=, rows=R) -> payload, next error: encode of the moving averages
        decay * mu + (1 - decay) * grad of the tensors that are the segments. None: they are formed first.
    """

    init: Callable[[Tensor], Tree]
    accepts: Callable[[Tensor, Tree], bool]
    encode: Callable[[Tensor, Tree], tuple[Tree, Tree]]
    settle: Callable[[Tree, int], Tensor]
    serve: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None
    averages: Callable[..., tuple[Tree, Tree]] | None = None
    encode_over: Callable[[Tensor, Tree], tuple[Tree, Tree]] | None = None


@invalidates({"encode", "decode"}, {"decode_mean", "segmented", "fused", "make"})
class Codec(NamedTuple):
    """How rows of numbers travel.

    encode: (R, n) floating -> payload, a tree of tensors (R, ...). Deterministic: the same numbers, the same payload.
    decode: payload -> (R, n) floating.
    align: n must be a multiple of it; the collectives pad each rank's piece of a tensor to one.
    bits: on the wire per element, scales of blocks included. NaN: it depends on the length of the tensor.
    decode_mean: payload of W rows -> (n,), the mean of the decoded rows, added in the order of the rows; or of those
        rows that hold the element, where rows need not hold all.
    segmented: Segments -> the same codec for several tensors in a row, blocks and scales not crossing from one
        tensor into the next. None: `segmented` does it tensor by tensor.
    fused: a feedback's `rule` -> encoding with that feedback in one kernel, or None where there is no such kernel.
    make: makes it again, where it was unpickled. None: then it cannot be pickled.

    `_replace` of encode or decode makes those of the last four None that are not given, too.
    """

    encode: Callable[[Tensor], Tree]
    decode: Callable[[Tree], Tensor]
    align: int
    bits: float
    decode_mean: Callable[[Tree], Tensor] | None = None
    segmented: Callable[[Segments], Codec] | None = None
    fused: Callable[[Any], Fused | None] | None = None
    make: Callable[[], Codec] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs."""
        return reduced(self, self.make)


def identity(dtype: torch.dtype | None = None) -> Codec:
    """Send the numbers themselves, rounded to `dtype` if one is given.

    Raises: TypeError if dtype is not a floating dtype.
    """
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(expected("dtype", "float16, bfloat16, float32, float64 or None", f"{dtype}"))

    def decode(payload: Tensor) -> Tensor:
        return payload.float() if payload.dtype in (torch.float16, torch.bfloat16) else payload

    bits = float(torch.finfo(dtype or torch.float32).bits)
    made: dict[str, Any] = {"segmented": lambda s: identity(dtype), "make": partial(identity, dtype)}
    return Codec(lambda x: x.to(dtype) if dtype else x, decode, 1, bits, **made)


def is_exact(codec: Codec) -> bool:
    """Return whether a codec is `identity()`, which rounds nothing."""
    make = codec.make
    return isinstance(make, partial) and make.func is identity and make.args == (None,)


def mean_of_rows(codec: Codec, payload: Tree) -> Tensor:
    """Return the mean of the decoded rows (n,), added in the order of the rows so that every rank rounds alike."""
    if codec.decode_mean is not None:
        return codec.decode_mean(payload)
    rows = codec.decode(payload)
    total = rows[0]
    for row in rows[1:].unbind(0):
        total = torch.add(total, row, out=pooled(total, row).get("out"))
    return torch.mul(total, 1.0 / rows.shape[0], out=pooled(total).get("out"))


def segmented(codec: Codec, segments: Segments) -> Codec:
    """Return the codec for rows in which several tensors lie side by side; padding decodes to zero."""
    if codec.segmented is not None:
        return codec.segmented(segments)
    return by_tensor(lambda width, valid: codec, segments)


def by_tensor(of_tensor: Callable[[int, Tensor], Codec], segments: Segments) -> Codec:
    """Return a codec for rows in which several tensors lie side by side, each in a codec of its own.

    Args: of_tensor: (width, valid (R, 1)) -> the codec for rows of one tensor; `align` and `bits` are the same for all.
        It is given numbers in which padding is zero, and may give any for the padding.
    Returns: the codec; its payload is a tuple with an entry for each tensor that has elements.
    """
    places = [place for place, width in enumerate(segments.widths) if width]  # an empty tensor has nothing to say
    widths = [segments.widths[place] for place in places] or [0]
    counts = [segments.valid[:, place : place + 1] for place in places] or [segments.valid.new_zeros(1, 1)]
    codecs = [of_tensor(width, valid) for width, valid in zip(widths, counts, strict=True)]
    padded = not is_concrete(segments.valid) or any(row != [*segments.widths] for row in segments.valid.tolist())

    def clear(x: Tensor, rows: slice | int = slice(None)) -> Tensor:
        """Return x with zeros for the padding: a mask of all elements costs more memory than they do."""
        return torch.where(segments.mask(x.device)[rows], x, 0.0) if padded else x

    def encode(x: Tensor) -> Tree:
        parts = clear(x).split(widths, dim=1)
        return tuple(codec.encode(part) for codec, part in zip(codecs, parts, strict=True))

    def decode(payload: Tree) -> Tensor:
        return clear(torch.cat([codec.decode(part) for codec, part in zip(codecs, payload, strict=True)], dim=1))

    def decode_mean(payload: Tree) -> Tensor:
        return clear(torch.cat([mean_of_rows(codec, part) for codec, part in zip(codecs, payload, strict=True)]), 0)

    with_mean = codecs[0].decode_mean is not None
    return Codec(encode, decode, codecs[0].align, codecs[0].bits, decode_mean if with_mean else None)
