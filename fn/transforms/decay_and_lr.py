"""Links that end a chain: decoupled weight decay, the learning rate, and what rounding of the params drops."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag, check_number
from fn.base import Transform, check_params, check_state, declare_rule, lift
from fn.errors import expected
from fn.kernels import rules
from fn.transforms.leafwise import apply

Tree = Any


@declare_rule(name="add_decayed_weights", tensorwise=True, now=True)
class Decay(NamedTuple):
    """The rule u + weight_decay p."""

    weight_decay: float

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates with the decay added, and the state."""
        if self.weight_decay == 0:
            return updates, state
        check_params(params)
        tree.check_real(updates, "updates")
        return apply(rules.decayed, (updates, params), self.weight_decay), state


@declare_rule(name="add_decayed_weights", tensorwise=True, now=True)
class CautiousDecay(NamedTuple):
    """The rule u + weight_decay p where u p >= 0, and u elsewhere."""

    weight_decay: float

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates with the decay added, and the state."""
        check_params(params)
        tree.check_real(updates, "updates")
        wd = self.weight_decay
        return tree.map(lambda u, p: u + wd * torch.where(u * p >= 0, p, 0.0).to(u.dtype), updates, params), state


@declare_rule(name="scale_by_learning_rate", tensorwise=True, now=True)
class Rate(NamedTuple):
    """The rule -lr u."""

    lr: float | Tensor

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates times -lr, and the state."""
        tree.check_real(updates, "updates")
        return apply(rules.scaled, (updates,), -self.lr), state


def add_decayed_weights(weight_decay: float, cautious: bool = False) -> Transform:
    """Add weight_decay * p to the updates, before the learning rate: decoupled weight decay.

        >>> import torch, fn
        >>> fn.add_decayed_weights(0.1).update(fn.Phase.LOCAL)(torch.tensor([1.0]), (), torch.tensor([-5.0]))[0]
        tensor([0.5000])

    Args: cautious: decay only where the update moves the param towards zero, too: where u p >= 0.
    Raises: ValueError if weight_decay is negative or not finite; TypeError if cautious is no bool.

    Paper: Loshchilov and Hutter, Decoupled weight decay (arXiv 1711.05101), algorithm 2, line 12; Chen et al., Cautious
        weight decay (arXiv 2510.12402).
    """
    check_decay(weight_decay)
    check_flag("cautious", cautious)
    return lift(lambda params: (), (CautiousDecay if cautious else Decay)(weight_decay), elementwise=True)


def check_decay(weight_decay: float) -> None:
    """Refuse a weight decay that is negative or not finite with a ValueError."""
    check_number("weight_decay", weight_decay)
    if not 0 <= weight_decay < math.inf:
        raise ValueError(expected("weight_decay", "a finite number of at least 0", f"{weight_decay}"))


def check_rate(lr: float | Tensor, argument: str = "lr") -> None:
    """Refuse a learning rate that is not a number, negative, not finite, or a tensor with a dimension."""
    if isinstance(lr, Tensor):
        if lr.ndim:
            raise ValueError(expected(argument, "a float or a 0-d tensor", f"a tensor of shape {tuple(lr.shape)}"))
        return
    check_number(argument, lr)
    if not 0 <= lr < math.inf:
        raise ValueError(expected(argument, "a finite number of at least 0", f"{lr}"))


def scale_by_learning_rate(lr: float | Tensor) -> Transform:
    """Multiply the updates by -lr, so that `apply_updates` descends.

        >>> import torch, fn
        >>> lr = torch.tensor(0.1)
        >>> tx = fn.scale_by_learning_rate(lr)
        >>> lr.fill_(0.5)                                             # as a scheduler does
        tensor(0.5000)
        >>> tx.update(fn.Phase.WARMUP)(torch.tensor([1.0, -2.0]), (), None)[0]
        tensor([-0.5000,  1.0000])

    Args: lr: a float, or a 0-d tensor, which a scheduler may fill in place between steps without a recompile.
    Raises: ValueError if lr is negative or not finite, or a tensor with a dimension.
    """
    check_rate(lr)
    return lift(lambda params: (), Rate(lr), elementwise=True)


class RoundingState(NamedTuple):
    """State of `compensate_rounding`. dropped: of each half-precision param, in its dtype; else without elements.

    () where no param is of half precision.
    """

    dropped: Tree


@declare_rule(name="compensate_rounding", tensorwise=True, now=True)
class Rounding(NamedTuple):
    """The rule of `compensate_rounding`."""

    def __call__(self, updates: Tree, state: RoundingState, params: Tree, /) -> tuple[Tree, RoundingState]:
        """Return the updates with what was dropped before, and the state with what `apply_updates` will drop."""
        check_state(state, RoundingState)
        if not tree.leaves(state.dropped):
            return updates, state
        check_params(params)
        (us, dropped, ps), structure = tree.flatten_alike([updates, state.dropped, params])
        for i, (u, e, p) in enumerate(zip(us, dropped, ps, strict=True)):
            if e.numel():
                # What moves p by itself is of other params: somebody wrote them, smaller ones, since the last step.
                us[i] = u.to(torch.promote_types(u.dtype, torch.float32)) + torch.where(p + e == p, e, 0.0)
                exact = p + us[i]
                dropped[i] = (exact - exact.to(p.dtype)).to(p.dtype)
        return tree.unflatten(structure, us), RoundingState(tree.unflatten(structure, dropped))


def compensate_rounding() -> Transform:
    """Add to each update what rounding dropped from the last ones, where params are float16 or bfloat16.

    Steps below half the spacing of a param, 0.002 next to 1 in bfloat16, then add up and do not get lost.

        u <- u + e;    e <- (p + u) - round(p + u)

        >>> import torch, fn
        >>> tx, p = compensate_rounding(), torch.ones(1, dtype=torch.bfloat16)
        >>> state = tx.init(p)
        >>> for _ in range(10):
        ...     u, state = tx.update(fn.Phase.LOCAL)(torch.tensor([-0.001]), state, p)
        ...     p = fn.apply_updates(p, u)
        >>> p
        tensor([0.9883], dtype=torch.bfloat16)

    It is the last link of a chain, whose updates are added as they are. e takes 2 bytes a param.

    Paper: Kahan, Further remarks on reducing truncation errors (Communications of the ACM, 1965). The code of
        modded-nanogpt keeps such low bits of bfloat16 weights beside NorMuon's moments.
    """

    def init(params: Tree) -> RoundingState:
        half = tree.map(lambda p: p.dtype in (torch.float16, torch.bfloat16), params)
        if not any(tree.leaves(half)):
            return RoundingState(())
        return RoundingState(tree.map(lambda p, is_half: p.detach().new_zeros(p.shape if is_half else 0), params, half))

    return lift(init, Rounding(), elementwise=True)
