"""Scaled losses: gradients are unscaled before anything is averaged, encoded or kept as an error.

`torch.amp.GradScaler` tells an optimizer with `_step_supports_amp_scaling` the scale and whether it saw an Inf on this
rank, and calls its step in any case. So every rank takes part in the step, a rank that saw an Inf contributes NaN, and
all ranks skip together. The scalers themselves need not agree: what is sent has no scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

Grads = tuple[list[Tensor], ...]


def unscaled(grads: Grads, scale: Tensor | float | None, found_inf: Tensor | None) -> Grads:
    """Divide gradients by the scale of the loss; make them NaN where an Inf was found.

    Args:
        grads: per param group.
        scale: of the loss; None if the gradients are unscaled already.
        found_inf: more than 0 if the scaler found an Inf or a NaN on this rank; None if it did not look.
    Returns: the gradients, half precision widened to float32 where a scale is taken out, or as they are.
    """
    if scale is None and (found_inf is None or not float(found_inf)):
        return grads
    device = next((g.device for group in grads for g in group), torch.device("cpu"))
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=device).reciprocal()
    if found_inf is not None:
        factor = torch.where(found_inf.to(device).reshape(()) > 0, float("nan"), factor.reshape(()))
    factor = factor.float()
    return tuple([(g.float() if g.element_size() < 4 else g) * factor.to(g.device) for g in group] for group in grads)
