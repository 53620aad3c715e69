# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The steps of Adam and 1-bit Adam on a CPU, codes of averages, and largest magnitudes. Loops first, then the cells.

The loops see a table of addresses per list of tensors: a block is one of a tensor, and of one row of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fn.kernels.cpu.blocks import STEP, BlockTable, block_table, has_loops_for, run, runs_of_tensors, scales_of
from fn.kernels.cpu.intrinsics import floats, ints, magnitude, of_magnitude
from fn.kernels.cpu.loops import SMALLEST, ZERO, block_of, compiled, limit, scale_of, streams, write
from fn.kernels.cpu.signs import divided, encode, messages, unpack_mean
from fn.kernels.layout import plain
from fn.kernels.memory_pool import empty
from fn.kernels.rules import adamw, kept_at_zero, lerp, second_moment

LARGE_BLOCK = 1 << 16
"""Elements of a block where no squares are added."""


@compiled("contract")
def next_momentum(m, g, b1):
    """Return the next momentum, zero where it is not normal.

    Where gradients stay zero, as those of rare words do, a momentum would otherwise come to rest at 5.6e-45, and some
    processors take many times as long for such numbers.
    """
    m = lerp(g, m, b1)
    return ZERO if abs(m) < SMALLEST else m


@compiled("contract")
def onebit_piece(mean, p, nu, descent, keep_zeros, count):
    """Take AdamW's step with a momentum, which is masked in place."""
    m, param, v = floats(mean), floats(p), floats(nu)
    for j in range(count):
        if keep_zeros:
            m[j] = kept_at_zero(m[j], v[j], ZERO, ZERO)
        param[j] = adamw(param[j], m[j], v[j], *descent)


@compiled()
def onebit_blocks(
    low, high, grid, ps, mus, nus, widths, sizes, copies, received, row_stride, stride, ranks, scales, descent,
    keep_zeros, scratch,
):  # fmt: skip
    """Decode the mean momentum of W messages and take 1-bit Adam's step with it. copies can be 0."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        start = r * ints(widths)[s] + offset
        have = limit(ints(sizes)[s] - start, length)
        p, nu = ints(ps)[s] + 4 * start, ints(nus)[s] + 4 * start
        mu = ints(mus)[s] + 4 * start
        theirs, too = received + r * row_stride, ints(copies)[s] + 4 * start if copies else 0
        for i in range(0, have, grid.step):
            at, count, own = 4 * i, min(grid.step, have - i), scale_of(grid, s, offset + i)
            factors = scales + 4 * (r * ranks * grid.scales + own)
            unpack_mean(theirs + (first + i) // 8, stride, ranks, factors, grid.scales, scratch, count, count)
            onebit_piece(scratch, p + at, nu + at, descent, keep_zeros, count)
            write(mu + at, scratch, count, streams(grid, mu))
            if too:
                write(too + at, p + at, count, streams(grid, too))


@compiled("contract")
def adamw_piece(p, g, mu, nu, b1, b2, rest2, descent, frozen, count):
    """Take AdamW's step."""
    param, x, m, v = floats(p), floats(g), floats(mu), floats(nu)
    if frozen:
        for j in range(count):
            new = kept_at_zero(next_momentum(m[j], x[j], b1), v[j], ZERO, ZERO)
            m[j] = new
            param[j] = adamw(param[j], new, v[j], *descent)
    else:
        for j in range(count):
            new, square = next_momentum(m[j], x[j], b1), second_moment(v[j], x[j], b2, rest2)
            m[j], v[j] = new, square
            param[j] = adamw(param[j], new, square, *descent)


@compiled()
def adamw_blocks(low, high, grid, ps, gs, mus, nus, b1, b2, rest2, descent, frozen):
    """Take AdamW's step, block by block."""
    for k in range(low, high):
        _, _, length, s, offset = block_of(grid, k)
        p, g, mu, nu = ints(ps)[s], ints(gs)[s], ints(mus)[s], ints(nus)[s]
        for i in range(0, length, STEP):
            at, count = 4 * (offset + i), min(STEP, length - i)
            if frozen and g == mu:  # one address given twice keeps a loop from lanes
                onebit_piece(mu + at, p + at, nu + at, descent, True, count)
            else:
                adamw_piece(p + at, g + at, mu + at, nu + at, b1, b2, rest2, descent, frozen, count)


@compiled()
def larger_magnitude(peak, x, count):
    """Return the larger of a peak and the largest magnitude of a piece, as integers."""
    values = floats(x)
    for j in range(count):
        peak = max(peak, magnitude(values[j]))
    return peak


@compiled()
def mean_of_rows(rows, count_of_rows, share, at, out, count):
    """Write the mean of several tensors."""
    to, first = floats(out), floats(ints(rows)[0] + at)
    for j in range(count):
        to[j] = first[j]
    for r in range(1, count_of_rows):
        x = floats(ints(rows)[r] + at)
        for j in range(count):
            to[j] += x[j]
    for j in range(count):
        to[j] *= share


@compiled()
def adamw_into_blocks(
    low, high, grid, news, rows, count_of_rows, share, olds, peaks, b1, b2, rest2, descent, frozen, scratch
):
    """Take AdamW's step with the mean of gradients, elsewhere; note the largest magnitudes of mean and params."""
    # Results are formed over copies in the scratch, from where `write` may send them past the cache.
    here, here_mu, here_nu = scratch + 4 * STEP, scratch + 8 * STEP, scratch + 12 * STEP
    for k in range(low, high):
        _, first, length, _, _ = block_of(grid, k)
        p, mu, nu = ints(olds)[0], ints(olds)[1], ints(olds)[2]
        to, to_mu, to_nu = ints(news)[0], ints(news)[1], ints(news)[1 if frozen else 2]
        nontemporal = streams(grid, to | to_mu | to_nu)
        of_mean = of_param = magnitude(ZERO)
        for i in range(first, first + length, STEP):
            at, count = 4 * i, min(STEP, first + length - i)
            g = ints(rows)[0] + at
            if count_of_rows > 1:
                # One gradient is read where it lies: a mean of one would be a copy of it.
                mean_of_rows(rows, count_of_rows, share, at, scratch, count)
                g = scratch
            write(here, p + at, count, False)
            write(here_mu, mu + at, count, False)
            write(here_nu, nu + at, count, False)
            adamw_piece(here, g, here_mu, here_nu, b1, b2, rest2, descent, frozen, count)
            of_mean, of_param = larger_magnitude(of_mean, g, count), larger_magnitude(of_param, here, count)
            write(to + at, here, count, nontemporal)
            write(to_mu + at, here_mu, count, nontemporal)
            if not frozen:
                write(to_nu + at, here_nu, count, nontemporal)
        floats(peaks)[2 * k], floats(peaks)[2 * k + 1] = of_magnitude(of_mean), of_magnitude(of_param)


@compiled()
def magnitude_blocks(low, high, grid, xs, peaks):
    """Note the largest magnitude of every block."""
    for k in range(low, high):
        _, _, length, s, offset = block_of(grid, k)
        x, peak = ints(xs)[s] + 4 * offset, magnitude(ZERO)
        for i in range(0, length, STEP):
            peak = larger_magnitude(peak, x + 4 * i, min(STEP, length - i))
        floats(peaks)[k] = of_magnitude(peak)


def extents(tensors: Sequence[Tensor], at: BlockTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the widths of the segments and the sizes of the tensors, which can end before the valid elements do."""
    return at.widths, np.fromiter(map(Tensor.numel, tensors), np.int64, len(tensors))


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int], block: int,
) -> Any:  # fmt: skip
    """See `reference.steps.momentum_encode`."""
    at = block_table(runs)
    if not at.aligned or not has_loops_for(block) or not plain(mu, grads, (buffer, sent)):
        return NotImplemented
    b, averages = empty(buffer.shape, torch.float32, buffer.device), ([*mu], [*grads], *extents(mu, at), float(decay))
    return (b, *encode(buffer.shape[0], valid, runs, block, (buffer, sent), b, averages=averages))


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], block: int, eps: float, weight_decay: float, lr: float, max_step: float, keep_zeros: bool,
    copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_adam_`."""
    at = block_table(runs)
    if not at.aligned or not has_loops_for(block) or not plain(params, mu, nu, copies, (scales,)):
        return NotImplemented
    descent = (*map(float, (eps, weight_decay, lr, max_step)),)
    run(onebit_blocks, at, valid, [*params], [*mu], [*nu], *extents(params, at), [*copies] or None,
        *messages(bits, divided(scales)), descent, keep_zeros, scratch=4 * STEP,
        scales=scales_of(tuple(runs), block))  # fmt: skip
    return None


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.steps.adamw_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    at, descent = block_table(runs_of_tensors(params), LARGE_BLOCK), (*map(float, (eps, weight_decay, lr, max_step)),)
    run(adamw_blocks, at, 1, [*params], [*grads], [*mu], [*nu], float(b1), float(b2), float(1 - b2), descent,
        frozen)  # fmt: skip
    return None


def adamw_into_(
    new: Sequence[Tensor], rows: Sequence[Tensor], old: Sequence[Tensor], b1: float, b2: float, eps: float,
    weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.steps.adamw_into_`."""
    if not plain(new, rows, old):
        return NotImplemented
    at = block_table([1, new[0].numel()], LARGE_BLOCK)
    # (blocks, 2) -> (2,); `amax` refuses a dimension without elements
    peaks = torch.zeros((max(1, len(at.table)), 2), dtype=torch.float32, device="cpu")
    descent = (*map(float, (eps, weight_decay, lr, max_step)),)
    run(adamw_into_blocks, at, 1, [*new], [*rows], len(rows), 1.0 / len(rows), [*old], peaks, float(b1), float(b2),
        float(1 - b2), descent, frozen, scratch=16 * STEP)  # fmt: skip
    return peaks.amax(0)


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference.lists.largest_magnitude`."""
    if not grads or not plain(grads):
        return NotImplemented
    at = block_table(runs_of_tensors(grads), LARGE_BLOCK)
    # (blocks,) -> 0-d
    peaks = torch.zeros(max(1, len(at.table)), dtype=torch.float32, device="cpu")
    run(magnitude_blocks, at, 1, [*grads], peaks)
    return peaks.amax()


KERNELS = (momentum_encode, onebit_adam_, adamw_, adamw_into_, largest_magnitude)
