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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Transform, chain, stateless
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.sign import sign
from fn.transforms.adam import moving_average, moving_average_of_squares, scale_by_onebit_adam
from fn.transforms.average import average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lamb import LambHyper, onebit_lamb_by_tensor
from fn.transforms.masking import apply_mask, unfrozen
from fn.transforms.skip_nonfinite import skip_nonfinite
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


def onebit_adam(groups: Sequence[ParamGroup], *, axis: str, world_size: int) -> list[Transform]:
    """Return DeepSpeed's 1-bit Adam for each param group; without bias correction."""

    def one(g: ParamGroup) -> Transform:
        sync = _masked_sync(axis, world_size, g.exp_avg_mask)
        tx = chain(
            average(axis),
            scale_by_onebit_adam(g.b1, g.b2, g.eps, sync=sync, keep_zeros=False),
            add_decayed_weights(g.weight_decay),
            scale_by_learning_rate(g.lr),
        )
        return skip_nonfinite(unfrozen(tx) if g.non_freeze else tx)

    return [one(g) for g in groups]


def zero_one_adam(groups: Sequence[ParamGroup], *, axis: str, world_size: int, frozen: bool) -> list[Transform]:
    """Return DeepSpeed's 0/1 Adam for each param group, before or after the variance is frozen.

    Both have the same state and the local steps behind the freeze. On one rank the mask is not applied, and a
    step before the freeze in which the variance rests leaves the momentum as it is.
    """

    def one(g: ParamGroup) -> Transform:
        steps, gradients = (
            scale_by_zero_one_adam(
                g.lr,
                g.b1,
                g.b2,
                g.eps,
                g.weight_decay,
                sync=_masked_sync(axis, world_size, g.exp_avg_mask if world_size > 1 else None),
                compress=compress,
                decay_in_momentum=True,
                anchored=False,
                keep_zeros=False,
            )
            for compress in ("steps", "gradients")
        )
        codes = gradients.compressed_update
        before = codes if world_size > 1 else lambda g, s, p: codes(s.mu, s, p)
        link = steps if frozen else steps._replace(compressed_update=before)
        return skip_nonfinite(chain(average(axis), link))

    return [one(g) for g in groups]


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

    def moments(own: Tree, g: ParamGroup, grads: list[Tensor]) -> Tree:
        own = roles.replace(own, "first_moment", lambda mu: moving_average(mu, grads, g.b1))
        return roles.replace(own, "second_moment", lambda nu: moving_average_of_squares(nu, grads, g.b2))

    triples = zip(state, groups, gradients, strict=True)
    return tuple(moments(own, g, list(grads)) if g.non_freeze else own for own, g, grads in triples)


def reset_errors(state: Tree) -> Tree:
    """Return the state with zero errors and LAMB's tail, which is how DeepSpeed restarts."""
    zeros = partial(tree.map, torch.zeros_like)
    return with_field(roles.replace(state, "errors", zeros), "tail", zeros)


def with_field(state: Tree, name: str, f: Callable[[Tree], Tree]) -> Tree:
    """Return a tree of states with f of every field of a name, in the order of `fn.tree.fields`."""
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        pairs = zip(state._fields, state, strict=True)
        return type(state)(*(f(value) if field == name else with_field(value, name, f) for field, value in pairs))
    if isinstance(state, tuple | list):
        return type(state)(with_field(value, name, f) for value in state)
    return state
