# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The sign kernels in Triton's language, for CUDA, ROCm and XPU; `triton` launches them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fn.kernels.gpu.triton_rules import compensated, residual
from fn.kernels.gpu.triton_tiles import block_of, kernel, load, mean_of, octets, store, write_codes

jit: Any = triton.jit


@jit
def encode_block(x, buffer, sent, out, bits, squares, length, real, FEEDBACK: tl.constexpr, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Add the error to x, and encode."""
    i = octets(BLOCK)
    b = load(x, i, length, FULL)
    if FEEDBACK:
        old = load(buffer, i, length, FULL)
        b = tl.where(i < real, compensated(b, old, tl.load(sent), 0.0), b + old)
        store(out, i, b, length, FULL)
    write_codes(b, i, length, real, bits, squares, BLOCK)


@kernel
def encode(x, buffer, sent, out, bits, squares, table, valid, n, blocks, segments, FEEDBACK: tl.constexpr,
           ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode x (R, n), with feedback if so wanted."""
    r, first, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    here = r * segments + s
    real = tl.load(valid + here) - offset
    to = bits + r * ((n + 7) // 8) + first // 8
    if length == BLOCK:
        encode_block(x + place, buffer + place, sent + here, out + place, to, squares, length, real, FEEDBACK, True,
                     BLOCK)  # fmt: skip
    else:
        encode_block(x + place, buffer + place, sent + here, out + place, to, squares, length, real, FEEDBACK, False,
                     BLOCK)  # fmt: skip


@jit
def decode_block(bits, scales, width, ranks, segments, share, out, length, real, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean."""
    i = octets(BLOCK)
    store(out, i, mean_of(bits, scales, width, ranks, segments, share, i, length, real, BLOCK), length, FULL)


@kernel
def decode(bits, scales, out, table, valid, n, blocks, segments, width, ranks, share, ALIGNED: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Write share times the sum over the ranks of scale * sign; bits (R, W, .), scales (R, W, S)."""
    r, first, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    real = tl.load(valid + r * segments + s) - offset
    bits += r * ranks * width + first // 8
    scales += r * ranks * segments + s
    if length == BLOCK:
        decode_block(bits, scales, width, ranks, segments, share, out + place, length, real, True, BLOCK)
    else:
        decode_block(bits, scales, width, ranks, segments, share, out + place, length, real, False, BLOCK)


@jit
def serve_block(received, scales, width, ranks, segments, share, buffer, sent, out, bits, squares, length, real,
                FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode the mean plus the error."""
    i = octets(BLOCK)
    x = mean_of(received, scales, width, ranks, segments, share, i, length, real, BLOCK)
    old = load(buffer, i, length, FULL)
    b = tl.where(i < real, compensated(x, old, tl.load(sent), 0.0), x + old)
    store(out, i, b, length, FULL)
    write_codes(b, i, length, real, bits, squares, BLOCK)


@kernel
def serve(received, scales, buffer, sent, out, bits, squares, table, valid, n, blocks, segments, width, ranks, share,
          ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode the mean of W messages plus an error: what is left of a buffer that was sent."""
    r, first, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    here = r * segments + s
    real = tl.load(valid + here) - offset
    received += r * ranks * width + first // 8
    scales += r * ranks * segments + s
    to = bits + r * ((n + 7) // 8) + first // 8
    if length == BLOCK:
        serve_block(received, scales, width, ranks, segments, share, buffer + place, sent + here, out + place, to,
                    squares, length, real, True, BLOCK)  # fmt: skip
    else:
        serve_block(received, scales, width, ranks, segments, share, buffer + place, sent + here, out + place, to,
                    squares, length, real, False, BLOCK)  # fmt: skip


@jit
def residual_block(b, scale, out, length, real, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write what was not delivered."""
    i = tl.arange(0, BLOCK)
    x = load(b, i, length, FULL)
    store(out, i, tl.where(i < real, residual(x, tl.load(scale), 0.0), x), length, FULL)


@kernel
def leave(b, scales, out, table, valid, n, blocks, segments, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write b - scale sgn b for b (R, n)."""
    r, _, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    here = r * segments + s
    real = tl.load(valid + here) - offset
    if length == BLOCK:
        residual_block(b + place, scales + here, out + place, length, real, True, BLOCK)
    else:
        residual_block(b + place, scales + here, out + place, length, real, False, BLOCK)
