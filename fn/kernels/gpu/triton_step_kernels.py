# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The steps of Adam and 1-bit Adam in Triton's language; `triton_steps` launches them.

They find their tensors in a table of addresses, a row of which is (a tensor's address in every list, its elements, the
width of its pieces in rows). P, G and C are the dtypes of params, gradients and copies; all else is float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fn.kernels.gpu.triton_rules import adamw, compensated, held, kept_at_zero, lerp, second_moment
from fn.kernels.gpu.triton_tiles import (
    block_of,
    kernel,
    load,
    mean_of,
    octets,
    peak_of,
    piece_of,
    pointer,
    store,
    write_codes,
)

jit: Any = triton.jit


@jit
def averages_block(mu, g, have, decay, buffer, sent, out, bits, squares, length, real, FULL: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Encode a moving average plus the error."""
    i = octets(BLOCK)
    x, old = lerp(load(g, i, have, FULL), load(mu, i, have, FULL), decay), load(buffer, i, length, FULL)
    b = tl.where(i < real, compensated(x, old, tl.load(sent), 0.0), x + old)
    store(out, i, b, length, FULL)
    write_codes(b, i, length, real, bits, squares, BLOCK)


@kernel
def encode_averages(addresses, table, valid, buffer, sent, out, bits, squares, decay, n, blocks, segments,
                    G: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode decay * mu + (1 - decay) * grad plus an error: what is left of a buffer that was sent."""
    r, first, place, length, s, offset = block_of(table, n, blocks, ALIGNED)
    here, tensor = r * segments + s, addresses + s * 4
    start, have = piece_of(tensor + 2, r, offset, length, ALIGNED)
    mu, g = pointer(tensor, start, tl.float32, ALIGNED), pointer(tensor + 1, start, G, ALIGNED)
    real = tl.load(valid + here) - offset
    to = bits + r * ((n + 7) // 8) + first // 8
    if have == BLOCK:
        averages_block(mu, g, have, decay, buffer + place, sent + here, out + place, to, squares, length, real,
                       True, BLOCK)  # fmt: skip
    else:
        averages_block(mu, g, have, decay, buffer + place, sent + here, out + place, to, squares, length, real,
                       False, BLOCK)  # fmt: skip


@jit
def onebit_block(p, mu, nu, copy, have, bits, scales, width, ranks, segments, share, descent, most, length, real,
                 KEEP_ZEROS: tl.constexpr, COPIES: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take the step with the mean momentum."""
    i = octets(BLOCK)
    m, v = mean_of(bits, scales, width, ranks, segments, share, i, length, real, BLOCK), load(nu, i, have, FULL)
    if KEEP_ZEROS:
        m = kept_at_zero(m, v, 0.0, 0.0)
    m = held(m, v, descent[0], most)
    store(mu, i, m, have, FULL)
    new = adamw(load(p, i, have, FULL), m, v, *descent).to(p.dtype.element_ty)
    store(p, i, new, have, FULL)
    if COPIES:
        store(copy, i, new, have, FULL)


@kernel
def onebit(addresses, table, valid, bits, scales, eps, weight_decay, lr, c1, c2, limit, most, n, blocks, segments,
           width, ranks, share, P: tl.constexpr, C: tl.constexpr, KEEP_ZEROS: tl.constexpr, COPIES: tl.constexpr,
           ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take 1-bit Adam's step from the mean momentum of W messages; write copies of params, too, if so wanted.

    addresses: of params, mu, nu, copies.
    """
    r, first, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor, descent = addresses + s * 6, (eps, weight_decay, lr, c1, c2, limit)
    start, have = piece_of(tensor + 4, r, offset, length, ALIGNED)
    p, mu = pointer(tensor, start, P, ALIGNED), pointer(tensor + 1, start, tl.float32, ALIGNED)
    nu, copy = pointer(tensor + 2, start, tl.float32, ALIGNED), pointer(tensor + 3, start, C, ALIGNED)
    real = tl.load(valid + r * segments + s) - offset
    bits += r * ranks * width + first // 8
    scales += r * ranks * segments + s
    if have == BLOCK:
        onebit_block(p, mu, nu, copy, have, bits, scales, width, ranks, segments, share, descent, most, length, real,
                     KEEP_ZEROS, COPIES, True, BLOCK)  # fmt: skip
    else:
        onebit_block(p, mu, nu, copy, have, bits, scales, width, ranks, segments, share, descent, most, length, real,
                     KEEP_ZEROS, COPIES, False, BLOCK)  # fmt: skip


@jit
def adamw_block(p, g, mu, nu, b1, b2, rest2, descent, most, length, FROZEN: tl.constexpr, FULL: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step."""
    i = tl.arange(0, BLOCK)
    x, v = load(g, i, length, FULL), load(nu, i, length, FULL)
    m = lerp(x, load(mu, i, length, FULL), b1)
    if FROZEN:
        m = held(kept_at_zero(m, v, 0.0, 0.0), v, descent[0], most)
    else:
        v = second_moment(v, x, b2, rest2)
        store(nu, i, v, length, FULL)
    store(mu, i, m, length, FULL)
    store(p, i, adamw(load(p, i, length, FULL), m, v, *descent), length, FULL)


@kernel
def adamw_step(addresses, table, b1, b2, rest2, eps, weight_decay, lr, c1, c2, limit, most, n, blocks,
               P: tl.constexpr, G: tl.constexpr, FROZEN: tl.constexpr, ALIGNED: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step. addresses: of params, gradients, mu, nu."""
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor, descent = addresses + s * 6, (eps, weight_decay, lr, c1, c2, limit)
    p, g = pointer(tensor, offset, P, ALIGNED), pointer(tensor + 1, offset, G, ALIGNED)
    mu, nu = pointer(tensor + 2, offset, tl.float32, ALIGNED), pointer(tensor + 3, offset, tl.float32, ALIGNED)
    if length == BLOCK:
        adamw_block(p, g, mu, nu, b1, b2, rest2, descent, most, length, FROZEN, True, BLOCK)
    else:
        adamw_block(p, g, mu, nu, b1, b2, rest2, descent, most, length, FROZEN, False, BLOCK)


@jit
def into_block(addresses, rows, start, share, b1, b2, rest2, descent, length, peaks, ALIGNED: tl.constexpr,
               FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step elsewhere; note the largest magnitudes."""
    i = tl.arange(0, BLOCK)
    x = load(pointer(addresses + 6, start, tl.float32, ALIGNED), i, length, FULL)
    for r in range(1, rows):
        x += load(pointer(addresses + 6 + r, start, tl.float32, ALIGNED), i, length, FULL)
    x = x * share
    mu, nu = pointer(addresses + 4, start, tl.float32, ALIGNED), pointer(addresses + 5, start, tl.float32, ALIGNED)
    m = lerp(x, load(mu, i, length, FULL), b1)
    v = second_moment(load(nu, i, length, FULL), x, b2, rest2)
    p = adamw(load(pointer(addresses + 3, start, tl.float32, ALIGNED), i, length, FULL), m, v, *descent)
    store(pointer(addresses, start, tl.float32, ALIGNED), i, p, length, FULL)
    store(pointer(addresses + 1, start, tl.float32, ALIGNED), i, m, length, FULL)
    store(pointer(addresses + 2, start, tl.float32, ALIGNED), i, v, length, FULL)
    p = tl.where(i < length, p, 0.0)
    tl.store(peaks, peak_of(x).to(tl.float32, bitcast=True))
    tl.store(peaks + 1, peak_of(p).to(tl.float32, bitcast=True))


@kernel
def adamw_into(addresses, table, peaks, rows, share, b1, b2, rest2, eps, weight_decay, lr, c1, c2, limit, n, blocks,
               ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step with the mean of gradients, elsewhere; peaks (blocks, 2), of mean and new params.

    addresses: of the new param, mu and nu, of the old ones, of all gradients.
    """
    _, _, _, length, _, offset = block_of(table, n, blocks, ALIGNED)
    descent, peaks = (eps, weight_decay, lr, c1, c2, limit), peaks + 2 * tl.program_id(0).to(tl.int64)
    if length == BLOCK:
        into_block(addresses, rows, offset, share, b1, b2, rest2, descent, length, peaks, ALIGNED, True, BLOCK)
    else:
        into_block(addresses, rows, offset, share, b1, b2, rest2, descent, length, peaks, ALIGNED, False, BLOCK)


@kernel
def magnitude(addresses, table, peaks, n, blocks, G: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the largest magnitude of every block."""
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    x, i, to = pointer(addresses + s * 3, offset, G, ALIGNED), tl.arange(0, BLOCK), peaks + tl.program_id(0)
    if length == BLOCK:
        tl.store(to, peak_of(load(x, i, length, True)).to(tl.float32, bitcast=True))
    else:
        tl.store(to, peak_of(load(x, i, length, False)).to(tl.float32, bitcast=True))
