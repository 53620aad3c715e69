"""The e3m0 codec: 4-bit floating numbers, a sign and an exponent, and a scale per block. `e3m0`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fn.arguments import check_whole
from fn.collectives.codecs.codec import Codec, pack, unpack
from fn.errors import expected
from fn.kernels.layout import scale_dtype

BOUNDARIES = (2.0**-7, *(0.75 * 2.0**-j for j in range(5, -1, -1)))
"""Magnitudes, of the largest in a block, at which the level rises from 0 to 2^-6 and on to 1."""


class E3m0Payload(NamedTuple):
    """scales: (R, blocks) float32 or float64; codes: (R, n / 2) uint8, the first in the low half."""

    scales: Tensor
    codes: Tensor


def e3m0(block: int | None = 256) -> Codec:
    """Send 4 bits per element, a sign and three bits of exponent, and one scale per block.

        M = max |x|,   C(x) = the nearest of 0 and +-M 2^-j, j = 0 .. 6; of two that are as near, the larger one

    The relative error is at most a third, over a range of 1 to 64. The largest magnitude of a block comes back exactly,
    and what is below M / 128 as zero. Blocks start anew at every piece that a server gets, so the last may be shorter.
    A block with a NaN or an Inf comes back with NaN or Inf.

    >>> import torch, fn
    >>> codec = fn.e3m0()
    >>> codec.decode(codec.encode(torch.tensor([[8.0, -5.0, 1.4, 0.01]])))
    tensor([[ 8., -4.,  1.,  0.]])

    Args: block: elements that share a scale; 4 + 32 / block bits per element. Smaller blocks follow magnitudes that
        differ inside of a tensor. None: one scale for the tensor, or for each piece of it that a server gets.
    Raises: TypeError if block is no whole number; ValueError if it is less than 1.

    Paper: Douillard et al., Streaming DiLoCo (arXiv 2501.18512).
    Differs: the paper does not say how its numbers are scaled; here by the largest magnitude of a block.
    """
    if block is not None:
        check_whole("block", block)
        if block < 1:
            raise ValueError(expected("block", "None or a whole number of at least 1", f"{block}"))

    def cut(x: Tensor) -> Tensor:
        n, length = x.shape[1], block or max(1, x.shape[1])
        # (R, n) -> (R, blocks, length)
        padded = torch.nn.functional.pad(x, (0, -n % length)) if n % length else x
        return padded.reshape(x.shape[0], padded.shape[1] // length, length)

    def encode(x: Tensor) -> E3m0Payload:
        rows, n = x.shape
        parts = cut(x.to(scale_dtype(x)))  # (R, blocks, block)
        size = parts.abs()
        # (R, blocks, length) -> (R, blocks)
        scale = size.amax(2)
        level = torch.zeros_like(size, dtype=torch.uint8)
        for boundary in BOUNDARIES:
            level = level + (size >= boundary * scale[:, :, None])
        level = torch.where(size > 0, level, 0)  # where boundaries are rounded to zero
        # (R, blocks, length) -> (R, blocks length), of which the first n are sent
        codes = (level + 8 * (parts < 0)).reshape(rows, parts.shape[1] * parts.shape[2])
        return E3m0Payload(scale, pack(codes[:, :n], 4))

    def decode(payload: E3m0Payload) -> Tensor:
        rows, n = payload.codes.shape[0], payload.codes.shape[1] * 2
        codes = cut(unpack(payload.codes, 4, n))
        level = codes & 7
        factor = torch.exp2((level - 7).to(payload.scales.dtype)) * (level > 0)
        # (R, blocks, length) * (R, blocks, 1)
        numbers = torch.where(codes > 7, -factor, factor) * payload.scales[:, :, None]
        return numbers.reshape(rows, codes.shape[1] * codes.shape[2])[:, :n]

    return Codec(encode, decode, 2, 4.0 if block is None else 4.0 + 32.0 / block, make=partial(e3m0, block))
