"""The CPU row in Numba: fused kernels that read and write memory once. Needs the extra `cpu`.

The loops hold no GIL, are compiled once and cached on disk, and leave torch's thread count alone. Codes and errors are
bit for bit those of the reference, for float32 and what converts to it; sums of squares differ by their order, steps of
optimizers in their last bits, and momenta below 1.2e-38 become zero. float64 is left to the row after it.
"""

from __future__ import annotations

from fn.kernels.cpu import ints, lamb, signs, steps
from fn.kernels.table import Accelerator


def row(device_type: str) -> Accelerator:
    """Return the row."""
    kernels = (*signs.KERNELS, *ints.KERNELS, *steps.KERNELS, *lamb.KERNELS)
    return Accelerator(device_type, {f.__name__: f for f in kernels}, provider="numba")
