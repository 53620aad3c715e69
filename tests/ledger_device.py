"""A device that is a ledger: tensors on "meta" with values beside them, and a count of the bytes that are alive.

    with LedgerDevice() as device:
        p = device.put(torch.ones(4))      # on the device
        torch.empty(4).copy_(p)            # to the host
    device.peak

Meta tensors have storages of the true size and no memory, and torch refuses to give them memory of another device, as
accelerators other than CUDA do. Copies between host and device, fills and in-device copies carry values; any other
arithmetic on the device is an error.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class LedgerDevice(TorchDispatchMode):
    """Storages on "meta", counted while they live. live, peak, capacity: bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.capacity = float("inf")
        self._values: dict[int, Tensor] = {}

    def put(self, x: Tensor) -> Tensor:
        """Return x on the device, with the strides of x."""
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return there.copy_(x)

    def values(self, x: Tensor) -> Tensor:
        """Return what x, on the device, holds: a view of the values of its storage."""
        memory = self._values[x.untyped_storage()._cdata]
        return memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and any(t.is_meta for t in args[:2]):
            target, source = (self.values(t) if t.is_meta else t for t in args[:2])
            if args[0].is_meta and args[1].is_meta and args[0].dtype != args[1].dtype:
                self._count(torch.empty_like(args[1], dtype=args[0].dtype))
            target.copy_(source)
            return args[0]
        if func is aten._to_copy.default and args[0].is_meta and torch.device(kwargs["device"]).type == "cpu":
            return self.values(args[0]).clone()
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor) and t.is_meta:
                self._count(t)
        if func is aten.zero_.default and args[0].is_meta:
            self.values(args[0]).zero_()
        return found

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata in self._values:
            return
        size, key = storage.nbytes(), storage._cdata
        if self.live + size > self.capacity:
            raise torch.OutOfMemoryError("the ledger device is full")
        self._values[key] = torch.zeros(size, dtype=torch.uint8)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        del self._values[key]
        self.live -= size
