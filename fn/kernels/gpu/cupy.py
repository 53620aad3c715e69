"""The CuPy row for CUDA: packed bits by `cupy.packbits`, and raw kernels that are fused with the feedback.

Arrays are exchanged by DLPack, without copies, and everything runs on torch's current stream. Without a GPU `import
cupy` succeeds and every operation raises; the table finds out by the known answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import cupy
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fn.kernels.cpu.blocks import BlockTable, add_up, block_table
from fn.kernels.gpu.cupy_kernels import SOURCE
from fn.kernels.reference import bytes_for
from fn.kernels.table import Accelerator
from fn.kernels.tracing import PLANS

THREADS = 256


@contextmanager
def _stream(x: Tensor) -> Iterator[None]:
    """Enter x's device and torch's current stream on it."""
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with cupy.cuda.Device(x.device.index), cupy.cuda.ExternalStream(stream, x.device.index):
        yield


def pack_bits(x: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    n = x.shape[1]
    ones = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -n % 8))
    with _stream(x):
        packed = cupy.packbits(cupy.from_dlpack(ones.reshape(-1)), bitorder="little")
        return from_dlpack(packed).view(x.shape[0], bytes_for(n))


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """See `reference.unpack_bits`."""
    with _stream(bits):
        ones = from_dlpack(cupy.unpackbits(cupy.from_dlpack(bits.reshape(-1)), bitorder="little"))
    return ones.view(bits.shape[0], -1)[:, :n].to(dtype).mul_(2).sub_(1)


@lru_cache(maxsize=1)
def _module() -> Any:
    return cupy.RawModule(code=SOURCE, options=("--fmad=false",))


@lru_cache(maxsize=PLANS)
def _cut(runs: tuple[int, ...], device: torch.device) -> tuple[BlockTable, Tensor]:
    at = block_table(runs)
    return at, torch.from_numpy(at.table).to(device)


def _launch(name: str, at: BlockTable, table: Tensor, valid: Tensor, *args: Tensor | int) -> None:
    """Run a kernel, a block of threads for every block of the table; tensors are handed over as addresses."""
    valid = valid.contiguous()
    blocks = valid.shape[0] * len(at.table)
    if blocks:
        common = (table, valid, at.n, len(at.table), at.segments)
        values = [cupy.int64(a.data_ptr() if isinstance(a, Tensor) else a) for a in (*common, *args)]
        with _stream(valid):
            _module().get_function(name)((blocks,), (THREADS,), tuple(values))


def sign_encode_feedback(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode_feedback`."""
    return _encode(x, buffer, sent, valid, runs, None)


def sign_encode_feedback_(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode_feedback_`. A thread reads its elements before it writes them."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        return NotImplemented
    found = _encode(x, buffer, sent, valid, runs, x)
    return found if found is NotImplemented else found[1:]


def _encode(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], out: Tensor | None
) -> Any:
    at, table = _cut(tuple(runs), x.device)
    if not at.aligned or any(t.dtype == torch.float64 for t in (x, buffer, sent)):
        return NotImplemented
    inputs = [t.to(torch.float32).contiguous() for t in (x, buffer, sent)]
    out = torch.empty_like(inputs[1]) if out is None else out
    bits = x.new_empty((x.shape[0], bytes_for(at.n)), dtype=torch.uint8)
    squares = torch.empty((x.shape[0], len(at.table)), dtype=torch.float64, device=x.device)
    _launch("encode", at, table, valid, *inputs, out, bits, squares)
    return out, bits, add_up(squares, runs)


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_residual`."""
    return _residual(b, scales, valid, runs, torch.empty(b.shape, dtype=torch.float32, device=b.device))


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_residual_`."""
    found = _residual(b, scales, valid, runs, b) if b.is_contiguous() else NotImplemented
    return found if found is NotImplemented else None


def _residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], out: Tensor) -> Any:
    at, table = _cut(tuple(runs), b.device)
    if b.dtype != torch.float32 or scales.dtype != torch.float32:
        return NotImplemented
    _launch("residual", at, table, valid, b.contiguous(), scales.contiguous(), out)
    return out


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode_mean`."""
    return _decode(bits, scales * (1.0 / bits.shape[1]), valid, runs)


def sign_decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode`."""
    return _decode(bits[:, None], scales[:, None], valid, runs)


def _decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    at, table = _cut(tuple(runs), bits.device)
    if scales.dtype != torch.float32:
        return NotImplemented
    bits, scales = bits.contiguous(), scales.contiguous()
    out = torch.empty((bits.shape[0], at.n), dtype=torch.float32, device=bits.device)
    _launch("decode", at, table, valid, bits, scales, bits.shape[1], bits.shape[2], out)
    return out


def row(device_type: str) -> Accelerator:
    """Return the row."""
    found = (pack_bits, unpack_bits, sign_encode_feedback, sign_encode_feedback_, sign_residual, sign_residual_,
             sign_decode, sign_decode_mean)  # fmt: skip
    return Accelerator(device_type, {f.__name__: f for f in found}, provider="cupy")
