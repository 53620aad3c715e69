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
from fn.kernels.layout import bytes_for
from fn.kernels.table import Accelerator
from fn.kernels.tracing import PLANS

THREADS = 256
"""Of a block of at most 4096 elements, see `cpu.blocks`."""

SOURCE = r"""
typedef long long ll;

struct Block { ll row, first, length, segment, real; };

__device__ Block block_of(const ll* table, const ll* valid, ll blocks, ll segments) {
    ll r = blockIdx.x / blocks;
    const ll* entry = table + 4 * (blockIdx.x % blocks);
    return {r, entry[0], entry[1], entry[2], valid[r * segments + entry[2]] - entry[3]};
}

// CuPy compiles with -ftz=true, whatever it is told: to operators and comparisons a number below 2**-126 is zero, so
// that -1e-40 >= 0. Here bits tell the sign, and PTX adds.
__device__ float plus(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

__device__ float minus(float a, float b) {
    float rest;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(rest) : "f"(a), "f"(b));
    return rest;
}

// b >= 0: up to infinity, behind which NaN comes, or the zero with a sign
__device__ bool is_plus(float b) {
    unsigned bits = __float_as_uint(b);
    return bits <= 0x7f800000u || bits == 0x80000000u;
}

// b - scale * sgn(b), and b itself where it is not real
__device__ float left_over(float b, float scale, bool real) {
    if (!real) return b;
    return is_plus(b) ? minus(b, scale) : plus(b, scale);
}

extern "C" __global__ void encode(const ll* table, const ll* valid, ll n, ll blocks, ll segments, const float* x,
                                  const float* buffer, const float* sent, float* out, unsigned char* bits,
                                  double* squares) {
    Block block = block_of(table, valid, blocks, segments);
    float scale = sent[block.row * segments + block.segment];
    float sum = 0.0f;
    // every thread takes every turn, also behind the end: __ballot_sync waits for all 32 of a warp
    for (ll base = 0; base < block.length; base += blockDim.x) {
        ll i = base + threadIdx.x, k = block.row * n + block.first + i;
        bool inside = i < block.length, real = i < block.real && inside;
        float b = 0.0f;
        if (inside) {
            b = plus(x[k], left_over(buffer[k], scale, real));
            out[k] = b;
        }
        unsigned ones = __ballot_sync(0xffffffffu, real && is_plus(b));
        if (inside && i % 8 == 0)  // a block begins with a byte, so that no byte is shared by two warps
            bits[block.row * ((n + 7) / 8) + (block.first + i) / 8] = (unsigned char)(ones >> (threadIdx.x % 32));
        if (real) sum += b * b;
    }
    __shared__ double parts[256];
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();  // outside of the `if`: all threads must come here before the next round reads these sums
    }
    if (threadIdx.x == 0) squares[blockIdx.x] = parts[0];
}

extern "C" __global__ void residual(const ll* table, const ll* valid, ll n, ll blocks, ll segments, const float* b,
                                    const float* scales, float* out) {
    Block block = block_of(table, valid, blocks, segments);
    float scale = scales[block.row * segments + block.segment];
    for (ll i = threadIdx.x; i < block.length; i += blockDim.x) {
        ll k = block.row * n + block.first + i;
        out[k] = left_over(b[k], scale, i < block.real);
    }
}

extern "C" __global__ void decode(const ll* table, const ll* valid, ll n, ll blocks, ll segments,
                                  const unsigned char* bits, const float* scales, ll ranks, ll bytes, float* out) {
    Block block = block_of(table, valid, blocks, segments);
    for (ll i = threadIdx.x; i < block.length; i += blockDim.x) {
        ll k = block.first + i;
        float total = 0.0f;
        for (ll w = 0; w < ranks; ++w) {
            ll message = block.row * ranks + w;
            float scale = scales[message * segments + block.segment];
            float value = (bits[message * bytes + k / 8] >> (k % 8)) & 1 ? scale : -scale;
            total = w == 0 ? value : total + value;
        }
        out[block.row * n + k] = i < block.real ? total : 0.0f;
    }
}
"""


@contextmanager
def _stream(x: Tensor) -> Iterator[None]:
    """Enter x's device and torch's current stream on it: CuPy's own would not wait for what torch has begun."""
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with cupy.cuda.Device(x.device.index), cupy.cuda.ExternalStream(stream, x.device.index):
        yield


def pack_bits(x: Tensor) -> Tensor:
    """See `reference.codes.pack_bits`."""
    n = x.shape[1]
    ones = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -n % 8))
    with _stream(x):
        packed = cupy.packbits(cupy.from_dlpack(ones.reshape(-1)), bitorder="little")
        # (R, 8 bytes) -> (R 8 bytes,) -> (R bytes,) -> (R, bytes): rows are whole bytes, so they may lie end to end
        return from_dlpack(packed).view(x.shape[0], bytes_for(n))


def unpack_bits(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """See `reference.codes.unpack_bits`."""
    with _stream(bits):
        ones = from_dlpack(cupy.unpackbits(cupy.from_dlpack(bits.reshape(-1)), bitorder="little"))
    # (R 8 bytes,) -> (R, 8 bytes) -> (R, n)
    return ones.view(bits.shape[0], -1)[:, :n].to(dtype).mul_(2).sub_(1)


@lru_cache(maxsize=1)
def _module() -> Any:
    # a product and a sum are rounded one by one, as in the reference
    return cupy.RawModule(code=SOURCE, options=("--fmad=false",))


@lru_cache(maxsize=PLANS)
def _cut(runs: tuple[int, ...], device: torch.device) -> tuple[BlockTable, Tensor]:
    row = block_table(runs)
    return row, torch.from_numpy(row.table).to(device)


def _launch(name: str, row: BlockTable, table: Tensor, valid: Tensor, *args: Tensor | int) -> None:
    """Run a kernel, a block of threads for every block of the table; tensors are handed over as addresses."""
    valid = valid.contiguous()
    blocks = valid.shape[0] * len(row.table)
    if blocks:
        common = (table, valid, row.n, len(row.table), row.segments)
        values = [cupy.int64(a.data_ptr() if isinstance(a, Tensor) else a) for a in (*common, *args)]
        with _stream(valid):
            _module().get_function(name)((blocks,), (THREADS,), tuple(values))


def sign_encode_feedback(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_encode_feedback`."""
    return _encode(x, buffer, sent, valid, runs, None)


def sign_encode_feedback_(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_encode_feedback_`. A thread reads its elements before it writes them."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        return NotImplemented
    encoded = _encode(x, buffer, sent, valid, runs, x)
    return encoded if encoded is NotImplemented else encoded[1:]


def _encode(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int], out: Tensor | None) -> Any:
    row, table = _cut(tuple(runs), x.device)
    if not row.aligned or any(t.dtype == torch.float64 for t in (x, buffer, sent)):
        return NotImplemented
    inputs = [t.to(torch.float32).contiguous() for t in (x, buffer, sent)]
    out = torch.empty_like(inputs[1]) if out is None else out
    bits = x.new_empty((x.shape[0], bytes_for(row.n)), dtype=torch.uint8)
    squares = torch.empty((x.shape[0], len(row.table)), dtype=torch.float64, device=x.device)
    _launch("encode", row, table, valid, *inputs, out, bits, squares)
    return out, bits, add_up(squares, runs)


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_residual`."""
    return _residual(b, scales, valid, runs, torch.empty(b.shape, dtype=torch.float32, device=b.device))


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_residual_`."""
    done = _residual(b, scales, valid, runs, b) if b.is_contiguous() else NotImplemented
    return done if done is NotImplemented else None


def _residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], out: Tensor) -> Any:
    row, table = _cut(tuple(runs), b.device)
    if b.dtype != torch.float32 or scales.dtype != torch.float32:
        return NotImplemented
    _launch("residual", row, table, valid, b.contiguous(), scales.contiguous(), out)
    return out


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.codes.sign_decode_mean`."""
    row, table = _cut(tuple(runs), bits.device)
    if scales.dtype != torch.float32:
        return NotImplemented
    bits, scales = bits.contiguous(), scales * (1.0 / bits.shape[1])
    out = torch.empty((bits.shape[0], row.n), dtype=torch.float32, device=bits.device)
    _launch("decode", row, table, valid, bits, scales.contiguous(), bits.shape[1], bits.shape[2], out)
    return out


def row(device_type: str) -> Accelerator:
    """Return the row."""
    kernels = (pack_bits, unpack_bits, sign_encode_feedback, sign_encode_feedback_, sign_residual, sign_residual_,
               sign_decode_mean)  # fmt: skip
    return Accelerator(device_type, {f.__name__: f for f in kernels}, provider="cupy")
