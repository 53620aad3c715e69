"""How kernels of the Triton row are launched: how much a program works on, with how many warps and registers.

`python benchmarks/gpu.py sweep --write` tries others on a GPU, and writes the fastest into the table.
"""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """How a kernel is launched.

    block: elements of a program. per_warp: elements that a warp works on; 16 warps of 256 are 512 threads on NVIDIA's
    GPUs, which share the 65,536 registers of a processor. registers: the most of a thread, on NVIDIA's GPUs only; None
    for as many as the compiler takes.
    """

    block: int = 1 << 12
    per_warp: int = 256
    registers: int | None = None


# With 64 registers a thread, two programs fit a processor, so that one computes while the other waits for memory. These
# kernels take up to 82 without a bound, under Triton 3.6; all others stay within 64 by themselves, and a bound would
# only let them take more.
LAUNCHES: dict[str, Launch] = {
    "encode_averages_kernel": Launch(registers=64),
    "onebit_kernel": Launch(registers=64),
    "adamw_kernel": Launch(registers=64),
}
"""By the kernel's name; a kernel that is missing is launched as `Launch()` says."""


def launch_of(kernel: object) -> Launch:
    """Return how a kernel is launched."""
    return LAUNCHES.get(getattr(kernel, "__name__", ""), Launch())
