"""DeepSpeed's 1-bit optimizers as transforms: its numbers, step for step, quirks included.

Each function makes one transform over all param groups: its trees are tuples with a list of tensors per group. What
differs from this library's own forms:

- every tensor is padded to a multiple of W * lcm(W, 8), and the padding counts in the scale and keeps an error;
- momentum that never received a gradient drifts unless `exp_avg_mask` keeps it at zero;
- 1-bit LAMB's padding returns into the next message undecayed, and its errors span all groups;
- 0/1 Adam compresses gradients until the variance is frozen, puts the decay of local steps into the momentum, and
  takes local steps back instead of returning to an anchor.

Source: DeepSpeed 0.19.6, runtime/fp16/onebit/{adam,lamb,zoadam}.py and runtime/comm/compressed.py, by behaviour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Transform, chain, stateless
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.sign import sign
from fn.transforms.adam import OnebitAdamState, moving_average, moving_average_of_squares, scale_by_onebit_adam
from fn.transforms.average import average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lamb import LambHyper, OnebitLambState, onebit_lamb_by_tensor
from fn.transforms.masking import apply_mask, unfrozen
from fn.transforms.skip_nonfinite import skip_nonfinite, together
from fn.transforms.zero_one_adam import scale_by_zero_one_adam

Tree = Any


class ParamGroup(NamedTuple):
    """What a param group says.

    lr: 0-d tensor. sizes: elements of each tensor. exp_avg_mask: for every tensor of the group, or None.
    """

    lr: Tensor | float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    sizes: tuple[int, ...] = ()
    exp_avg_mask: Tensor | None = None
    non_freeze: bool = False
    max_coeff: float = 10.0
    min_coeff: float = 0.01


def codec(world_size: int) -> Codec:
    """Return the sign codec with DeepSpeed's padding."""
    return sign(padding_counts=True)._replace(align=math.lcm(world_size, 8))


def _masked_sync(axis: str, world_size: int, mask: Tensor | None) -> Transform:
    sync = compressed_average(axis, codec(world_size), layout="per_tensor")
    return sync if mask is None else chain(sync, apply_mask(mask))


def onebit_adam(groups: Sequence[ParamGroup], *, axis: str, world_size: int) -> Transform:
    """Return DeepSpeed's 1-bit Adam over param groups; without bias correction."""

    def one(g: ParamGroup) -> Transform:
        sync = _masked_sync(axis, world_size, g.exp_avg_mask)
        tx = chain(
            average(axis),
            scale_by_onebit_adam(g.b1, g.b2, g.eps, sync=sync, keep_zeros=False),
            add_decayed_weights(g.weight_decay),
            scale_by_learning_rate(g.lr),
        )
        return skip_nonfinite(unfrozen(tx) if g.non_freeze else tx)

    return together([one(g) for g in groups])


def zero_one_adam(groups: Sequence[ParamGroup], *, axis: str, world_size: int, frozen: bool) -> Transform:
    """Return DeepSpeed's 0/1 Adam over param groups, before or after the variance is frozen.

    Both have the same state. On one rank the mask is not applied, and a step before the freeze in which the variance
    rests leaves the momentum as it is.
    """

    def one(g: ParamGroup) -> Transform:
        link = scale_by_zero_one_adam(
            g.lr,
            g.b1,
            g.b2,
            g.eps,
            g.weight_decay,
            sync=_masked_sync(axis, world_size, g.exp_avg_mask if world_size > 1 else None),
            compress="steps" if frozen else "gradients",
            decay_in_momentum=True,
            anchored=False,
            keep_zeros=False,
        )
        if world_size == 1 and not frozen:
            step = link.compressed_update
            link = link._replace(compressed_update=lambda g, s, p: step(s.mu, s, p))
        return skip_nonfinite(chain(average(axis), link))

    return together([one(g) for g in groups])


def onebit_lamb(
    groups: Sequence[ParamGroup],
    *,
    axis: str,
    world_size: int,
    copy_fresh: bool = True,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
) -> Transform:
    """Return DeepSpeed's 1-bit LAMB over param groups, which share one message and one common scale.

    Args: copy_fresh: False for a freeze step below 2, where the second moment that goes on starts from zero.
    """
    factors = (coeff_beta, factor_max, factor_min, factor_threshold)
    hypers = [
        LambHyper(g.b1, g.b2, g.eps, g.weight_decay, g.max_coeff, g.min_coeff, *factors)
        for g in groups
        for _ in g.sizes
    ]
    total = sum(sum(g.sizes) for g in groups)
    align = world_size * math.lcm(world_size, 8)
    masks = tuple([g.exp_avg_mask] * len(g.sizes) for g in groups)
    sync = compressed_average(axis, codec(world_size), layout="fused")
    if any(g.exp_avg_mask is not None for g in groups):
        sync = chain(sync, apply_mask((masks, None)))
    link = onebit_lamb_by_tensor(
        lambda count: hypers[:count], sync=sync, keep_zeros=False, copy_fresh=copy_fresh, tail=-total % align
    )
    lrs = [g.lr for g in groups]
    scale = stateless(
        lambda updates, params: tuple([u * -lr for u in group] for group, lr in zip(updates, lrs, strict=True))
    )
    return skip_nonfinite(chain(average(axis), link, scale))


def initialise(state: Tree, groups: Sequence[ParamGroup], gradients: Sequence[Sequence[Tensor]]) -> Tree:
    """Return 1-bit Adam's state after DeepSpeed's initialising call: `non_freeze` groups take their moments from it.

    Args: state: of `onebit_adam`, as made. gradients: the mean gradients, a list per group.
    """

    def moments(value: Tree, g: ParamGroup, grads: list[Tensor]) -> Tree:
        mu, nu = moving_average(value.mu, grads, g.b1), moving_average_of_squares(value.nu, grads, g.b2)
        return value._replace(mu=mu, nu=nu)

    return tuple(
        tree.replace(s, OnebitAdamState, partial(moments, g=g, grads=list(x))) if g.non_freeze else s
        for s, g, x in zip(state, groups, gradients, strict=True)
    )


def reset_errors(state: Tree) -> Tree:
    """Return the state with zero errors and tail, which is how DeepSpeed restarts."""
    state = roles.replace(state, "errors", partial(tree.map, torch.zeros_like))
    return tree.replace(state, OnebitLambState, lambda lamb: lamb._replace(tail=torch.zeros_like(lamb.tail)))
