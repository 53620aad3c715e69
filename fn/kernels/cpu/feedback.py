# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Momentum in signs with error feedback on a CPU, compiled by Numba: in one pass, or in two.

In two passes the codes come first, and the error when the step is written: what was encoded is then computed a second
time, by the same operations, instead of being kept. So a step that waits for other ranks holds no second error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels import reference
from fn.kernels.cpu.blocks import BlockTable, block_table, run
from fn.kernels.cpu.loops import ZERO, block_of, compiled
from fn.kernels.cpu.sign_loops import encode_block, mean_block
from fn.kernels.cpu.signs import divided, finish, messages, norms_agree, outputs, serve, sums_of
from fn.kernels.cpu.simd import LANES, below, get, get_int, load, put, put_double, select, splat, store
from fn.kernels.cpu.steps import addresses, extents, lerp_weight
from fn.kernels.memory_pool import empty
from fn.kernels.reference.layout import plain


@compiled
def padded_into(out, first, x, count, length):
    """Write `count` elements of x, from `first`, and zeros up to `length`."""
    for i in range(first, first + count):
        put(out, i, get(x, i))
    for i in range(first + count, first + length):
        put(out, i, ZERO)


@compiled
def encode_averages(
    low, high, places, table, segments, valid, n, larger_than_cache,
    mus, gs, widths, sizes, weight, buffer, sent, out, bits, squares, scratch,
):  # fmt: skip
    """Encode with feedback the moving averages of tensors, as `encode_block`; ends are padded in `scratch`."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        here = r * segments + s
        start = r * get_int(widths, s) + offset
        count = max(min(get_int(sizes, s) - start, length), 0)
        mu, g = get_int(mus, s) + 4 * (start - first), get_int(gs, s) + 4 * (start - first)
        if count < length:
            padded = scratch - 4 * first
            padded_into(padded, first, mu, count, length)
            padded_into(padded + 4 * length, first, g, count, length)
            mu, g = padded, padded + 4 * length
        row = 4 * r * n
        square = encode_block(g, mu, weight, buffer + row, out + row if out else out, bits + r * ((n + 7) // 8),
                              get(sent, here), first, length, get_int(valid, here) - offset,
                              larger_than_cache)  # fmt: skip
        put_double(squares, k, square)


@compiled
def serve_again(
    low, high, places, table, segments, valid, n, larger_than_cache,
    received, row_stride, stride, ranks, scales, buffer, sent, scratch,
):  # fmt: skip
    """Write the error of the mean of W messages, which goes place by place through `scratch`."""
    zero = splat(ZERO)
    for k in range(low, high):
        r, first, length, s, offset = block_of(k, places, table)
        here = r * segments + s
        real = get_int(valid, here) - offset
        mean, error, mine = scratch - 4 * first, buffer + 4 * r * n, get(sent, here)
        mean_block(received + r * row_stride, stride, ranks, scales + 4 * (r * ranks * segments + s), segments, mean,
                   first, length, real, False)  # fmt: skip
        up, down = splat(mine), splat(-mine)
        whole = length - length % LANES
        for i in range(first, first + whole, LANES):
            b = load(mean, i) + load(error, i)
            store(error, i, b - select(below(first + real - i), select(b >= zero, up, down), zero))
        for i in range(first + whole, first + length):
            b = get(mean, i) + get(error, i)
            put(error, i, b - (ZERO if i >= first + real else mine if b >= ZERO else -mine))


def _encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, b: Tensor | None,
    valid: Tensor, at: BlockTable,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the bits and the squares of places; write what is encoded into b, if there is one."""
    found = outputs(buffer.shape[0], at)
    small, weight = lerp_weight(decay)
    ends, weight = ((grads, mu), -weight) if small else ((mu, grads), weight)  # from one end or from the other
    tables = *map(addresses, ends), *extents(mu, at)
    outs = [0 if t is None else t.data_ptr() for t in (buffer, sent, b, *found)]
    run(encode_averages, at, valid, *(t.ctypes.data for t in tables), weight, *outs, scratch=8 * reference.NORM_BLOCK)
    return found


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.momentum_encode`."""
    at = block_table(runs)
    if not at.aligned or not plain(mu, grads, (buffer, sent)):
        return NotImplemented
    valid, b = valid.contiguous(), empty((buffer.shape[0], at.n), torch.float32)
    return (b, *finish(b, *_encode(mu, grads, decay, buffer, sent, b, valid, at), at, valid, runs))


def momentum_signs(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference.momentum_signs`."""
    at = block_table(runs)
    if not at.aligned or not plain(mu, grads, (buffer,)) or not norms_agree(at):
        return NotImplemented
    zeros = torch.zeros(valid.shape, device="cpu")
    bits, squares = _encode(mu, grads, decay, buffer, zeros, None, valid.contiguous(), at)
    return bits, sums_of(squares, runs)


def serve_signs(bits: Tensor, scales: Tensor, buffer: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.serve_signs`."""
    at, scales = block_table(runs), divided(scales)
    if not at.aligned or not plain((scales, buffer)) or not norms_agree(at):
        return NotImplemented
    mine, squares = serve(bits, scales, buffer, torch.zeros(valid.shape, device="cpu"), None, valid.contiguous(), at)
    return mine, sums_of(squares, runs)


def serve_feedback_(
    buffer: Tensor, bits: Tensor, scales: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference.serve_feedback_`."""
    at, scales = block_table(runs), divided(scales)
    if not at.aligned or not plain((buffer, scales, sent)):
        return NotImplemented
    received, row_stride, stride = messages(bits)
    message = received.data_ptr(), row_stride, stride, bits.shape[1], scales.data_ptr()
    error = buffer.data_ptr(), sent.data_ptr()
    run(serve_again, at, valid.contiguous(), *message, *error, scratch=4 * reference.NORM_BLOCK, over=True)
    return None


KERNELS = {f.__name__: f for f in (momentum_encode, momentum_signs, serve_signs, serve_feedback_)}
