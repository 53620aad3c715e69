"""Eager mode: whether tensors hold numbers now, and results in memory that is used again."""

from __future__ import annotations

import torch
from torch import Tensor

from fn.kernels import buffers


def is_eager(*tensors: Tensor) -> bool:
    """Return whether the tensors hold numbers now: no compiler traces, and none is fake or batched."""
    if torch.compiler.is_compiling():
        return False
    return {*map(type, tensors)} <= _PLAIN and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


_PLAIN = {Tensor, torch.nn.Parameter}


def pooled(like: Tensor, *others: Tensor) -> dict[str, Tensor]:
    """Return {"out": a tensor like the first, from the pool of large buffers} for a torch function of the tensors.

    Where that is not possible, on other devices, in traces, for tensors that require grad, it is empty.
    """
    tensors = (like, *others)
    if like.device.type != "cpu" or any(t.requires_grad for t in tensors) or not is_eager(*tensors):
        return {}
    return {"out": buffers.empty(like.shape, like.dtype)}
