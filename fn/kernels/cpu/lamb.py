# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""1-bit LAMB's steps on a CPU: one pass over moments, with sums, and one over params.

Also 0/1 Adam's drift: all are plain loops over whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fn.kernels.cpu.blocks import STEP, BlockTable, block_table, run, runs_of_tensors
from fn.kernels.cpu.intrinsics import doubles, floats, ints, magnitude, of_magnitude
from fn.kernels.cpu.loops import ZERO, block_of, compiled, limit, pad, streams, write
from fn.kernels.cpu.signs import sum_of_squares
from fn.kernels.cpu.steps import extents, larger_magnitude, onebit_piece
from fn.kernels.layout import plain
from fn.kernels.memory_pool import empty
from fn.kernels.rules import clamped, decayed, denominator, implied_gradient, kept_at_zero, lerp, second_moment
from fn.kernels.rules import drift as drift_of


@compiled()  # the implied gradient is a small difference: rounded once, it would be nobody else's
def fresh_piece(p, x, mu, nu, fresh, factor, b1, rest1, b2, rest2, eps, decay, limit, q, u, ratio, count):
    """Take the momentum, move the second moment that goes on; write q, u and the ratios of denominators."""
    param, new, m, v, f = floats(p), floats(x), floats(mu), floats(nu), floats(fresh)
    to_q, to_u, to_ratio = floats(q), floats(u), floats(ratio)
    for j in range(count):
        average = kept_at_zero(new[j] / factor, v[j], ZERO, ZERO)
        square = second_moment(f[j], implied_gradient(average, m[j], b1, rest1), b2, rest2)
        m[j], f[j] = average, square
        below = denominator(v[j], eps)
        plain_direction = clamped(average / below, limit)
        to_q[j], to_u[j] = plain_direction, decayed(plain_direction, param[j], decay)
        to_ratio[j] = below / denominator(square, eps)


@compiled()
def fresh_blocks(
    low, high, grid, ps, xs, mus, nus, freshes, shrink, b1, rest1, b2, rest2, eps, decay, limit, sums,
    scratch,
):  # fmt: skip
    """Take the momentum and move the second moment that goes on, block by block; sums (blocks, 3) float64."""
    q, u, ratio = scratch, scratch + 4 * STEP, scratch + 8 * STEP
    for k in range(low, high):
        _, _, length, s, offset = block_of(grid, k)
        factor, peak, of_q, of_u = floats(shrink)[s], magnitude(ZERO), 0.0, 0.0
        for i in range(0, length, STEP):
            at, count = 4 * (offset + i), min(STEP, length - i)
            p, x, mu, nu = ints(ps)[s] + at, ints(xs)[s] + at, ints(mus)[s] + at, ints(nus)[s] + at
            fresh = ints(freshes)[s] + at
            fresh_piece(p, x, mu, nu, fresh, factor, b1, rest1, b2, rest2, eps, decay, limit, q, u, ratio, count)
            peak = larger_magnitude(peak, ratio, count)
            of_q += sum_of_squares(floats(q), count)
            of_u += sum_of_squares(floats(u), count)
        to = doubles(sums)
        to[3 * k], to[3 * k + 1], to[3 * k + 2] = np.float64(of_magnitude(peak)), of_q, of_u


@compiled()
def step_blocks(low, high, grid, ps, mus, nus, rates, eps, decay, limit):
    """Take the step of every tensor at its own rate, block by block."""
    for k in range(low, high):
        _, _, length, s, offset = block_of(grid, k)
        descent = eps, decay, floats(rates)[s], limit
        for i in range(0, length, STEP):
            at = 4 * (offset + i)
            p, mu, nu = ints(ps)[s] + at, ints(mus)[s] + at, ints(nus)[s] + at
            onebit_piece(mu, p, nu, descent, False, min(STEP, length - i))


@compiled("contract")
def drift_piece(p, anchor, mu, g, nu, decay, eps, lr, out, count):
    """Write the drift of a piece."""
    param, a, m, x, v, to = floats(p), floats(anchor), floats(mu), floats(g), floats(nu), floats(out)
    for j in range(count):
        average = kept_at_zero(lerp(x[j], m[j], decay), v[j], ZERO, ZERO)
        to[j] = drift_of(param[j], a[j], average, v[j], eps, lr)


@compiled()
def drift_blocks(low, high, grid, ps, anchors, mus, gs, nus, widths, sizes, decay, eps, lr, out, scratch):
    """Write the drift of tensors into rows, zeros behind their ends, block by block."""
    for k in range(low, high):
        r, first, length, s, offset = block_of(grid, k)
        start, row = r * ints(widths)[s] + offset, out + 4 * (r * grid.n + first)
        have, nontemporal = ints(sizes)[s] - start, streams(grid, row)
        for i in range(0, length, STEP):
            at, count = 4 * (start + i), min(STEP, length - i)
            p, a, mu = ints(ps)[s] + at, ints(anchors)[s] + at, ints(mus)[s] + at
            g, nu = ints(gs)[s] + at, ints(nus)[s] + at
            inside = limit(have - i, count)
            drift_piece(p, a, mu, g, nu, decay, eps, lr, scratch, inside)
            pad(scratch, inside, count)
            write(row + 4 * i, scratch, count, nontemporal)


def _blocks_of(tensors: Sequence[Tensor]) -> BlockTable:
    return block_table(runs_of_tensors(tensors))


def _per_tensor(sums: Tensor, at: BlockTable) -> Tensor:
    """Return the largest number and two sums of tensors (S, 3) from those of blocks (blocks, 3)."""
    owner = torch.from_numpy(np.ascontiguousarray(at.table[:, 2]))
    # (blocks, 3) -> (S, 3)
    found = sums.new_zeros(at.segments, 3).index_add_(0, owner, sums)
    # (blocks,) -> (S,): the first column has magnitudes, of which the largest counts
    found[:, 0] = sums.new_zeros(at.segments).scatter_reduce_(0, owner, sums[:, 0], "amax")
    return found


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor],
    nu: Sequence[Tensor], fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float,
    max_step: float,
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_lamb_moments_`."""
    lists = params, averages, mu, nu, fresh
    if not plain(*lists, (scaling,)):
        return NotImplemented
    at, numbers = _blocks_of(params), map(float, (b1, 1 - b1, b2, 1 - b2, eps, weight_decay, max_step))
    sums = torch.zeros((len(at.table), 3), dtype=torch.float64, device="cpu")
    run(fresh_blocks, at, 1, *map(list, lists), scaling, *numbers, sums, scratch=12 * STEP)
    return _per_tensor(sums, at)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.steps.lamb_step_`."""
    if not plain(params, mu, nu, (rates,)):
        return NotImplemented
    numbers = map(float, (eps, weight_decay, max_step))
    run(step_blocks, _blocks_of(params), 1, [*params], [*mu], [*nu], rates, *numbers)
    return None


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.steps.drift`."""
    lists = params, anchors, mu, grads, nu
    if not plain(*lists):
        return NotImplemented
    at = block_table(runs)
    numbers, out = map(float, (decay, eps, lr)), empty((rows, at.n), torch.float32, mu[0].device)
    run(drift_blocks, at, rows, *map(list, lists), *extents(params, at), *numbers, out, scratch=4 * STEP)
    return out


KERNELS = (onebit_lamb_moments_, lamb_step_, drift)
