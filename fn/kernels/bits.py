"""Rows that only pack and unpack bits: NumPy's on a CPU, CuPy's on CUDA, torch_npu's on Ascend NPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fn.kernels.layout import bytes_for
from fn.kernels.table import Accelerator, Kernel


def pack_bits(x: Tensor) -> Tensor:
    """Pack the signs of x (R, n), see `reference.codes.pack_bits`."""
    packed = np.packbits((x >= 0).numpy(), axis=-1, bitorder="little")
    return torch.from_numpy(packed)


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Unpack n signs of each row, see `reference.codes.unpack_bits`."""
    ones = np.unpackbits(bits.numpy(), axis=-1, count=n, bitorder="little")
    return torch.from_numpy(ones).to(dtype).mul_(2).sub_(1)


def numpy(device_type: str) -> Accelerator:
    """Return NumPy's row."""
    return Accelerator(device_type, {"pack_bits": pack_bits, "unpack_bits": unpack_bits}, provider="numpy")


def cupy(device_type: str) -> Accelerator:
    """Return CuPy's row. Raises: ImportError where it is not installed.

    Arrays are exchanged by DLPack, without copies. Without a GPU `import cupy` succeeds and every operation raises; the
    table finds out by the known answers.
    """
    library: Any = import_module("cupy")

    @contextmanager
    def stream_of(x: Tensor) -> Iterator[None]:
        """Enter x's device and torch's current stream on it: CuPy's own would not wait for what torch has begun."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        with library.cuda.Device(x.device.index), library.cuda.ExternalStream(stream, x.device.index):
            yield

    def pack_bits(x: Tensor) -> Tensor:
        """Pack the signs of x (R, n), see `reference.codes.pack_bits`."""
        ones = F.pad((x >= 0).to(torch.uint8), (0, -x.shape[1] % 8))
        with stream_of(x):
            packed = library.packbits(library.from_dlpack(ones.reshape(-1)), bitorder="little")
            # (R, 8 bytes) -> (R 8 bytes,) -> (R bytes,) -> (R, bytes): rows are whole bytes, so they may lie end to end
            return from_dlpack(packed).view(x.shape[0], bytes_for(x.shape[1]))

    def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Unpack n signs of each row, see `reference.codes.unpack_bits`."""
        with stream_of(bits):
            ones = from_dlpack(library.unpackbits(library.from_dlpack(bits.reshape(-1)), bitorder="little"))
        # (R 8 bytes,) -> (R, 8 bytes) -> (R, n)
        return ones.view(bits.shape[0], -1)[:, :n].to(dtype).mul_(2).sub_(1)

    return Accelerator(device_type, {"pack_bits": pack_bits, "unpack_bits": unpack_bits}, provider="cupy")


def npu(device_type: str) -> Accelerator:
    """Return the row of Ascend NPUs. Raises: ImportError where torch_npu is not installed."""
    library: Any = import_module("torch_npu")

    def pack_bits(x: Tensor) -> Tensor:
        """Pack the signs of x (R, n), see `reference.codes.pack_bits`."""
        signs = torch.where(x >= 0, 1.0, -1.0).to(torch.float32)  # -0.0 is positive on the wire
        padded = F.pad(signs, (0, -x.shape[1] % 8), value=-1.0)
        # (R, 8 bytes) -> (R 8 bytes,) -> (1, R bytes) -> (R, bytes): rows are whole bytes, so they may lie end to end
        packed: Tensor = library.npu_sign_bits_pack(padded.reshape(-1), 1)
        return packed.view(x.shape[0], padded.shape[1] // 8)

    def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Unpack n signs of each row, see `reference.codes.unpack_bits`."""
        # (R, bytes) -> (R bytes,) -> (1, R 8 bytes) -> (R, n)
        signs: Tensor = library.npu_sign_bits_unpack(bits.reshape(-1), 1, torch.float32)
        return signs.view(bits.shape[0], bits.shape[1] * 8)[:, :n].to(dtype).contiguous()

    kernels: dict[str, Kernel] = {"pack_bits": pack_bits, "unpack_bits": unpack_bits}
    return Accelerator(device_type, kernels, communication_backend="hccl", provider="torch_npu")
