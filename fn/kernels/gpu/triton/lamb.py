# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""1-bit LAMB's steps, and 0/1 Adam's drift, in the Triton row: one launch for all tensors of a list.

Tables of addresses and dtypes are as in `steps`. Sums are (3, blocks): a row for each of them. The kernels come first,
then the functions of the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fn.kernels.gpu.triton.blocks import (
    Cut,
    add_up_columns,
    block_of,
    floats,
    jit,
    kernel,
    launch,
    lists_of,
    load,
    ones,
    peak_of,
    piece_of,
    pointer,
    store,
)
from fn.kernels.gpu.triton.lists import elementwise_
from fn.kernels.gpu.triton.rules import (
    clamped,
    decayed,
    denominator,
    implied_gradient,
    kept_at_zero,
    lerp,
    quotient,
    second_moment,
)
from fn.kernels.gpu.triton.rules import drift as drift_of


@jit
def write_sums(sums, blocks, a, b, c):
    """Write the three sums of a block."""
    to = sums + tl.program_id(0)
    tl.store(to, a.to(tl.float64))
    tl.store(to + blocks, b.to(tl.float64))
    tl.store(to + blocks + blocks, c.to(tl.float64))


@jit
def onebit_moments_block(p, x, mu, nu, fresh, scaling, b1, rest1, b2, rest2, eps, weight_decay, max_step, sums, blocks,
                         length, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take the momentum, move the second moment that goes on; note the largest ratio, and squares."""
    i = tl.arange(0, BLOCK)
    m, v = quotient(load(x, i, length, FULL), scaling), load(nu, i, length, FULL)
    m = kept_at_zero(m, v, 0.0, 0.0)
    g = implied_gradient(m, load(mu, i, length, FULL), b1, rest1)
    f = second_moment(load(fresh, i, length, FULL), g, b2, rest2)
    store(mu, i, m, length, FULL)
    store(fresh, i, f, length, FULL)
    below = denominator(v, eps)
    q = clamped(quotient(m, below), max_step)
    u = decayed(q, load(p, i, length, FULL), weight_decay)
    # Behind the end all moments are zero: eps / eps would be a ratio of 1 that no element has.
    ratio = tl.where(i < length, quotient(below, denominator(f, eps)), 0.0)
    q, u = tl.where(i < length, q, 0.0), tl.where(i < length, u, 0.0)
    write_sums(sums, blocks, peak_of(ratio).to(tl.float32, bitcast=True), tl.sum(q * q), tl.sum(u * u))


@kernel
def onebit_lamb_moments_kernel(addresses, table, scaling, sums, b1, rest1, b2, rest2, eps, weight_decay, max_step, n,
                               blocks, P: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take 1-bit LAMB's momentum; sums: the largest ratio, squares of q and u.

    addresses: of params, averages, mu, nu, fresh.
    """
    _, _, _, length, s, offset = block_of(table, n, blocks, False)
    tensor, factor = addresses + s * 7, tl.load(scaling + s).to(tl.float32)
    p, x = pointer(tensor, offset, P, False), pointer(tensor + 1, offset, G, False)
    mu, nu = pointer(tensor + 2, offset, tl.float32, False), pointer(tensor + 3, offset, tl.float32, False)
    fresh = pointer(tensor + 4, offset, tl.float32, False)
    block = p, x, mu, nu, fresh, factor, b1, rest1, b2, rest2, eps, weight_decay, max_step, sums, blocks, length
    if length == BLOCK:
        onebit_moments_block(*block, True, BLOCK)
    else:
        onebit_moments_block(*block, False, BLOCK)


@jit
def average_block(mu, g, out, decay, factor, inside, length, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write the moving average, zero behind the end."""
    i = tl.arange(0, BLOCK)
    x = lerp(load(g, i, inside, FULL), load(mu, i, inside, FULL), decay)
    store(out, i, x * factor, length, FULL)


@kernel
def momentum_rows_kernel(addresses, table, factors, out, decay, n, blocks, G: tl.constexpr, ALIGNED: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """Write the moving averages of tensors into rows (R, n). addresses: of mu, gradients."""
    r, _, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor = addresses + s * 4
    start, inside = piece_of(tensor + 2, r, offset, length, ALIGNED)
    mu, g = pointer(tensor, start, tl.float32, ALIGNED), pointer(tensor + 1, start, G, ALIGNED)
    factor = tl.load(factors + s)
    if inside == BLOCK:
        average_block(mu, g, out + position, decay, factor, inside, length, True, BLOCK)
    else:
        average_block(mu, g, out + position, decay, factor, inside, length, False, BLOCK)


@jit
def drift_block(p, anchor, mu, g, nu, out, decay, eps, lr, inside, length, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write the drift, zero behind the end."""
    i = tl.arange(0, BLOCK)
    v = load(nu, i, inside, FULL)
    m = kept_at_zero(lerp(load(g, i, inside, FULL), load(mu, i, inside, FULL), decay), v, 0.0, 0.0)
    x = drift_of(load(p, i, inside, FULL), load(anchor, i, inside, FULL), m, v, eps, lr)
    store(out, i, x, length, FULL)


@kernel
def drift_kernel(addresses, table, out, decay, eps, lr, n, blocks, P: tl.constexpr, A: tl.constexpr, G: tl.constexpr,
                 ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the drift of tensors into rows (R, n). addresses: of params, anchors, mu, gradients, nu."""
    r, _, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor = addresses + s * 7
    start, inside = piece_of(tensor + 5, r, offset, length, ALIGNED)
    p, anchor = pointer(tensor, start, P, ALIGNED), pointer(tensor + 1, start, A, ALIGNED)
    mu, g = pointer(tensor + 2, start, tl.float32, ALIGNED), pointer(tensor + 3, start, G, ALIGNED)
    nu = pointer(tensor + 4, start, tl.float32, ALIGNED)
    if inside == BLOCK:
        drift_block(p, anchor, mu, g, nu, out + position, decay, eps, lr, inside, length, True, BLOCK)
    else:
        drift_block(p, anchor, mu, g, nu, out + position, decay, eps, lr, inside, length, False, BLOCK)


# the functions of the table


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor], nu: Sequence[Tensor],
    fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_lamb_moments_`."""
    lists = lists_of(params, averages, mu, nu, fresh, P=params, G=averages)
    if lists is None:
        return NotImplemented
    sums = _sums(lists.row)
    numbers = floats(b1, 1 - b1, b2, 1 - b2, eps, weight_decay, max_step)
    args = lists.addresses, lists.row.table, scaling.contiguous(), sums, *numbers, *lists.row.sizes
    launch(onebit_lamb_moments_kernel, sums, lists.row.blocks, *args, **lists.of_one_shape)
    return add_up_columns(sums, lists.row, peaks=True)


def _sums(row: Cut) -> Tensor:
    return torch.empty((3, row.blocks), dtype=torch.float64, device=row.table.device)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.steps.lamb_step_`: AdamW's rule at a rate for each tensor."""
    numbers = eps, weight_decay, math.nan, max_step  # the rates stand in place of the third
    return elementwise_("adamw", params, [*params, *mu, *nu], [rates], [2], numbers)


def momentum_rows(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, factors: Tensor | None, rows: int, runs: Sequence[int]
) -> Any:
    """See `reference.steps.momentum_rows`."""
    lists = lists_of(mu, grads, runs=runs, G=grads)
    if lists is None or (factors is not None and factors.dtype != torch.float32):
        return NotImplemented
    out = torch.empty((rows, lists.row.host.n), dtype=torch.float32, device=mu[0].device)
    factors = ones(len(mu), out.device) if factors is None else factors.contiguous()
    args = lists.addresses, lists.row.table, factors, out, float(decay), *lists.row.sizes
    launch(momentum_rows_kernel, out, rows * lists.row.blocks, *args, **lists.constants)
    return out


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.steps.drift`."""
    lists = lists_of(params, anchors, mu, grads, nu, runs=runs, P=params, A=anchors, G=grads)
    if lists is None:
        return NotImplemented
    out = torch.empty((rows, lists.row.host.n), dtype=torch.float32, device=params[0].device)
    args = lists.addresses, lists.row.table, out, *floats(decay, eps, lr), *lists.row.sizes
    launch(drift_kernel, out, rows * lists.row.blocks, *args, **lists.constants)
    return out


KERNELS = (onebit_lamb_moments_, lamb_step_, momentum_rows, drift)
