"""The row of Intel GPUs beside Triton's: the backend of native `torch.xpu`, or the extension that ended at 2.8.

The extension is imported only when it was built for the running torch: beside another one its import fails in ways
that are no ImportError.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from fn.kernels.table import Accelerator

EXTENSION = "intel_extension_for_pytorch"


def extension_matches() -> bool:
    """Return whether the extension is installed for this torch's minor version."""
    try:
        built_for = version(EXTENSION.replace("_", "-"))
    except PackageNotFoundError:
        return False
    return built_for.split(".")[:2] == torch.__version__.split(".")[:2]


def row(device_type: str) -> Accelerator:
    """Return the row; it brings a backend, and no kernels: they are Triton's."""
    if extension_matches():
        import_module(EXTENSION)  # it adds the device to torch; a failure of any kind is the table's to report
        return Accelerator(device_type, {}, communication_backend="ccl", provider=EXTENSION)
    return Accelerator(device_type, {}, communication_backend="xccl", provider="torch.xpu")
