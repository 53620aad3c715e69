# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The kernel of the Triton row that adds up what blocks have found."""

from __future__ import annotations

import triton.language as tl

from fn.kernels.gpu.triton_tiles import kernel


@kernel
def add_up(parts, ends, sums, blocks, segments, down, right, PEAKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sums (R, S) of parts (R, blocks) in float64; of the first row, if it has peaks, the largest parts.

    down, right: the strides of the sums.
    """
    k = tl.program_id(0).to(tl.int64)
    r = k // segments
    s = k - r * segments
    end = tl.load(ends + s + 1)
    total, peak = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int64)
    for first in range(tl.load(ends + s), end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        part = tl.load(parts + r * blocks + i, mask=i < end, other=0.0)
        total += part
        if PEAKS:  # as integers, of which a NaN is the largest
            peak = tl.maximum(peak, part.to(tl.int64, bitcast=True))
    found = tl.sum(total)
    if PEAKS:
        found = tl.where(r == 0, tl.max(peak).to(tl.float64, bitcast=True), found)
    tl.store(sums + r * down + s * right, found)
