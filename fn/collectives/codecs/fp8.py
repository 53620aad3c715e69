"""The fp8 codec: blocks of 8-bit floating numbers times a scale. `fp8`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.integer import checked_block, in_blocks
from fn.errors import expected

MANTISSAS = {"e4m3": 3, "e5m2": 2}
"""The bits of the mantissa of each format."""


class Fp8Payload(NamedTuple):
    """scales: (R, S) float32 or float64, M / 448 or M / 57344 of a block. codes: (R, n) uint8, the numbers' bytes."""

    scales: Tensor
    codes: Tensor


def fp8(block: int = 256, format: str = "e4m3") -> Codec:
    """Send 8-bit floating numbers and one scale per block.

        M = max |x|,   code = fp8(448 x / M),   C(x) = code M / 448          57344 for 448 in e5m2

    Each element is rounded to the nearest number of the format, half to even: it is off by at most 1/16 of itself in
    e4m3 and 1/8 in e5m2, or by M / 458752 and M / 7.5e9 where it is smaller than the format has digits for. The largest
    magnitude comes back exactly, up to float32. Where 448 / M is more than float32 holds, a float32 block comes back
    as zeros: at an M below about 1.3e-36, 1.7e-34 in e5m2. Means are added up in float32. A block with a NaN or an Inf
    comes back as NaN; blocks start anew at every piece that a server gets.

    `int8` has the same bytes, and is off by at most M / 256 whatever the element. It is better where the elements of a
    block are of one size: its squared error on normal ones is a 14th. `fp8` keeps what is small beside the largest.

    >>> import torch, fn
    >>> codec = fn.fp8()
    >>> payload = codec.encode(torch.tensor([[448.0, -8.0, 1.0, 0.01]]))
    >>> payload                                             # 126 is 0b0_1111_110, the largest number
    Fp8Payload(scales=tensor([[1.]]), codes=tensor([[126, 208,  56,   5]], dtype=torch.uint8))
    >>> codec.decode(payload)
    tensor([[ 4.4800e+02, -8.0000e+00,  1.0000e+00,  9.7656e-03]])
    >>> fn.int8().decode(fn.int8().encode(torch.tensor([[448.0, -8.0, 1.0, 0.01]])))
    tensor([[444.5000,  -7.0000,   0.0000,   0.0000]])

    Args:
        block: elements that share a scale; blocks do not cross from one tensor into another. The wire carries 8 + 32 /
            block bits per element: 8.125 by default.
        format: "e4m3", 4 bits of exponent and 3 of mantissa; or "e5m2", a digit less over a range 2**16 times as wide.
    Raises: ValueError if block is not a positive multiple of 8 or format not one of the two.

    Paper: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), for the formats.
    Differs: each block has a scale, where the paper has one for a tensor.
    """
    block = checked_block(block)
    if format not in (*MANTISSAS,):
        raise ValueError(expected("format", "'e4m3' or 'e5m2'", f"{format!r}"))
    ops = "quantize_fp8", "dequantize_fp8"
    return in_blocks(Fp8Payload, ops, MANTISSAS[format], 8, block)._replace(make=partial(fp8, block, format))
