"""What runs on a device: row-wise kernels on plain tensors. Knows no ranks and no trees."""

from fn.kernels.table import Accelerator, register

__all__ = ["Accelerator", "register"]
