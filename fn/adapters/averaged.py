"""Gradients that were averaged before they came here: refused where it can be told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn.collectives.axis import axis_size
from fn.collectives.primitives import all_gather

Grads = tuple[list[Tensor], ...]


def refuse_averaged(grads: Grads, axes: Sequence[str]) -> bool:
    """Refuse gradients that are the same on all ranks of an axis, which DDP's own mean leaves behind.

    Averaging them again changes nothing, but DDP has then sent what the optimizer was to save. All ranks must call it;
    two numbers per parameter travel. Gradients that are zero or not finite tell nothing.

    Returns: whether they told something.
    Raises: ValueError, on all ranks, with what to do.
    """
    marks = [_mark(g) for group in grads for g in group if g.numel()]
    if not marks:
        return False
    told = True
    for axis in axes:
        rows = all_gather(torch.stack(marks), axis)
        told = told and bool(torch.isfinite(rows).all()) and bool(rows.any())
        if told and axis_size(axis) > 1 and bool((rows == rows[:1]).all()):
            raise ValueError(
                f"gradients: are the same on all ranks of {axis!r}, so they were averaged already and the compressed "
                f"phase would save nothing; call fn.adapters.ddp.keep_local(model) if the model is wrapped in DDP, or "
                f"pass refuse_averaged=False if the ranks see the same data on purpose"
            )
    return told


def _mark(g: Tensor) -> Tensor:
    wide = g.detach().double()
    return torch.stack([wide.sum(), wide.abs().sum()])
