"""The row of Intel GPUs beside Triton's: the backend of native `torch.xpu`."""

from __future__ import annotations

from fn.kernels.table import Accelerator


def row(device_type: str) -> Accelerator:
    """Return the row; it brings a backend, and no kernels: they are Triton's."""
    return Accelerator(device_type, {}, communication_backend="xccl", provider="torch.xpu")
