"""Collectives refuse to be differentiated: torch's own would return gradients of zero, without an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from fn import tree
from fn.collectives import axis as axes
from fn.errors import expected

Tree = Any

_DIFFERENTIATES = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def refuse_to_differentiate(x: Tree, collective: str, axis: axes.AxisNames) -> None:
    """Refuse a tree that is being differentiated, by autograd, by `torch.func` or in forward mode, at any level.

    Raises: ValueError that names the collective and what to do instead.
    """
    if any(map(is_differentiated, tree.leaves(x))):
        wanted = f"a tensor that does not require grad, for {collective} is not differentiable, as no collective is"
        cure = (
            f"differentiate the loss of each rank without the collective and average the gradient, fn.pmean(grad, "
            f"{axis!r}); where no gradient is wanted, hand over x.detach(), or call it under torch.no_grad()"
        )
        raise ValueError(expected("x", wanted, "one that is differentiated", cure))
    if not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None and _is_within(axis):
        wanted = "a collective outside of the functions that torch.func differentiates, in which none can be"
        got = f"{collective} over the simulated axis {axis!r} inside of one"
        cure = f"return the value, with grad(..., has_aux=True), and call {collective} on it outside"
        raise ValueError(expected("x", wanted, got, cure))


def is_differentiated(x: Tensor) -> bool:
    """Return whether what is done with x now is recorded for a backward pass, or carries a tangent."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():  # a wrapper cannot be looked into
        return False
    batched = _functorch.is_batchedtensor(x)
    if not batched and forward_ad._current_level >= 0 and forward_ad.unpack_dual(x, level=0).tangent is not None:
        return True
    return (batched or _functorch.is_gradtrackingtensor(x)) and is_differentiated(_functorch.get_unwrapped(x))


def _is_within(axis: axes.AxisNames) -> bool:
    """Return whether torch.func differentiates a function inside that of one of the simulated ranks."""
    bound = [axes.resolve(name) for name in axes.names(axis)]
    levels = [_functorch.maybe_get_level(rank) for _, rank, transport in bound if transport == axes.SIMULATED]
    stack = _functorch.get_interpreter_stack() or ()
    return bool(levels) and any(i.level() > min(levels) and i.key() in _DIFFERENTIATES for i in stack)
