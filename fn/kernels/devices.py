"""What torch does not say about devices: an override of the current one, safe pinning, backends by device.

Streams, memory, random numbers and synchronisation are torch's own: `torch.accelerator`.

A device has two backends. `communication_backend` is the one of its process groups; `compressed_transport` is the one
that carries codes, uint8 messages in an all-to-all and an all-gather. They differ where a vendor's library does not
exchange bytes.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn.arguments import checked
from fn.kernels.table import rows

_chosen: ContextVar[torch.device | None] = ContextVar("fn_accelerator", default=None)
_backends: dict[str, str] = {}


def get_accelerator() -> torch.device:
    """Return the accelerator to use: the one that was set, else torch's current one, else the CPU."""
    return _chosen.get() or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@checked("device")
def set_accelerator(device: torch.device | str | None) -> None:
    """Choose the accelerator to use, in this context; None returns to torch's own choice.

    >>> import fn
    >>> fn.kernels.set_accelerator("meta")
    >>> fn.kernels.device_name(3)
    'meta:3'
    >>> fn.kernels.set_accelerator(None)

    Raises: RuntimeError if device is not a device that this torch knows.
    """
    _chosen.set(None if device is None else torch.device(device))


@checked("index")
def device_name(index: int | None = None) -> str:
    """Return the accelerator's name with an index, as tensors take it: "cuda:1", or "cpu"."""
    device = get_accelerator()
    if device.type == "cpu":
        return "cpu"
    return str(torch.device(device.type, device.index or 0 if index is None else index))


def on_accelerator(x: Any) -> bool:
    """Return whether x is a tensor on the accelerator; on a machine without one, whether it is on the CPU."""
    return isinstance(x, Tensor) and x.device.type == get_accelerator().type


@checked("x")
def pin_memory(x: Tensor) -> Tensor:
    """Return x in page-locked memory where an accelerator can use that, and x itself everywhere else."""
    if x.device.type != "cpu" or get_accelerator().type == "cpu" or not torch.accelerator.is_available():
        return x
    try:
        return x.pin_memory()
    except RuntimeError:  # a device without pinned memory
        return x


@checked("device_type")
def communication_backend(device_type: str | None = None) -> str:
    """Return the backend for process groups of a device: an override, the table's, torch's default, else gloo.

    >>> import fn
    >>> fn.kernels.communication_backend("cpu"), fn.kernels.communication_backend("cuda")
    ('gloo', 'nccl')

    Args: device_type: None is the accelerator's.
    """
    device_type = device_type or get_accelerator().type
    if device_type in _backends:
        return _backends[device_type]
    named = [row.communication_backend for row in rows(device_type) if row.communication_backend]
    if named:
        return named[0]
    try:
        return str(dist.get_default_backend_for_device(device_type))
    except (ValueError, RuntimeError, AttributeError):  # torch knows no backend, or no such device
        return "gloo"


@checked("device_type", "backend")
def set_communication_backend(device_type: str, backend: str | None) -> None:
    """Override a device's communication backend; None takes the override away.

    >>> import fn
    >>> fn.kernels.set_communication_backend("cuda", "mpi")
    >>> fn.kernels.communication_backend("cuda"), fn.kernels.compressed_transport("cuda")
    ('mpi', 'mpi')
    >>> fn.kernels.set_communication_backend("cuda", None)
    """
    if backend is None:
        _backends.pop(device_type, None)
    else:
        _backends[device_type] = backend


@checked("device_type")
def compressed_transport(device_type: str | None = None) -> str:
    """Return the backend that carries codes for a device: the table's, else its communication backend."""
    device_type = device_type or get_accelerator().type
    named = [row.compressed_transport for row in rows(device_type) if row.compressed_transport]
    return named[0] if named else communication_backend(device_type)
