# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The steps of Adam and 1-bit Adam, codes of averages, and largest magnitudes in the Triton row: a launch for a list.

Kernels find their tensors in a table of addresses, a row of which is (a tensor's address in every list, its elements,
the width of its pieces in rows). So tensor s of a kernel on 4 lists begins at `addresses + 6 * s`. P, G and C are the
dtypes of params, gradients and copies; all else is float32. The kernels come first, then the functions of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fn.kernels.gpu.triton.blocks import (
    block_of,
    cut,
    encode_compensated,
    evenly,
    fits,
    floats,
    jit,
    kernel,
    launch,
    lists_of,
    load,
    mean_of,
    messages,
    octets,
    outputs,
    peak_of,
    piece_of,
    pointer,
    scales_of_block,
    store,
    sums_of,
)
from fn.kernels.gpu.triton.launches import launch_of
from fn.kernels.gpu.triton.rules import adamw, kept_at_zero, lerp, second_moment
from fn.kernels.layout import plain


@jit
def averages_block(mu, g, inside, decay, buffer, sent, out, bits, squares, length, real, GROUP: tl.constexpr,
                   FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Encode a moving average plus the residual error."""
    i = octets(BLOCK)
    x = lerp(load(g, i, inside, FULL), load(mu, i, inside, FULL), decay)
    encode_compensated(x, buffer, sent, out, bits, squares, i, length, real, FULL, GROUP, BLOCK)


@kernel
def encode_averages_kernel(addresses, table, valid, firsts, buffer, sent, out, bits, squares, decay, n, blocks,
                           segments, per_row, G: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
                           BLOCK: tl.constexpr):  # fmt: skip
    """Encode decay * mu + (1 - decay) * grad plus a residual error: what is left of a buffer that was sent."""
    r, first, position, length, s, offset = block_of(table, n, blocks, ALIGNED)
    scale, per_row = scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP)
    own, tensor = r * per_row + scale, addresses + s * 4
    start, inside = piece_of(tensor + 2, r, offset, length, ALIGNED)
    mu, g = pointer(tensor, start, tl.float32, ALIGNED), pointer(tensor + 1, start, G, ALIGNED)
    real = tl.load(valid + r * segments + s) - offset
    to, squares = bits + r * ((n + 7) // 8) + first // 8, squares + (own if GROUP else tl.program_id(0))
    block = mu, g, inside, decay, buffer + position, sent + own, out + position, to, squares, length, real
    if inside == BLOCK:
        averages_block(*block, GROUP, True, BLOCK)
    else:
        averages_block(*block, GROUP, False, BLOCK)


@jit
def onebit_block(p, mu, nu, copy, inside, bits, scales, width, ranks, per_row, share, descent, length, real,
                 KEEP_ZEROS: tl.constexpr, COPIES: tl.constexpr, GROUP: tl.constexpr, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Take the step with the mean momentum."""
    i = octets(BLOCK)
    m = mean_of(bits, scales, width, ranks, per_row, share, i, length, real, GROUP, BLOCK)
    v = load(nu, i, inside, FULL)
    if KEEP_ZEROS:
        m = kept_at_zero(m, v, 0.0, 0.0)
    store(mu, i, m, inside, FULL)
    # Rounded before it is copied: a copy that is an anchor has to equal the param, to the last bit.
    new = adamw(load(p, i, inside, FULL), m, v, *descent).to(p.dtype.element_ty)
    store(p, i, new, inside, FULL)
    if COPIES:
        store(copy, i, new, inside, FULL)


@kernel
def onebit_kernel(addresses, table, valid, firsts, bits, scales, eps, weight_decay, lr, max_step, n, blocks,
                  segments, per_row, width, ranks, share, P: tl.constexpr, C: tl.constexpr, KEEP_ZEROS: tl.constexpr,
                  COPIES: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Take 1-bit Adam's step from the mean momentum of W messages; write copies of params, if so wanted.

    addresses: of params, mu, nu, copies.
    """
    r, first, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor, descent = addresses + s * 6, (eps, weight_decay, lr, max_step)
    start, inside = piece_of(tensor + 4, r, offset, length, ALIGNED)
    p, mu = pointer(tensor, start, P, ALIGNED), pointer(tensor + 1, start, tl.float32, ALIGNED)
    nu, copy = pointer(tensor + 2, start, tl.float32, ALIGNED), pointer(tensor + 3, start, C, ALIGNED)
    scale, per_row = scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP)
    real = tl.load(valid + r * segments + s) - offset
    bits += r * ranks * width + first // 8
    scales += r * ranks * per_row + scale
    tensors, mean = (p, mu, nu, copy, inside), (bits, scales, width, ranks, per_row, share)
    if inside == BLOCK:
        onebit_block(*tensors, *mean, descent, length, real, KEEP_ZEROS, COPIES, GROUP, True, BLOCK)
    else:
        onebit_block(*tensors, *mean, descent, length, real, KEEP_ZEROS, COPIES, GROUP, False, BLOCK)


@jit
def adamw_block(p, g, mu, nu, b1, b2, rest2, descent, length, FROZEN: tl.constexpr, FULL: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step."""
    i = tl.arange(0, BLOCK)
    x, v = load(g, i, length, FULL), load(nu, i, length, FULL)
    m = lerp(x, load(mu, i, length, FULL), b1)
    # Loads of half precision give a thread eight elements in a row, of mu and nu, too; their stores give it four. So a
    # thread writes elements that another one has read. Where the compiler reads mu once, it passes numbers between
    # threads, which wait for each other. But it may as well read mu a second time for those who write, for whom nobody
    # would wait: some threads would then read the momentum after this step.
    if p.dtype.element_ty != tl.float32 or g.dtype.element_ty != tl.float32:
        tl.debug_barrier()
    if FROZEN:
        m = kept_at_zero(m, v, 0.0, 0.0)
    else:
        v = second_moment(v, x, b2, rest2)
        store(nu, i, v, length, FULL)
    store(mu, i, m, length, FULL)
    store(p, i, adamw(load(p, i, length, FULL), m, v, *descent), length, FULL)


@kernel
def adamw_kernel(addresses, table, b1, b2, rest2, eps, weight_decay, lr, max_step, n, blocks,
                 P: tl.constexpr, G: tl.constexpr, FROZEN: tl.constexpr, ALIGNED: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step. addresses: of params, gradients, mu, nu."""
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor, descent = addresses + s * 6, (eps, weight_decay, lr, max_step)
    p, g = pointer(tensor, offset, P, ALIGNED), pointer(tensor + 1, offset, G, ALIGNED)
    mu, nu = pointer(tensor + 2, offset, tl.float32, ALIGNED), pointer(tensor + 3, offset, tl.float32, ALIGNED)
    if length == BLOCK:
        adamw_block(p, g, mu, nu, b1, b2, rest2, descent, length, FROZEN, True, BLOCK)
    else:
        adamw_block(p, g, mu, nu, b1, b2, rest2, descent, length, FROZEN, False, BLOCK)


@jit
def into_block(addresses, count, start, share, b1, b2, rest2, descent, length, peaks, FROZEN: tl.constexpr,
               ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step elsewhere; note the largest magnitudes."""
    i, rows = tl.arange(0, BLOCK), addresses + (5 if FROZEN else 6)
    x = load(pointer(rows, start, tl.float32, ALIGNED), i, length, FULL)
    for r in range(1, count):
        x += load(pointer(rows + r, start, tl.float32, ALIGNED), i, length, FULL)
    x = x * share
    mu, nu = pointer(addresses + 1, start, tl.float32, ALIGNED), pointer(addresses + 2, start, tl.float32, ALIGNED)
    m, v = lerp(x, load(mu, i, length, FULL), b1), load(nu, i, length, FULL)
    if FROZEN:
        m = kept_at_zero(m, v, 0.0, 0.0)
    else:
        v = second_moment(v, x, b2, rest2)
        store(pointer(addresses + 5, start, tl.float32, ALIGNED), i, v, length, FULL)
    p = adamw(load(pointer(addresses, start, tl.float32, ALIGNED), i, length, FULL), m, v, *descent)
    store(pointer(addresses + 3, start, tl.float32, ALIGNED), i, p, length, FULL)
    store(pointer(addresses + 4, start, tl.float32, ALIGNED), i, m, length, FULL)
    # What stands behind the end is no param, and must not become the largest magnitude.
    p = tl.where(i < length, p, 0.0)
    tl.store(peaks, peak_of(x).to(tl.float32, bitcast=True))
    tl.store(peaks + 1, peak_of(p).to(tl.float32, bitcast=True))


@kernel
def adamw_into_kernel(addresses, table, peaks, rows, share, b1, b2, rest2, eps, weight_decay, lr, max_step, n,
                      blocks, FROZEN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take AdamW's step with the mean of gradients, elsewhere; peaks (blocks, 2), of mean and new params.

    addresses: of the old param, mu and nu, of the new ones, without nu where it is frozen, of all gradients.
    """
    _, _, _, length, _, offset = block_of(table, n, blocks, ALIGNED)
    descent, peaks = (eps, weight_decay, lr, max_step), peaks + 2 * tl.program_id(0).to(tl.int64)
    if length == BLOCK:
        into_block(addresses, rows, offset, share, b1, b2, rest2, descent, length, peaks, FROZEN, ALIGNED, True, BLOCK)
    else:
        into_block(addresses, rows, offset, share, b1, b2, rest2, descent, length, peaks, FROZEN, ALIGNED, False, BLOCK)


@kernel
def magnitude_kernel(addresses, table, peaks, n, blocks, G: tl.constexpr, BLOCK: tl.constexpr):
    """Write the largest magnitude of every block."""
    _, _, _, length, s, offset = block_of(table, n, blocks, False)
    x, i, to = pointer(addresses + s * 3, offset, G, False), tl.arange(0, BLOCK), peaks + tl.program_id(0)
    if length == BLOCK:
        tl.store(to, peak_of(load(x, i, length, True)).to(tl.float32, bitcast=True))
    else:
        tl.store(to, peak_of(load(x, i, length, False)).to(tl.float32, bitcast=True))


# the functions of the table


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.steps.adamw_`."""
    lists = lists_of(params, grads, mu, nu, block=launch_of(adamw_kernel).block, P=params, G=grads)
    if lists is None:
        return NotImplemented
    numbers = floats(b1, b2, 1 - b2, eps, weight_decay, lr, max_step)
    args = lists.addresses, lists.row.table, *numbers, *lists.row.sizes
    launch(adamw_kernel, params[0], lists.row.blocks, *args, **lists.constants, FROZEN=frozen)
    return None


def adamw_into_(
    new: Sequence[Tensor], rows: Sequence[Tensor], old: Sequence[Tensor], b1: float, b2: float, eps: float,
    weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.steps.adamw_into_`."""
    lists = lists_of(*([x] for x in (*old, *new, *rows)))
    if lists is None:
        return NotImplemented
    peaks = torch.empty((lists.row.blocks, 2), dtype=torch.float32, device=new[0].device)
    mean = len(rows), 1.0 / len(rows)
    numbers = floats(b1, b2, 1 - b2, eps, weight_decay, lr, max_step)
    args = lists.addresses, lists.row.table, peaks, *mean, *numbers, *lists.row.sizes
    launch(adamw_into_kernel, new[0], len(peaks), *args, **lists.constants, FROZEN=frozen)
    # (blocks, 2) -> (2,)
    return peaks.amax(0) if len(peaks) else peaks.new_zeros(2)


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference.lists.largest_magnitude`."""
    lists = lists_of(grads, G=grads)
    if lists is None:
        return NotImplemented
    peaks = torch.empty(lists.row.blocks, dtype=torch.float32, device=grads[0].device)
    args = lists.addresses, lists.row.table, peaks, *lists.row.sizes
    launch(magnitude_kernel, grads[0], len(peaks), *args, **lists.of_one_shape)
    largest = peaks.amax() if len(peaks) else peaks.new_zeros(())
    return largest.to(grads[0].dtype)


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int], block: int,
) -> Any:  # fmt: skip
    """See `reference.steps.momentum_encode`."""
    if not fits(block) or not cut(runs, buffer.device).host.aligned or not plain((buffer, sent)):
        return NotImplemented
    lists = lists_of(mu, grads, runs=runs, group=block, G=grads)
    if lists is None:
        return NotImplemented
    b, (bits, squares) = torch.empty_like(buffer), outputs(buffer.shape[0], lists.row)
    table, valid, firsts, *sizes = lists.row.scales(valid)
    args = lists.addresses, table, valid, firsts, buffer, sent, b, bits, squares, float(decay), *sizes
    programs = buffer.shape[0] * lists.row.blocks
    launch(encode_averages_kernel, buffer, programs, *args, **lists.constants, GROUP=block)
    return b, bits, sums_of(squares, lists.row)


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], block: int, eps: float, weight_decay: float, lr: float, max_step: float, keep_zeros: bool,
    copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_adam_`."""
    size = launch_of(onebit_kernel).block
    if not fits(block, size) or not cut(runs, bits.device).host.aligned or scales.dtype != torch.float32:
        return NotImplemented
    # A table has four lists. Without copies the fourth is never read.
    lists = lists_of(params, mu, nu, copies or params, runs=runs, block=size, group=block, P=params, C=copies)
    if lists is None:
        return NotImplemented
    bits = evenly(bits)
    table, valid, firsts, *sizes = lists.row.scales(valid)
    numbers = floats(eps, weight_decay, lr, max_step)
    args = lists.addresses, table, valid, firsts, bits, scales.contiguous(), *numbers, *sizes, *messages(bits)
    constants = {"KEEP_ZEROS": keep_zeros, "COPIES": bool(copies), "GROUP": block}
    launch(onebit_kernel, bits, bits.shape[0] * lists.row.blocks, *args, **lists.constants, **constants)
    return None


KERNELS = (momentum_encode, onebit_adam_, adamw_, adamw_into_, largest_magnitude)
