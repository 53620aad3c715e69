"""Adam's and 1-bit Adam's steps, codes of averages, and largest magnitudes in the Triton row: a launch for a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels.cpu.blocks import runs_of_tensors
from fn.kernels.gpu import launching
from fn.kernels.gpu import triton_step_kernels as kernels
from fn.kernels.gpu.launching import BLOCK, Cut, addresses, dtype_of
from fn.kernels.gpu.triton import cut, evenly, messages, outputs
from fn.kernels.reference.layout import alike_in_memory, contiguous, dtypes_of, plain


def single(*lists: Sequence[Tensor]) -> bool:
    """Return whether all tensors are float32."""
    return dtypes_of(*lists) <= {torch.float32}


def floats(*numbers: float) -> tuple[float, ...]:
    """Return numbers as floats: Triton would compile a kernel of its own for an int."""
    return tuple(map(float, numbers))


def descent_of(
    eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float, max_step: float
) -> tuple[float, ...]:
    """Return the numbers that `rules.adamw` takes behind the moments."""
    return floats(eps, weight_decay, lr, 1 / mu_weight, nu_weight**-0.5, max_step)


def of_tensors(tensors: Sequence[Tensor]) -> Cut:
    """Return the blocks of a list of tensors."""
    return launching.cut(tuple(runs_of_tensors(tensors)), BLOCK, tensors[0].device)


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float, max_step: float,
    max_momentum: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.adamw_`."""
    dtypes, lists = {"P": dtype_of(params), "G": dtype_of(grads)}, (params, grads, mu, nu)
    if None in dtypes.values() or not params or not single(mu, nu) or not alike_in_memory(*lists):
        return NotImplemented
    at, where = of_tensors(params), addresses(*lists)
    descent = descent_of(eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    numbers = *floats(b1, b2, 1 - b2), *descent, float(max_momentum), at.at.n, len(at.at.table)
    constants = {**dtypes, "FROZEN": frozen, "ALIGNED": where.aligned, "BLOCK": at.block}
    launching.launch(kernels.adamw_step, params[0], len(at.at.table), where.table, at.table, *numbers, **constants)
    return None


def adamw_into_(
    new: Sequence[Tensor], rows: Sequence[Tensor], old: Sequence[Tensor], b1: float, b2: float, eps: float,
    weight_decay: float, lr: float, mu_weight: float, nu_weight: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.adamw_into_`."""
    if not plain(new, rows, old):
        return NotImplemented
    at, where = of_tensors(new[:1]), addresses(*([x] for x in (*new, *old, *rows)))
    descent = descent_of(eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    numbers = *floats(b1, b2, 1 - b2), *descent, at.at.n, len(at.at.table)
    peaks = torch.empty((len(at.at.table), 2), dtype=torch.float32, device=new[0].device)
    ends = where.table, at.table, peaks, len(rows), 1.0 / len(rows)
    constants = {"ALIGNED": where.aligned, "BLOCK": at.block}
    launching.launch(kernels.adamw_into, new[0], len(peaks), *ends, *numbers, **constants)
    return peaks.amax(0) if len(peaks) else peaks.new_zeros(2)


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference.largest_magnitude`."""
    dtype = dtype_of(grads)
    if dtype is None or not grads or not alike_in_memory(grads):
        return NotImplemented
    at, where = of_tensors(grads), addresses(grads)
    peaks = torch.empty(len(at.at.table), dtype=torch.float32, device=grads[0].device)
    ends = where.table, at.table, peaks, at.at.n, len(peaks)
    constants = {"G": dtype, "ALIGNED": where.aligned, "BLOCK": at.block}
    launching.launch(kernels.magnitude, grads[0], len(peaks), *ends, **constants)
    found = peaks.amax() if len(peaks) else peaks.new_zeros(())
    return found.to(grads[0].dtype)


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.momentum_encode`."""
    at, dtype = cut(runs, buffer.device), dtype_of(grads)
    if dtype is None or not mu or not at.at.aligned or not contiguous(grads) or not plain(mu, (buffer, sent)):
        return NotImplemented
    where, (bits, squares) = addresses(mu, grads, widths=at.at.widths.tolist()), outputs(buffer.shape[0], at)
    b = torch.empty_like(buffer)
    ends = where.table, at.table, valid.contiguous(), buffer, sent, b, bits, squares
    numbers = float(decay), at.at.n, len(at.at.table), at.at.segments
    constants = {"G": dtype, "ALIGNED": where.aligned and at.at.whole, "BLOCK": at.block}
    launching.launch(kernels.encode_averages, buffer, squares.numel(), *ends, *numbers, **constants)
    return b, bits, launching.add_up(squares, at)


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
    max_step: float, max_momentum: float, keep_zeros: bool, copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference.onebit_adam_`."""
    at, dtypes = cut(runs, bits.device), {"P": dtype_of(params), "C": dtype_of(copies)}
    if None in dtypes.values() or not params or not contiguous(params, mu, nu, copies) or not at.at.aligned:
        return NotImplemented
    if not single(mu, nu, (scales,)):
        return NotImplemented
    where = addresses(params, mu, nu, copies or params, widths=at.at.widths.tolist())
    bits = evenly(bits)
    ends = where.table, at.table, valid.contiguous(), bits, scales.contiguous()
    descent = descent_of(eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    numbers = *descent, float(max_momentum), at.at.n, len(at.at.table), at.at.segments, *messages(bits)
    constants = {"KEEP_ZEROS": keep_zeros, "COPIES": bool(copies), "ALIGNED": where.aligned and at.at.whole,
                 "BLOCK": at.block}  # fmt: skip
    programs = bits.shape[0] * len(at.at.table)
    launching.launch(kernels.onebit, bits, programs, *ends, *numbers, **dtypes, **constants)
    return None


_CELLS = (momentum_encode, onebit_adam_, adamw_, adamw_into_, largest_magnitude)
KERNELS = {f.__name__: f for f in _CELLS}
