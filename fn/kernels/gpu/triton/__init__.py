"""The Triton row: one set of fused kernels for CUDA, ROCm and XPU.

Products are not contracted with sums, so that elements equal the reference's; sums of squares are added in another
order. float64, and blocks that no program holds, are left to the next row.
"""

from __future__ import annotations

from fn.kernels.gpu.triton import ints, lamb, lists, signs, steps
from fn.kernels.table import Accelerator


def row(device_type: str) -> Accelerator:
    """Return the row."""
    kernels = (*signs.KERNELS, *ints.KERNELS, *steps.KERNELS, *lamb.KERNELS, *lists.KERNELS)
    return Accelerator(device_type, {f.__name__: f for f in kernels}, provider="triton")
