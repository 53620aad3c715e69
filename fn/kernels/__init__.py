"""What runs on a device: row-wise kernels on plain tensors. Knows no ranks and no trees.

>>> import fn
>>> fn.kernels.table()  # doctest: +SKIP
"""

from fn.kernels import ops, reference
from fn.kernels.conformance import conformance
from fn.kernels.devices import (
    communication_backend,
    compressed_transport,
    device_name,
    get_accelerator,
    on_accelerator,
    pin_memory,
    set_accelerator,
    set_communication_backend,
)
from fn.kernels.table import Accelerator, register, table, unregister

__all__ = [
    "Accelerator",
    "communication_backend",
    "compressed_transport",
    "conformance",
    "device_name",
    "get_accelerator",
    "on_accelerator",
    "ops",
    "pin_memory",
    "reference",
    "register",
    "set_accelerator",
    "set_communication_backend",
    "table",
    "unregister",
]
