"""MPI as a transport: an axis bound to a communicator of mpi4py.

    from mpi4py import MPI
    with fn.bind({"data": MPI.COMM_WORLD}):
        opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"),
                           schedule=fn.freeze_after(1000), lr=1e-3)

    $ mpiexec -n 4 python -m mpi4py train.py      # -m mpi4py: a rank that raises ends the others

Nothing here imports mpi4py: a communicator is known by its methods. Messages are exchanged in host memory, as
bytes; tensors of a device are copied there, page-locked where the device can use that, and back. MPI has no
float16 and no bfloat16: `psum` adds these in float32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.collectives.transports.registry import Transport, register
from fn.errors import expected

Communicator = Any
"""An `mpi4py.MPI.Intracomm`."""


def is_communicator(group: object) -> bool:
    """Tell whether something is an MPI communicator, by its methods."""
    return all(hasattr(group, name) for name in ("Get_size", "Get_rank", "Alltoall", "Allgather", "Allreduce"))


def register_communicator(comm: Communicator) -> str:
    """Register a communicator as a transport; return the transport's name.

    It has one name as long as it is not freed. MPI gives the handle of a freed one to another, whose ranks are others:
    what was bound to the first must not travel over that.

    Raises: ValueError if the communicator is null, or between two groups.
    """
    if not comm:
        raise ValueError("group: is MPI.COMM_NULL; only the ranks of a communicator can bind it")
    if comm.Is_inter():
        raise ValueError(expected("group", "a communicator of one group", "an intercommunicator"))
    name = next((name for name, known in _communicators.items() if known == comm), None)
    if name is None:
        name = f"mpi:{comm.py2f()}"
        name += f" #{len(_communicators)}" if name in _communicators else ""
        _communicators[register(name, transport(comm))] = comm
    return name


_communicators: dict[str, Communicator] = {}
"""Those that were registered, by name. One that is freed is null then, and equal to no other."""


def transport(comm: Communicator) -> Transport:
    """Return the exchanges of a communicator."""
    size = comm.Get_size()

    def all_to_all(x: Tensor) -> Tensor:
        received = _host(x, x.shape)
        comm.Alltoall(_bytes(_on_host(x)), _bytes(received))
        return received.to(x.device)

    def all_gather(x: Tensor) -> Tensor:
        received = _host(x, (size, *x.shape))
        comm.Allgather(_bytes(_on_host(x)), _bytes(received))
        return received.to(x.device)

    def psum(x: Tensor) -> Tensor:
        narrow = x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
        wide = x.float() if narrow else x
        total = _host(wide, wide.shape)
        comm.Allreduce(_on_host(wide).numpy(), total.numpy())
        return total.to(x.device, x.dtype)

    return Transport(all_to_all, all_gather, psum)


def _on_host(x: Tensor) -> Tensor:
    return x if x.device.type == "cpu" else _host(x, x.shape).copy_(x)


def _host(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised host tensor, page-locked if it stages for a device that can use that."""
    if like.device.type != "cpu":
        try:
            return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=True, device="cpu")
        except RuntimeError:  # a device without page-locked memory
            pass
    return torch.empty(tuple(shape), dtype=like.dtype, device="cpu")


def _bytes(x: Tensor) -> Any:
    # (...) -> (n,) -> (bytes,)
    return x.reshape(-1).view(torch.uint8).numpy()
