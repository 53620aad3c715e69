"""Eager mode: whether tensors hold numbers now, or are differentiated, and results in memory that is used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fn.kernels import memory_pool

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def is_concrete(*tensors: Tensor) -> bool:
    """Return whether the tensors hold numbers now: no compiler traces, and none is fake or batched."""
    if torch.compiler.is_compiling():
        return False
    # By exact types: a FakeTensor or a DTensor is a Tensor, too, but no kernel can read its memory.
    return {*map(type, tensors)} <= _PLAIN and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


_PLAIN = {Tensor, torch.nn.Parameter}


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Return whether one of the tensors, which hold numbers, may be differentiated; quick under no_grad."""
    return (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)) or forward_ad._current_level >= 0


def runs_as_written() -> bool:
    """Return whether no compiler, no tracer and no transform of `torch.func` looks at what is done."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


PLANS = 4096
"""Plans of a kind that are kept. A step takes one for each vector that travels, and takes them in the same order every
time. So if a model has more than are kept, the oldest is always dropped just before it is asked for again: none is
found, and on a device each is copied there anew."""


def cached_plan(make: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Return a function that makes a plan from hashable arguments once, so that the next step finds it.

    The plan must depend on nothing else, and nobody may write into it. Under a tracer it is made anew, for tensors that
    are made there belong to the trace.
    """
    if torch.compiler.is_compiling():  # within a plan that is traced
        return make
    kept: Callable[_Args, _Result] = lru_cache(maxsize=PLANS)(make)  # type: ignore[assignment]

    @wraps(make)
    def get(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        return (kept if runs_as_written() else make)(*args, **kwargs)

    return get


def pooled(like: Tensor, *others: Tensor) -> dict[str, Tensor]:
    """Return {"out": a tensor like the first, from the pool of large buffers} for a torch function of the tensors.

    It is empty where torch allows no `out`, or where a pool would be wrong: on other devices, in traces, and where
    gradients or tangents are taken.
    """
    tensors = (like, *others)
    if like.device.type != "cpu" or any(t.requires_grad for t in tensors) or not is_concrete(*tensors):
        return {}
    if forward_ad._current_level >= 0:
        return {}
    return {"out": memory_pool.empty(like.shape, like.dtype, like.device)}


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without numbers, from the pool of large buffers; in traces torch's own, batched as `like` is."""
    if is_concrete(like):
        return memory_pool.empty(shape, dtype or like.dtype, like.device)
    return like.new_empty(shape, dtype=dtype)
