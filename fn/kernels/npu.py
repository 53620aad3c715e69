"""The row of Ascend NPUs: torch_npu's sign packing, whose bit order is the one of the wire."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.kernels.table import Accelerator, Kernel


def row(device_type: str) -> Accelerator:
    """Return the row. Raises: ImportError where torch_npu is not installed."""
    library: Any = import_module("torch_npu")

    def pack_bits(x: Tensor) -> Tensor:
        """Pack the signs of x (R, n), see `reference.pack_bits`."""
        signs = torch.where(x >= 0, 1.0, -1.0).to(torch.float32)  # -0.0 is positive on the wire
        padded = F.pad(signs, (0, -x.shape[1] % 8), value=-1.0)
        packed: Tensor = library.npu_sign_bits_pack(padded.reshape(-1), 1)
        return packed.view(x.shape[0], padded.shape[1] // 8)

    def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Unpack n signs of each row, see `reference.unpack_bits`."""
        signs: Tensor = library.npu_sign_bits_unpack(bits.reshape(-1), 1, torch.float32)
        return signs.view(bits.shape[0], bits.shape[1] * 8)[:, :n].to(dtype).contiguous()

    kernels: dict[str, Kernel] = {"pack_bits": pack_bits, "unpack_bits": unpack_bits}
    return Accelerator(device_type, kernels, communication_backend="hccl", provider="torch_npu")
