"""Codes of moving averages in the Triton row: an encoder that reads gradients, momenta and errors, and writes bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels.gpu import launching
from fn.kernels.gpu import triton_step_kernels as kernels
from fn.kernels.gpu.launching import addresses, dtype_of
from fn.kernels.gpu.triton import cut, outputs
from fn.kernels.reference.layout import contiguous, plain


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.momentum_encode`."""
    return _encode(mu, grads, decay, buffer, sent, valid, runs, torch.empty_like(buffer))


def momentum_signs(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, valid: Tensor, runs: Sequence[int]
) -> Any:
    """See `reference.momentum_signs`."""
    found = _encode(mu, grads, decay, buffer, buffer, valid, runs, None)
    return found if found is NotImplemented else found[1:]


def _encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int], out: Tensor | None,
) -> Any:  # fmt: skip
    """Return what is encoded, which is written into `out` if there is one; its bits; its sums."""
    at, dtype = cut(runs, buffer.device), dtype_of(grads)
    if dtype is None or not mu or not at.at.aligned or not contiguous(grads):
        return NotImplemented
    if not plain(mu, (buffer, sent)):
        return NotImplemented
    where, (bits, squares) = addresses(mu, grads, widths=at.at.widths.tolist()), outputs(buffer.shape[0], at)
    ends = where.table, at.table, valid.contiguous(), buffer, sent, buffer if out is None else out, bits, squares
    numbers = float(decay), at.at.n, len(at.at.table), at.at.segments
    constants = {"G": dtype, "FEEDBACK": out is not None, "ALIGNED": where.aligned and at.at.whole, "BLOCK": at.block}
    launching.launch(kernels.encode_averages, buffer, squares.numel(), *ends, *numbers, **constants)
    return out, bits, launching.add_up(squares, at)


KERNELS = {f.__name__: f for f in (momentum_encode, momentum_signs)}
