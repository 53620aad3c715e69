# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""LAMB's and 1-bit LAMB's steps, and 0/1 Adam's drift, in Triton's language; `triton_lamb` launches them.

Tables of addresses and dtypes are as in `triton_step_kernels`. Sums are (3, blocks): a row for each of them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fn.kernels.gpu.triton_rules import (
    clamped,
    decayed,
    denominator,
    descended,
    direction,
    drift,
    implied_gradient,
    kept_at_zero,
    lerp,
    quotient,
    second_moment,
)
from fn.kernels.gpu.triton_tiles import block_of, kernel, load, peak_of, piece_of, pointer, store

jit: Any = triton.jit


@jit
def write_sums(sums, blocks, a, b, c):
    """Write what a block has found."""
    to = sums + tl.program_id(0)
    tl.store(to, a.to(tl.float64))
    tl.store(to + blocks, b.to(tl.float64))
    tl.store(to + blocks + blocks, c.to(tl.float64))


@jit
def moments_block(p, g, mu, nu, b1, b2, rest2, eps, weight_decay, sums, blocks, length, FULL: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Move the moments; note squares. Behind the end all is zero, with an eps that is not."""
    i = tl.arange(0, BLOCK)
    param, x = load(p, i, length, FULL), load(g, i, length, FULL)
    m = lerp(x, load(mu, i, length, FULL), b1)
    v = second_moment(load(nu, i, length, FULL), x, b2, rest2)
    store(mu, i, m, length, FULL)
    store(nu, i, v, length, FULL)
    u = tl.where(i < length, decayed(direction(m, v, eps), param, weight_decay), 0.0)
    write_sums(sums, blocks, tl.sum(param * param), tl.sum(u * u), tl.sum(m * m))


@kernel
def moments(addresses, table, sums, b1, b2, rest2, eps, weight_decay, n, blocks, P: tl.constexpr, G: tl.constexpr,
            ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Move Adam's moments; sums of squares of params, directions and mu. addresses: of params, gradients, mu, nu."""
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor = addresses + s * 6
    p, g = pointer(tensor, offset, P, ALIGNED), pointer(tensor + 1, offset, G, ALIGNED)
    mu, nu = pointer(tensor + 2, offset, tl.float32, ALIGNED), pointer(tensor + 3, offset, tl.float32, ALIGNED)
    if length == BLOCK:
        moments_block(p, g, mu, nu, b1, b2, rest2, eps, weight_decay, sums, blocks, length, True, BLOCK)
    else:
        moments_block(p, g, mu, nu, b1, b2, rest2, eps, weight_decay, sums, blocks, length, False, BLOCK)


@jit
def fresh_block(p, x, mu, nu, fresh, scaling, b1, rest1, b2, rest2, eps, weight_decay, limit, sums, blocks,
                length, KEEP_ZEROS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take the momentum, move the second moment that goes on; note the largest ratio, and squares."""
    i = tl.arange(0, BLOCK)
    m, v = quotient(load(x, i, length, FULL), scaling), load(nu, i, length, FULL)
    if KEEP_ZEROS:
        m = kept_at_zero(m, v, 0.0, 0.0)
    g = implied_gradient(m, load(mu, i, length, FULL), b1, rest1)
    f = second_moment(load(fresh, i, length, FULL), g, b2, rest2)
    store(mu, i, m, length, FULL)
    store(fresh, i, f, length, FULL)
    below = denominator(v, eps)
    q = clamped(quotient(m, below), limit)
    u = decayed(q, load(p, i, length, FULL), weight_decay)
    ratio = tl.where(i < length, quotient(below, denominator(f, eps)), 0.0)
    q, u = tl.where(i < length, q, 0.0), tl.where(i < length, u, 0.0)
    write_sums(sums, blocks, peak_of(ratio).to(tl.float32, bitcast=True), tl.sum(q * q), tl.sum(u * u))


@kernel
def fresh_moments(addresses, table, scaling, sums, b1, rest1, b2, rest2, eps, weight_decay, limit, n, blocks,
                  P: tl.constexpr, G: tl.constexpr, KEEP_ZEROS: tl.constexpr, ALIGNED: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Take 1-bit LAMB's momentum; sums: the largest ratio, squares of q and u.

    addresses: of params, averages, mu, nu, fresh.
    """
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor, factor = addresses + s * 7, tl.load(scaling + s).to(tl.float32)
    p, x = pointer(tensor, offset, P, ALIGNED), pointer(tensor + 1, offset, G, ALIGNED)
    mu, nu = pointer(tensor + 2, offset, tl.float32, ALIGNED), pointer(tensor + 3, offset, tl.float32, ALIGNED)
    fresh = pointer(tensor + 4, offset, tl.float32, ALIGNED)
    if length == BLOCK:
        fresh_block(p, x, mu, nu, fresh, factor, b1, rest1, b2, rest2, eps, weight_decay, limit, sums, blocks,
                    length, KEEP_ZEROS, True, BLOCK)  # fmt: skip
    else:
        fresh_block(p, x, mu, nu, fresh, factor, b1, rest1, b2, rest2, eps, weight_decay, limit, sums, blocks,
                    length, KEEP_ZEROS, False, BLOCK)  # fmt: skip


@jit
def step_block(p, mu, nu, rate, eps, weight_decay, limit, length, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Take the step."""
    i = tl.arange(0, BLOCK)
    u = clamped(direction(load(mu, i, length, FULL), load(nu, i, length, FULL), eps), limit)
    store(p, i, descended(load(p, i, length, FULL), u, weight_decay, rate), length, FULL)


@kernel
def step(addresses, table, rates, eps, weight_decay, limit, n, blocks, P: tl.constexpr, ALIGNED: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Take the step of every tensor at its own rate. addresses: of params, mu, nu."""
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor, rate = addresses + s * 5, tl.load(rates + s).to(tl.float32)
    p, mu = pointer(tensor, offset, P, ALIGNED), pointer(tensor + 1, offset, tl.float32, ALIGNED)
    nu = pointer(tensor + 2, offset, tl.float32, ALIGNED)
    if length == BLOCK:
        step_block(p, mu, nu, rate, eps, weight_decay, limit, length, True, BLOCK)
    else:
        step_block(p, mu, nu, rate, eps, weight_decay, limit, length, False, BLOCK)


@jit
def average_block(mu, g, out, decay, factor, have, length, FACTORS: tl.constexpr, FULL: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Write the moving average, zero behind the end."""
    i = tl.arange(0, BLOCK)
    x = lerp(load(g, i, have, FULL), load(mu, i, have, FULL), decay)
    store(out, i, x * factor if FACTORS else x, length, FULL)


@kernel
def average_rows(addresses, table, factors, out, decay, n, blocks, G: tl.constexpr, FACTORS: tl.constexpr,
                 ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the moving averages of tensors into rows (R, n). addresses: of mu, gradients."""
    r, _, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor = addresses + s * 4
    start, have = piece_of(tensor + 2, r, offset, length, ALIGNED)
    mu, g = pointer(tensor, start, tl.float32, ALIGNED), pointer(tensor + 1, start, G, ALIGNED)
    factor = tl.load(factors + s) if FACTORS else 1.0
    if have == BLOCK:
        average_block(mu, g, out + place, decay, factor, have, length, FACTORS, True, BLOCK)
    else:
        average_block(mu, g, out + place, decay, factor, have, length, FACTORS, False, BLOCK)


@jit
def drift_block(p, anchor, mu, g, nu, out, decay, eps, lr, have, length, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write the drift, zero behind the end."""
    i = tl.arange(0, BLOCK)
    v = load(nu, i, have, FULL)
    m = kept_at_zero(lerp(load(g, i, have, FULL), load(mu, i, have, FULL), decay), v, 0.0, 0.0)
    x = drift(load(p, i, have, FULL), load(anchor, i, have, FULL), m, v, eps, lr)
    store(out, i, x, length, FULL)


@kernel
def drift_rows(addresses, table, out, decay, eps, lr, n, blocks, P: tl.constexpr, A: tl.constexpr, G: tl.constexpr,
               ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the drift of tensors into rows (R, n). addresses: of params, anchors, mu, gradients, nu."""
    r, _, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor = addresses + s * 7
    start, have = piece_of(tensor + 5, r, offset, length, ALIGNED)
    p, anchor = pointer(tensor, start, P, ALIGNED), pointer(tensor + 1, start, A, ALIGNED)
    mu, g = pointer(tensor + 2, start, tl.float32, ALIGNED), pointer(tensor + 3, start, G, ALIGNED)
    nu = pointer(tensor + 4, start, tl.float32, ALIGNED)
    if have == BLOCK:
        drift_block(p, anchor, mu, g, nu, out + place, decay, eps, lr, have, length, True, BLOCK)
    else:
        drift_block(p, anchor, mu, g, nu, out + place, decay, eps, lr, have, length, False, BLOCK)
