"""The row "torch": steps and codes by torch's own functions, for every device and without a compiler."""

from fn.kernels.eager.foreach import row

__all__ = ["row"]
