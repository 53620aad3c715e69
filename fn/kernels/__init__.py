"""What runs on a device: row-wise kernels on plain tensors. Knows no ranks and no trees."""

from fn.kernels import ops
from fn.kernels.table import Accelerator, register, unregister

__all__ = ["Accelerator", "ops", "register", "unregister"]
