"""Gradients that are not each rank's own, as backward left them: noticed where it can be told."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fn.base import Phase
from fn.collectives.axis import axis_size
from fn.collectives.primitives import all_gather

Grads = tuple[list[Tensor], ...]

CLOSE = 1e-5
"""Relative difference of norms that clipping to one norm leaves, by its rounding; norms of two ranks differ by more."""


def in_doubt(refuse_averaged: bool, compresses: bool) -> frozenset[Phase]:
    """Return the phases whose first step looks at its gradients."""
    phases = (Phase.WARMUP, Phase.COMPRESSED) if compresses else (Phase.COMPRESSED,)
    return frozenset(phases if refuse_averaged else ())


def still_in_doubt(doubts: frozenset[Phase], phase: Phase, grads: Grads, axes: Sequence[str]) -> frozenset[Phase]:
    """Look at the gradients of a step; return the phases that are still to be looked at.

    If they are the same on all ranks of an axis, something has averaged them, DDP perhaps, and has sent what the
    optimizer was to save: in a warm-up that is warned of, in the compressed phase refused. If they differ but have one
    norm, each rank has clipped by a norm of its own: that is warned of. Gradients that are zero or not finite tell
    nothing. All ranks must call it; three numbers per parameter travel.

    Raises: ValueError, on all ranks, with what to do.
    """
    marks = [_mark(g) for group in grads for g in group if g.numel()]
    if not marks:
        return doubts
    told = True
    for axis in axes:
        rows = all_gather(torch.stack(marks), axis)
        told = told and bool(torch.isfinite(rows).all()) and bool(rows.any())
        if not told or axis_size(axis) == 1:
            continue
        norms = rows[..., 2].sum(1).sqrt()
        if bool((rows == rows[:1]).all()):
            text = (
                f"gradients: are the same on all ranks of {axis!r}, so they were averaged already and the compressed "
                f"phase would save nothing; call fn.adapters.ddp.keep_local(model) if the model is wrapped in DDP, or "
                f"pass refuse_averaged=False if the ranks see the same data on purpose"
            )
            if phase is Phase.COMPRESSED:
                raise ValueError(text)
            warnings.warn(f"{text}; the first compressed step refuses them", stacklevel=7)
        elif bool(((norms - norms[0]).abs() <= CLOSE * norms[0]).all()):
            text = f"gradients: have the norm {float(norms[0]):.4g} on all ranks of {axis!r}, although they differ"
            hint = "which is not that of their mean; leave that out, and give the optimizer max_norm in its place"
            text = f"{text}, as if each rank had clipped by a norm of its own, {hint}"
            warnings.warn(text, stacklevel=7)
    return doubts - {phase} if told else doubts


def _mark(g: Tensor) -> Tensor:
    wide = g.detach().double()
    return torch.stack([wide.sum(), wide.abs().sum(), wide.square().sum()])
