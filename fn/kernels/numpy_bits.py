"""The CPU row in NumPy: bits are packed and unpacked by `np.packbits` and `np.unpackbits`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fn.kernels.table import Accelerator


def pack_bits(x: Tensor) -> Tensor:
    """Pack the signs of x (R, n), see `reference.pack_bits`."""
    packed = np.packbits((x >= 0).numpy(), axis=-1, bitorder="little")
    return torch.from_numpy(packed)


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Unpack n signs of each row, see `reference.unpack_bits`."""
    ones = np.unpackbits(bits.numpy(), axis=-1, count=n, bitorder="little")
    return torch.from_numpy(ones).to(dtype).mul_(2).sub_(1)


def row(device_type: str) -> Accelerator:
    """Return the row."""
    return Accelerator(device_type, {"pack_bits": pack_bits, "unpack_bits": unpack_bits}, provider="numpy")
