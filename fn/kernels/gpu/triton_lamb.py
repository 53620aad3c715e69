"""LAMB's and 1-bit LAMB's steps, and 0/1 Adam's drift, in the Triton row: one launch for all tensors of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels.gpu import launching
from fn.kernels.gpu import triton_lamb_kernels as kernels
from fn.kernels.gpu.launching import Cut, addresses, dtype_of
from fn.kernels.gpu.triton import cut
from fn.kernels.gpu.triton_steps import floats, of_tensors, single
from fn.kernels.reference.layout import alike_in_memory, contiguous


def _sums(at: Cut) -> Tensor:
    return torch.empty((3, len(at.at.table)), dtype=torch.float64, device=at.table.device)


def lamb_moments_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float,
) -> Any:  # fmt: skip
    """See `reference.lamb_moments_`."""
    dtypes, lists = {"P": dtype_of(params), "G": dtype_of(grads)}, (params, grads, mu, nu)
    if None in dtypes.values() or not params or not single(mu, nu) or not alike_in_memory(*lists):
        return NotImplemented
    at, where = of_tensors(params), addresses(*lists)
    sums, numbers = _sums(at), (*floats(b1, b2, 1 - b2, eps, weight_decay), at.at.n, len(at.at.table))
    constants = {**dtypes, "ALIGNED": where.aligned, "BLOCK": at.block}
    launching.launch(kernels.moments, sums, sums.shape[1], where.table, at.table, sums, *numbers, **constants)
    return launching.add_up_columns(sums, at, peaks=False)


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor], nu: Sequence[Tensor],
    fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float, max_step: float,
    keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference.onebit_lamb_moments_`."""
    dtypes, lists = {"P": dtype_of(params), "G": dtype_of(averages)}, (params, averages, mu, nu, fresh)
    if None in dtypes.values() or not params or not single(mu, nu, fresh) or not alike_in_memory(*lists):
        return NotImplemented
    at, where = of_tensors(params), addresses(*lists)
    hyper = floats(b1, 1 - b1, b2, 1 - b2, eps, weight_decay, max_step)
    sums, numbers = _sums(at), (*hyper, at.at.n, len(at.at.table))
    ends = where.table, at.table, scaling.contiguous(), sums
    constants = {**dtypes, "KEEP_ZEROS": keep_zeros, "ALIGNED": where.aligned, "BLOCK": at.block}
    launching.launch(kernels.fresh_moments, sums, sums.shape[1], *ends, *numbers, **constants)
    return launching.add_up_columns(sums, at, peaks=True)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.lamb_step_`."""
    dtype, lists = dtype_of(params), (params, mu, nu)
    if dtype is None or not params or not single(mu, nu) or not alike_in_memory(*lists):
        return NotImplemented
    at, where = of_tensors(params), addresses(*lists)
    ends = where.table, at.table, rates.contiguous(), *floats(eps, weight_decay, max_step), at.at.n, len(at.at.table)
    constants = {"P": dtype, "ALIGNED": where.aligned, "BLOCK": at.block}
    launching.launch(kernels.step, rates, len(at.at.table), *ends, **constants)
    return None


def momentum_rows(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, factors: Tensor | None, rows: int, runs: Sequence[int]
) -> Any:
    """See `reference.momentum_rows`."""
    dtype, contiguous = dtype_of(grads), all(t.is_contiguous() for t in (*mu, *grads))
    if dtype is None or not mu or not single(mu, () if factors is None else (factors,)) or not contiguous:
        return NotImplemented
    at = cut(runs, mu[0].device)
    where = addresses(mu, grads, widths=at.at.widths.tolist())
    out = torch.empty((rows, at.at.n), dtype=torch.float32, device=mu[0].device)
    scale = out if factors is None else factors.contiguous()
    ends = where.table, at.table, scale, out, float(decay), at.at.n, len(at.at.table)
    constants = {"G": dtype, "FACTORS": factors is not None,
                 "ALIGNED": where.aligned and at.at.whole, "BLOCK": at.block}  # fmt: skip
    launching.launch(kernels.average_rows, out, rows * len(at.at.table), *ends, **constants)
    return out


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.drift`."""
    dtypes = {"P": dtype_of(params), "A": dtype_of(anchors), "G": dtype_of(grads)}
    lists = params, anchors, mu, grads, nu
    if None in dtypes.values() or not params or not single(mu, nu) or not contiguous(*lists):
        return NotImplemented
    at = cut(runs, params[0].device)
    where = addresses(*lists, widths=at.at.widths.tolist())
    out = torch.empty((rows, at.at.n), dtype=torch.float32, device=params[0].device)
    ends = where.table, at.table, out, *floats(decay, eps, lr), at.at.n, len(at.at.table)
    constants = {**dtypes, "ALIGNED": where.aligned and at.at.whole, "BLOCK": at.block}
    launching.launch(kernels.drift_rows, out, rows * len(at.at.table), *ends, **constants)
    return out


_CELLS = (lamb_moments_, onebit_lamb_moments_, lamb_step_, momentum_rows, drift)
KERNELS = {f.__name__: f for f in _CELLS}
