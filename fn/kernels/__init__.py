"""What runs on a device: row-wise kernels on plain tensors. Knows no ranks and no trees.

Every kernel is an op of torch, in `torch.ops.fn`, and a function of `reference`, which says what it means:

>>> import fn, torch
>>> x = torch.tensor([[5.0, 4.0, 3.0, 2.0, 0.0, -1.0, -2.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]])
>>> torch.ops.fn.pack_bits(x).tolist(), fn.kernels.reference.codes.pack_bits(x).tolist()
([[159, 15]], [[159, 15]])

`table` says who provides the kernels of a device, and `register` takes those of a new one.
"""

from fn.kernels import ops, reference
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
