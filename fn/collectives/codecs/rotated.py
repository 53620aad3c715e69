"""A Hadamard transform around any codec: large numbers are spread over their neighbours. `rotated`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn.arguments import check_whole
from fn.collectives.codecs.codec import Codec, Segments, mean_of_rows, segmented
from fn.errors import expected
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan

Tree = Any


def rotated(codec: Codec, block: int = 32) -> Codec:
    """Take a Walsh-Hadamard transform of every block, send that by a codec, and take the transform back.

        C(x) = H Q(H x),   H[a, b] = (-1)^popcount(a & b) / sqrt(block),   H H = 1

    A block with one large number becomes one of numbers of the same size, on which a scale per block loses less. It is
    made of additions alone, so that every rank rounds alike. The last block of a tensor is filled up with zeros.

    >>> import torch, fn
    >>> fn.rotated(fn.identity(), block=4).encode(torch.tensor([[0.0, 0.0, 8.0, 0.0]]))
    tensor([[ 4.,  4., -4., -4.]])

    Args:
        codec: what the transformed numbers travel as, such as `fn.int4()`. A mean over senders, of `top_k`, is then
            over those that sent a transformed number.
        block: elements that are transformed together, a power of two. Larger spreads further, in log2(block) passes.
    Returns: a codec whose `align` is the least multiple of both. It has the bits of the codec inside.
    Raises: TypeError if codec is no codec or block no whole number; ValueError if block is no power of two.

    Paper: Jia et al., SDP4Bit (arXiv 2410.15526), section 3.2, for gradients in 4 bits.
    Differs: H is divided by sqrt(block) on both ways; the authors divide by block on the way back, which gives the same
        numbers behind a codec that scales.
    """
    if not isinstance(codec, Codec):
        raise TypeError(expected("codec", "a Codec, such as fn.int4()", f"{codec!r}"))
    check_whole("block", block)
    if block < 1 or block & (block - 1):
        raise ValueError(expected("block", "a power of two", f"{block}"))
    block = int(block)

    def of_segments(s: Segments) -> Codec:
        filled = (s.valid + block - 1) // block * block  # what is zero in a block is not zero in its transform
        return _rotated(segmented(codec, Segments(s.widths, filled)), block, s)

    return _rotated(codec, block, None)._replace(
        align=math.lcm(codec.align, block), segmented=cached_plan(of_segments), make=partial(rotated, codec, block)
    )


def _rotated(inner: Codec, block: int, segments: Segments | None) -> Codec:
    def clear(x: Tensor, rows: slice | int = slice(None)) -> Tensor:
        return x if segments is None else segments.clear(x, rows)

    def encode(x: Tensor) -> Tree:
        return inner.encode(_transformed(clear(x).to(scale_dtype(x)), block))

    def decode(payload: Tree) -> Tensor:
        return clear(_transformed(inner.decode(payload), block))

    def decode_mean(payload: Tree) -> Tensor:
        # The transform is linear, so the mean is transformed once, and not W rows: (n,) -> (1, n) -> (n,)
        return clear(_transformed(mean_of_rows(inner, payload)[None], block)[0], 0)

    return Codec(encode, decode, inner.align, inner.bits, None if inner.decode_mean is None else decode_mean)


def _transformed(x: Tensor, block: int) -> Tensor:
    """Return the normalised Walsh-Hadamard transform of each block of x (R, n)."""
    shape, apart = x.shape, 1
    while apart < block:
        # (R, n) -> (R, n / (2 apart), 2, apart)
        pairs = x.reshape(shape[0], shape[1] // (2 * apart), 2, apart)
        a, b = pairs.unbind(2)
        # (R, n / (2 apart), apart) twice -> (R, n / (2 apart), 2, apart) -> (R, n)
        x, apart = torch.stack((a + b, a - b), dim=2).reshape(shape), 2 * apart  # butterflies, as in an FFT
    normalised: Tensor = x * block**-0.5
    return normalised
