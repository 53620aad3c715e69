"""The device of these tests: the accelerator of this machine, or what FN_TEST_DEVICE says; and how to be rough with it.

    FN_TEST_DEVICE=cpu python -m pytest tests/gpu      # proves the tests themselves where there is no GPU

`benchmarks/gpu.py` runs the same checks, so nothing here imports pytest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WANTED = os.environ.get("FN_TEST_DEVICE", "")
"""The device that somebody asked for; "" is the accelerator."""

SLEEP = 2_000_000
"""Cycles that a stream is kept busy: about a millisecond."""


def device() -> torch.device | None:
    """Return the device to test on: the one that was asked for, else the accelerator, else None."""
    if WANTED:
        return torch.device(WANTED)
    return torch.accelerator.current_accelerator(check_available=True)


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
