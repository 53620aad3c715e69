"""Whether tensors are what they seem: plain ones, outside of any trace or vmap."""

from __future__ import annotations

import torch
from torch import Tensor


def is_eager(*tensors: Tensor) -> bool:
    """Return whether the tensors hold numbers now: no compiler traces, and none is fake or batched."""
    if torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(t) is Tensor and not wrapped(t) for t in tensors)
