# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Momentum in signs with error feedback on a CPU: in one pass, or in two.

In two passes the codes come first, and the error when the step is written: what was encoded is then computed a second
time, by the same operations, instead of being kept. So a step that waits for other ranks holds no second error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.cpu.blocks import block_table, run
from fn.kernels.cpu.intrinsics import doubles, floats, ints
from fn.kernels.cpu.loops import STEP, ZERO, block_of, compiled, pad, streams, within, write
from fn.kernels.cpu.signs import SCRATCH, compensate, divided, messages, outputs, pack, serve, sums_of, unpack_mean
from fn.kernels.cpu.steps import addresses, extents, pointers
from fn.kernels.memory_pool import empty
from fn.kernels.reference.layout import plain
from fn.kernels.rules import lerp, residual


@compiled("contract")
def average(mu, g, decay, out, have, count):
    """Write the moving average, and zeros behind the end of a tensor."""
    m, x, to = floats(mu), floats(g), floats(out)
    for j in range(have):
        to[j] = lerp(x[j], m[j], decay)
    pad(out, have, count)


@compiled()
def encode_averages(
    low, high, grid, mus, gs, widths, sizes, decay, buffer, sent, out, bits, squares, scratch
):
    """Encode with feedback the moving averages of tensors, as `signs.encode_blocks`. out can be 0."""
    b = scratch + 4 * STEP
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        here, start, total = r * grid.segments + s, r * ints(widths)[s] + offset, 0.0
        real, scale, have = ints(grid.valid)[here] - offset, floats(sent)[here], ints(sizes)[s] - start
        mu, g, row = ints(mus)[s] + 4 * start, ints(gs)[s] + 4 * start, 4 * (r * grid.n + first)
        to, nontemporal = bits + r * ((grid.n + 7) // 8) + first // 8, streams(grid, out + row)
        for i in range(0, length, STEP):
            at, count = 4 * i, min(STEP, length - i)
            inside = within(real - i, count)
            average(mu + at, g + at, decay, scratch, within(have - i, count), count)
            compensate(scratch, buffer + row + at, scale, b, inside, count)
            if out:
                write(out + row + at, b, count, nontemporal)
            total += pack(b, to + i // 8, inside, count, mu + at, g + at)
        doubles(squares)[k] = total


@compiled()
def keep_error_of_mean(mean, error, scale, real, count):
    """Write over an error the next one."""
    x, e = floats(mean), floats(error)
    for j in range(real):
        e[j] = residual(x[j] + e[j], scale, ZERO)
    for j in range(real, count):
        e[j] = x[j] + e[j]


@compiled()
def serve_again(low, high, grid, received, row_stride, stride, ranks, scales, buffer, sent, scratch):
    """Write the error of the mean of W messages."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        here, row = r * grid.segments + s, 4 * (r * grid.n + first)
        real, scale = ints(grid.valid)[here] - offset, floats(sent)[here]
        theirs, factors = received + r * row_stride, scales + 4 * (r * ranks * grid.segments + s)
        for i in range(0, length, STEP):
            count = min(STEP, length - i)
            inside = within(real - i, count)
            error, at = buffer + row + 4 * i, theirs + (first + i) // 8
            unpack_mean(at, stride, ranks, factors, grid.segments, scratch, inside, count, error, error)
            keep_error_of_mean(scratch, error, scale, inside, count)


def _encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, b: Tensor | None,
    valid: Tensor, runs: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the bits and the sums; write what is encoded into b, if there is one."""
    at = block_table(runs)
    bits, squares = outputs(buffer.shape[0], at)
    tables = *addresses(mu, grads), *extents(mu, at)
    outs = [0 if t is None else t.data_ptr() for t in (buffer, sent, b, bits, squares)]
    run(encode_averages, at, valid.contiguous(), *pointers(tables), np.float32(decay), *outs, scratch=SCRATCH)
    return bits, sums_of(squares, runs)


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.momentum_encode`."""
    at = block_table(runs)
    if not at.aligned or not plain(mu, grads, (buffer, sent)):
        return NotImplemented
    b = empty((buffer.shape[0], at.n), torch.float32)
    return (b, *_encode(mu, grads, decay, buffer, sent, b, valid, runs))


def momentum_signs(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference.momentum_signs`."""
    if not block_table(runs).aligned or not plain(mu, grads, (buffer,)):
        return NotImplemented
    return _encode(mu, grads, decay, buffer, torch.zeros(valid.shape, device="cpu"), None, valid, runs)


def serve_signs(bits: Tensor, scales: Tensor, buffer: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.serve_signs`."""
    if not block_table(runs).aligned or not plain((scales, buffer)):
        return NotImplemented
    return serve(bits, divided(scales), buffer, torch.zeros(valid.shape, device="cpu"), None, valid, runs)


def serve_feedback_(
    buffer: Tensor, bits: Tensor, scales: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference.serve_feedback_`."""
    at = block_table(runs)
    if not at.aligned or not plain((buffer, scales, sent)):
        return NotImplemented
    kept, message = messages(bits, divided(scales))
    run(serve_again, at, valid.contiguous(), *message, buffer.data_ptr(), sent.data_ptr(), scratch=SCRATCH, over=True)
    del kept
    return None


KERNELS = {f.__name__: f for f in (momentum_encode, momentum_signs, serve_signs, serve_feedback_)}
