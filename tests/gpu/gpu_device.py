"""The device of these tests: the accelerator of this machine, or what FN_TEST_DEVICE says; and how to be rough with it.

    FN_TEST_DEVICE=cpu python -m pytest tests/gpu      # proves the tests themselves where there is no GPU
    FN_TEST_BACKEND=nccl python -m pytest tests/gpu    # two ranks over NCCL, also where they share a GPU

`benchmarks/gpu.py` runs the same checks, so nothing here imports pytest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WANTED = os.environ.get("FN_TEST_DEVICE", "")
"""The device that somebody asked for; "" is the accelerator."""

BACKEND = os.environ.get("FN_TEST_BACKEND", "") or "gloo"
"""What two ranks communicate over."""

ON_ONE_GPU = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""With which NCCL lets ranks share a GPU, if each says that it is on another host."""

SLEEP = 2_000_000
"""Cycles that a stream is kept busy: about a millisecond."""


def device() -> torch.device | None:
    """Return the device to test on: the one that was asked for, else the accelerator, else None."""
    if WANTED:
        return torch.device(WANTED)
    return torch.accelerator.current_accelerator(check_available=True)


def join(rank: int, device: torch.device, store: Any, backend: str = BACKEND, **more: Any) -> torch.device:
    """Join a process group of two ranks on this machine; return this rank's device, one of its own where there are two.

    Tensors of the CPU go over gloo. NCCL refuses two ranks on one GPU of one host, so each names a host of its own.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if backend == "nccl" and count < 2:
            os.environ |= {**ON_ONE_GPU, "NCCL_HOSTID": f"rank {rank}"}
        device = torch.device(device.type, rank % count if backend == "nccl" else device.index or 0)
        torch.accelerator.set_device_index(device.index)
        backend = backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"
    else:
        backend = "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, **more)
    return device


def synchronise(device: torch.device) -> None:
    """Wait until a device has done all that was queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def dawdle(device: torch.device) -> None:
    """Keep the current stream of a device busy for about a millisecond, so that whoever does not wait is too early."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP)
    elif device.type == "cpu":
        time.sleep(0.001)


def poison(device: torch.device, sizes: Sequence[int]) -> None:
    """Write NaN into memory that was freed: the allocator hands it out again while another stream may still read it."""
    held = [torch.full((n,), float("nan"), device=device) for n in sizes for _ in range(4)]
    del held


def apart(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of x on a device whose elements do not lie one behind the other."""
    room = torch.empty((*x.shape, 2), dtype=x.dtype, device=device)
    room[..., 0] = x.to(device)
    return room[..., 0]


def misaligned(x: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy of x on a device that begins one element behind where memory is aligned."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)
    return room[1:].view(x.shape).copy_(x)


def aligned(x: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy of x on a device."""
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x)


PLACES: dict[str, Callable[[Tensor, torch.device], Tensor]] = {
    "aligned": aligned,
    "misaligned": misaligned,
    "strided": apart,
}
"""How the arguments of a kernel can lie in memory."""
