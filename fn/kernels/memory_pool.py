"""Large CPU buffers that are used again instead of being returned to the system.

A fresh large tensor costs a page fault for every 4 KiB, which takes longer than the arithmetic of a kernel. `empty`
leases memory to a tensor; when the tensor's storage dies, the memory comes back and serves the next lease of the same
size. The tensors are ordinary: they can be kept, shared, pickled and sent.

The pool holds at most what was in use at the same time: a block is made only when no free one of its size is left.
`clear` gives the free ones back to the system.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALLEST = 1 << 18
"""Bytes below which `empty` is `torch.empty`."""

ALIGNMENT = 64
FORGET_AFTER = 256
"""Leases after which free blocks go back to the system, if none of them was of their size."""

Block: TypeAlias = NDArray[np.uint8]  # aligned

_free: dict[int, deque[Block]] = {}  # bytes -> free blocks; deques, because a finalizer may run inside any line here
_asked: dict[int, int] = {}  # bytes -> number of the last lease
_leases = 0


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, on a CPU with memory leased from the pool.

    Args: shape, dtype, device: as for `torch.empty`. Devices other than the CPU have pools of their own.
    Returns: a contiguous tensor, 64-byte aligned if it is at least `SMALLEST` bytes large.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < SMALLEST or device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    block = _take(size)
    lease = block.view(_Lease)
    lease.block = block
    # (n,) -> shape; the storage holds the lease, whose end gives the block back
    return torch.frombuffer(lease, dtype=dtype).view(tuple(shape))


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A block in use: what the storage of a tensor holds on to."""

    block: Block

    def __del__(self) -> None:
        if _free is not None:  # as names of modules are when Python ends
            _free.setdefault(self.size, deque()).append(self.block)


def _take(size: int) -> Block:
    global _leases
    _leases += 1
    _asked[size] = _leases
    try:
        return _free.setdefault(size, deque()).pop()
    except IndexError:
        _forget()
        memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
        # `np.empty` promises less.
        offset = -memory.ctypes.data % ALIGNMENT
        return memory[offset : offset + size]


def _forget() -> None:
    for size in list(_free):
        if _leases - _asked.get(size, 0) > FORGET_AFTER:
            _asked.pop(size, None)
            _free.pop(size, None)


def free_bytes() -> int:
    """Return the bytes of all free blocks."""
    return sum(size * len(blocks) for size, blocks in list(_free.items()))


def clear() -> None:
    """Give all free blocks back to the system; leased ones follow when they return and are not asked for again."""
    _free.clear()
    _asked.clear()
