# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the kernels of the Triton row have in common: blocks of rows, vectors of elements, bits of signs.

A program works on one block of one row, at most BLOCK elements that do not cross segments: an entry (first element,
length, segment, offset in the segment) of an int64 table, see `cpu.blocks`. In a row of a message s is a tensor's
segment, and the block is also one of that tensor.

Loads are vectors only where Triton knows that addresses are multiples of 16, which ALIGNED says of all of them, and
that no element is left out. So a kernel has two versions of its work: FULL, for whole blocks, and one for ends.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fn.kernels.gpu.triton_rules import signed

jit: Any = triton.jit

SIZES = ("n", "blocks", "segments", "width", "ranks", "total", "rows", "down", "right")
"""Arguments that Triton does not compile anew for."""


def kernel(f: Any) -> Any:
    """Compile a kernel once for all sizes."""
    return jit(f, do_not_specialize=[name for name in SIZES if name in f.__code__.co_varnames])


@jit
def block_of(table, n, blocks, ALIGNED: tl.constexpr):
    """Return a program's row, first element, place in all rows, length, segment, and offset in that."""
    k = tl.program_id(0).to(tl.int64)
    r = k // blocks
    entry = table + 4 * (k - r * blocks)
    first = tl.load(entry)
    place, offset = r * n + first, tl.load(entry + 3)
    if ALIGNED:
        place, offset = tl.multiple_of(place, 8), tl.multiple_of(offset, 8)
    return r, first, place, tl.load(entry + 1), tl.load(entry + 2), offset


@jit
def pointer(addresses, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to an element of a tensor, whose address is in memory."""
    x = tl.load(addresses).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x + start


@jit
def piece_of(sizes, r, offset, length, ALIGNED: tl.constexpr):
    """Return where a block of row r begins in its tensor, and how many of its elements are there.

    sizes: where the table of addresses has the tensor's elements, and behind them the width of its pieces.
    """
    start = r * tl.load(sizes + 1) + offset
    if ALIGNED:  # said where the number is made: nobody hears it of an argument
        start = tl.multiple_of(start, 8)
    return start, tl.minimum(tl.load(sizes) - start, length)


@jit
def octets(BLOCK: tl.constexpr):
    """Return the elements of a block as (BLOCK / 8, 8): a row is a byte of signs."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@jit
def load(x, i, length, FULL: tl.constexpr):
    """Return elements as float32, zero behind the end."""
    found = tl.load(x + i) if FULL else tl.load(x + i, mask=i < length, other=0.0)
    return found.to(tl.float32)


@jit
def store(x, i, value, length, FULL: tl.constexpr):
    """Write elements, rounded to the dtype of x."""
    value = value.to(x.dtype.element_ty)
    if FULL:
        tl.store(x + i, value)
    else:
        tl.store(x + i, value, mask=i < length)


@jit
def write_codes(b, i, length, real, bits, squares, BLOCK: tl.constexpr):
    """Write the bits of a block and the square of its norm, in which only real elements count."""
    counts = (i < real) & (i < length)
    ones = ((b >= 0) & counts).to(tl.int32) << tl.arange(0, 8)[None, :]
    j = tl.arange(0, BLOCK // 8)
    tl.store(bits + j, tl.sum(ones, axis=1).to(tl.uint8), mask=8 * j < length)
    b = tl.where(counts, b, 0.0)
    tl.store(squares + tl.program_id(0), tl.sum(b * b).to(tl.float64))


@jit
def mean_of(bits, scales, width, ranks, segments, share, i, length, real, BLOCK: tl.constexpr):
    """Return share times the sum over the ranks of scale * sign, zero behind the real elements.

    bits, scales: of the first rank; those of the next are `width` bytes and `segments` numbers on.
    """
    j, k = tl.arange(0, BLOCK // 8), tl.arange(0, 8)
    total = tl.zeros((BLOCK // 8, 8), tl.float32)
    for w in range(ranks):
        byte = tl.load(bits + j, mask=8 * j < length, other=0).to(tl.int32)
        one = signed(((byte[:, None] >> k[None, :]) & 1) - 1, tl.load(scales) * share, 0)
        total = tl.where(w == 0, one, total + one)
        bits += width
        scales += segments
    return tl.where(i < real, total, 0.0)


@jit
def peak_of(x):
    """Return the largest magnitude, as an integer, of which that of a NaN is the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
