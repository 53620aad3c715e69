"""How fast is the wire? Measured once, to decide whether hiding it is worth the trouble."""

from __future__ import annotations

import statistics
import time

import torch

from fn.collectives.axis import axis_size
from fn.collectives.primitives import all_to_all, pmean

PROBE = 1 << 20
"""Bytes that each rank sends in a measurement."""


def seconds_per_byte(axis: str, device: torch.device) -> float:
    """Return how long a rank takes to send a byte to the others, the same number on all ranks of the axis.

    All ranks must call it. It is the median of three exchanges of `PROBE` bytes, averaged over the ranks; 0 on one
    rank.
    """
    world = axis_size(axis)
    if world == 1:
        return 0.0
    rows = torch.zeros(world, PROBE // (world - 1), dtype=torch.uint8, device=device)
    times = []
    for _ in range(4):
        pmean(torch.zeros(1, device=device), axis)  # nobody starts before all are here
        _finish(device)
        start = time.perf_counter()
        all_to_all(rows, axis)
        _finish(device)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[1:])  # the first one opens connections
    return float(pmean(torch.tensor([median / PROBE], dtype=torch.float64, device=device), axis))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
