"""DeepSpeed's 1-bit optimizers as transforms: its numbers, step for step, quirks included.

`onebit_adam`, `zero_one_adam` and `onebit_lamb` make transforms of param groups; a tree over all groups is a tuple with
a list of tensors per group. What differs from this library's own links stands in four pieces:

    codec                     every tensor is padded to a multiple of W * lcm(W, 8), and the padding counts in the scale
                              and keeps an error
    scale_by_onebit_adam      momentum that never received a gradient drifts unless `exp_avg_mask` keeps it at zero
    scale_by_zero_one_adam    gradients are compressed until the variance is frozen; the decay of local steps is in the
                              momentum; local steps are taken back instead of returning to an anchor
    scale_by_onebit_lamb      the padding returns into the next message undecayed; one message and one scale serve all
                              groups, whose hyper-parameters may differ

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
from fn.base import NewParams, Phase, Transform, chain, check_arguments, facts_of, missing, stateless, unchanged
from fn.collectives.codecs.codec import Codec, Segments
from fn.collectives.codecs.sign import sign
from fn.facts import Averages, Facts, merged
from fn.kernels import rules
from fn.kernels.reference.steps import over_root
from fn.kernels.tracing import cached_plan
from fn.transforms import adam
from fn.transforms.adam import (
    OnebitAdamState,
    adam_direction,
    check_betas,
    moving_average,
    moving_average_of_squares,
    start_moments,
    widest,
)
from fn.transforms.average import average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, check_decay, check_rate, scale_by_learning_rate
from fn.transforms.lamb import LambHyper, check_hyper, frozen_step, start_lamb, warm_step
from fn.transforms.mask_and_partition import unfrozen
from fn.transforms.skip_nonfinite import all_finite, skip_nonfinite
from fn.transforms.zero_one_adam import (
    check_synchronised,
    common_step,
    kept_if,
    largest,
    peak_of,
    rebuilt_momentum,
)

Tree = Any


class ParamGroup(NamedTuple):
    """The settings of a param group.

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
    """Return the sign codec with DeepSpeed's padding, which counts: it dilutes the scale, and its error oscillates."""
    plain = sign()
    assert plain.segmented is not None

    def segmented(segments: Segments) -> Codec:
        valid = torch.tensor(segments.widths, dtype=torch.int64, device=segments.valid.device)  # (S,)
        return of_segments(segments._replace(valid=valid.expand_as(segments.valid)))  # (R, S): all is said to be real

    of_segments, make = plain.segmented, partial(codec, world_size)
    return plain._replace(align=math.lcm(world_size, 8), segmented=cached_plan(segmented), make=make)


def apply_mask(mask: Tree) -> Transform:
    """Multiply the updates of compressed steps by numbers: one tensor for all leaves, or a tree with None for ones."""

    def multiply(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        def keep(u: Tensor, m: Tensor | None) -> Tensor:
            # In the dtype of the updates: a float32 mask would widen those of half precision.
            return u if m is None else u * m.to(device=u.device, dtype=u.dtype)

        if isinstance(mask, Tensor):
            return tree.map(lambda u: keep(u, mask), updates), state
        return tree.map(keep, updates, mask), state

    facts = Facts(whole=("apply_mask",), tree=("apply_mask",))
    return Transform(lambda params: (), unchanged, multiply, unchanged, facts=facts)


def _masked_sync(axis: str, world_size: int, mask: Tensor | None) -> Transform:
    sync = compressed_average(axis, codec(world_size), layout="per_tensor")
    return sync if mask is None else chain(sync, apply_mask(mask))


def scale_by_onebit_adam(b1: float, b2: float, eps: float, *, sync: Transform) -> Transform:
    """Do as `fn.scale_by_onebit_adam`, but let a momentum move where the second moment is zero.

    In the compressed phase an element that never received a gradient then drifts by +-scale / eps in each step.
    """
    masked = adam.scale_by_onebit_adam(b1, b2, eps, sync=sync)

    def compressed(updates: Tree, state: OnebitAdamState, params: Tree, /) -> tuple[Tree, OnebitAdamState]:
        updates, params = check_arguments(updates, state, params, OnebitAdamState, "nu")
        mu, errors = sync.compressed_update(moving_average(state.mu, updates, b1), state.sync, params)
        state = state._replace(step=state.step + 1, mu=mu, sync=errors)
        return adam_direction(mu, state.nu, eps), state

    assert isinstance(masked.compressed_update, adam.OnebitAdam)
    return masked._replace(compressed_update=masked.compressed_update._replace(keep_zeros=False, run=compressed))


@roles.declare(
    rank_local=("mu", "went", "dropped"),
    first_moment=("mu",),
    second_moment=("nu",),
    local_params=lambda state, params: _taken_back(state, params) if float(state.elapsed) else None,
    watched=("peak",),
    dropped=("dropped",),
)
class ZeroOneAdamState(NamedTuple):
    """State of `scale_by_zero_one_adam`. went: the sum of the local steps since the last synchronisation, each rank's.

    Others: as for `fn.transforms.zero_one_adam.ZeroOneAdamState`.
    """

    step: Tensor
    mu: Tree
    nu: Tree
    went: Tree
    elapsed: Tensor
    dropped: Tensor
    peak: Tensor
    sync: Tree


def _taken_back(state: ZeroOneAdamState, params: list[Tensor]) -> list[Tensor]:
    """Return the params after the last synchronisation, without the local steps that followed it."""
    return [p.to(w.dtype) - w for p, w in zip(params, tree.leaves(state.went), strict=True)]


def scale_by_zero_one_adam(
    lr: Tensor | float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    *,
    sync: Transform,
    frozen: bool,
    alone: bool,
) -> Transform:
    """Do as `fn.scale_by_zero_one_adam` in the warm-up, and as DeepSpeed in the compressed and the local phase.

        before the freeze:   mu <- b1 mu + (1 - b1) C(g_r);   p <- p - lr (mu / (sqrt(nu) + eps) + wd p)
        local step:          mu <- b1 mu + (1 - b1) g_r;      d = -lr (mu / (sqrt(nu) + eps) + wd p);   p <- p + d
        synchronising step:  a local step, then, with e the sum of d since the last one,
            s = C(e (sqrt(nu) + eps)),  mu <- -s / sum of lr,  p <- p - e + s / (sqrt(nu) + eps)

    Momentum and steps are not kept at zero where nu is zero. The rebuilt momentum contains the decay, and the ranks
    drift apart by rounding, for no anchor brings them back to the same numbers.

    Args: frozen: whether the variance is; the state is the same before and behind that. alone: whether there is a
        single rank, whose momentum rests in a compressed step before the freeze.
    """
    check_betas(b1, b2, eps)
    check_decay(weight_decay)
    check_rate(lr)

    def init(params: Tree) -> ZeroOneAdamState:
        step, mu, nu = start_moments(params)
        elapsed = torch.zeros((), dtype=widest(mu), device=step.device)
        peak = torch.zeros((), dtype=torch.float32, device=step.device)
        went = tree.map(torch.zeros_like, mu)
        return ZeroOneAdamState(step, mu, nu, went, elapsed, torch.zeros_like(step), peak, sync.init(mu))

    def step_together(mu: Tree, state: ZeroOneAdamState, params: Tree) -> tuple[Tree, ZeroOneAdamState]:
        out = common_step(lr, eps, weight_decay, mu, state.nu, params)
        peak = peak_of(state.peak, all_finite(tree.leaves(out)))
        return out, state._replace(step=state.step + 1, mu=mu, peak=peak)

    def step_alone(updates: Tree, state: ZeroOneAdamState, params: Tree) -> tuple[Tree, Tree]:
        mu = moving_average(state.mu, updates, b1)
        moves = tree.map(lambda u: (-lr * u).to(u.dtype), adam_direction(mu, state.nu, eps))
        if weight_decay > 0:
            moves = tree.map(lambda u, p: (u - lr * weight_decay * p.to(u.dtype)).to(u.dtype), moves, params)
        return moves, mu

    def warmup(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        check_synchronised(state.elapsed)
        nu = moving_average_of_squares(state.nu, updates, b2)
        state = state._replace(nu=nu, peak=largest(updates))
        return step_together(moving_average(state.mu, updates, b1), state, params)

    def average_gradients(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        # One rank alone takes its momentum for the mean, so that it rests, as DeepSpeed's does.
        wide = tree.map(lambda m, g: g.to(m.dtype), state.mu, state.mu if alone else updates)
        mean, errors = sync.compressed_update(wide, state.sync, params)
        mu = moving_average(state.mu, mean, b1)
        return step_together(mu, state._replace(sync=errors, peak=largest(mean)), params)

    def local(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        moves, mu = step_alone(updates, state, params)
        # This rank decides alone; the learning rates add up in any case, for all ranks divide by the same sum later.
        ok = all_finite([*tree.leaves(moves), *tree.leaves(updates)]).to(state.dropped.device)
        moves, mu = kept_if(ok, moves, mu, state.mu)
        went, dropped = tree.map(torch.add, state.went, moves), state.dropped + (~ok).to(torch.int64)
        elapsed = (state.elapsed + lr).to(state.elapsed.dtype)
        return moves, state._replace(step=state.step + 1, mu=mu, went=went, elapsed=elapsed, dropped=dropped)

    def synchronise(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        moves, _ = step_alone(updates, state, params)
        elapsed = (state.elapsed + lr).to(state.elapsed.dtype)
        went = tree.map(torch.add, state.went, moves)
        scaled = tree.map(lambda e, v: e * rules.denominator(v, eps), went, state.nu)
        mean, errors = sync.compressed_update(scaled, state.sync, params)
        mu = rebuilt_momentum(mean, elapsed)

        def move(p: Tensor, u: Tensor, e: Tensor, s: Tensor, v: Tensor) -> Tensor:
            return (p.to(u.dtype) + u - e + over_root(s, v, eps)).to(u.dtype)

        new_params = tree.map(move, params, moves, went, mean, state.nu)
        peak = peak_of(largest(mean), all_finite([*tree.leaves(new_params), *tree.leaves(mu)]))
        zeros = tree.map(torch.zeros_like, went)
        state = state._replace(mu=mu, went=zeros, elapsed=torch.zeros_like(elapsed), peak=peak, sync=errors)
        return NewParams(new_params), state._replace(step=state.step + 1)

    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL})
    synced = facts_of(sync).averaged.compressed
    facts = facts_of(sync)._replace(averages=Averages((), synced, synced))
    return Transform(
        init, warmup, synchronise if frozen else average_gradients, local, needs_warmup=needs, facts=facts
    )


@roles.declare(first_moment=("mu",), second_moment=("nu",))
class PaddedLambState(NamedTuple):
    """As `fn.transforms.lamb.OnebitLambState`, and the padding, whose momentum travels behind that of all tensors."""

    step: Tensor
    mu: Tree
    nu: Tree
    nu_fresh: Tree
    coefficient: Tree
    factor: Tree
    ratio: Tree
    scaling: Tree
    padding: Tensor
    sync: Tree


def scale_by_onebit_lamb(
    hypers: Sequence[LambHyper], *, sync: Transform, padding: int, copy_fresh: bool = True
) -> Transform:
    """Do as `fn.scale_by_onebit_lamb`, with hyper-parameters of each tensor and with padding behind the momentum.

    The padding starts at zero, and what returns of it goes into the next message undecayed. A momentum is not kept at
    zero where nu is zero.

    Args:
        hypers: in the order of the leaves. sync: averages the pair (momentum, padding). padding: its length.
        copy_fresh: start nu_fresh from nu. False: from zero, which DeepSpeed does with a freeze step below 2.
    """
    for hyper in hypers:
        check_hyper(hyper)

    def init(params: Tree) -> PaddedLambState:
        fields = start_lamb(params)
        leaves = tree.leaves(fields[1])
        like = leaves[0] if leaves else torch.zeros((), dtype=torch.float32, device="cpu")
        tail = like.new_zeros(padding)
        return PaddedLambState._make([*fields, tail, sync.init((fields[1], tail))])

    def warmup(updates: Tree, state: PaddedLambState, params: Tree, /) -> tuple[Tree, PaddedLambState]:
        updates, params = check_arguments(updates, state, params, PaddedLambState, "mu")
        out, after = warm_step(hypers, updates, state, params)
        return out, after if copy_fresh else after._replace(nu_fresh=state.nu_fresh)

    def compressed(updates: Tree, state: PaddedLambState, params: Tree, /) -> tuple[Tree, PaddedLambState]:
        updates, params = check_arguments(updates, state, params, PaddedLambState, "mu")
        leaves, structure = tree.flatten(updates)
        rows = zip(hypers, leaves, tree.leaves(state.mu), tree.leaves(state.scaling), strict=True)
        local = tree.unflatten(structure, [torch.lerp(g.to(m.dtype), m, h.b1) * s for h, g, m, s in rows])
        sent, beside = (local, state.padding), (params, state.padding)
        (mean, tail), errors = sync.compressed_update(sent, state.sync, beside)
        mu = tree.map(lambda m, s: m / s, mean, state.scaling)
        out, state = frozen_step(hypers, math.inf, mu, state, params)
        return out, state._replace(padding=tail, sync=errors)

    local, frozen = missing(Phase.LOCAL, "1-bit LAMB"), frozenset({Phase.COMPRESSED})
    facts = merged(facts_of(sync), Facts(whole=("scale_by_onebit_lamb",)))
    facts = facts._replace(averages=Averages((), facts.averaged.compressed))
    return Transform(init, warmup, compressed, local, needs_warmup=frozen, facts=facts)


def onebit_adam(groups: Sequence[ParamGroup], *, axis: str, world_size: int) -> list[Transform]:
    """Return DeepSpeed's 1-bit Adam for each param group; without bias correction."""

    def one(g: ParamGroup) -> Transform:
        sync = _masked_sync(axis, world_size, g.exp_avg_mask)
        tx = chain(
            average(axis),
            scale_by_onebit_adam(g.b1, g.b2, g.eps, sync=sync),
            add_decayed_weights(g.weight_decay),
            scale_by_learning_rate(g.lr),
        )
        return skip_nonfinite(unfrozen(tx) if g.non_freeze else tx)

    return [one(g) for g in groups]


def zero_one_adam(groups: Sequence[ParamGroup], *, axis: str, world_size: int, frozen: bool) -> list[Transform]:
    """Return DeepSpeed's 0/1 Adam for each param group, before or after the variance is frozen.

    On one rank the mask is not applied.
    """

    def one(g: ParamGroup) -> Transform:
        sync = _masked_sync(axis, world_size, g.exp_avg_mask if world_size > 1 else None)
        hyper = g.lr, g.b1, g.b2, g.eps, g.weight_decay
        link = scale_by_zero_one_adam(*hyper, sync=sync, frozen=frozen, alone=world_size == 1)
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
    # DeepSpeed pads the joined momenta to this, and the padding gets a momentum of its own.
    align = world_size * math.lcm(world_size, 8)
    masks = tuple([g.exp_avg_mask] * len(g.sizes) for g in groups)
    sync = compressed_average(axis, codec(world_size), layout="fused")
    if any(g.exp_avg_mask is not None for g in groups):
        sync = chain(sync, apply_mask((masks, None)))
    link = scale_by_onebit_lamb(hypers, sync=sync, padding=-total % align, copy_fresh=copy_fresh)
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
    """Return the state with zero errors, and zeros for LAMB's padding, which is how DeepSpeed restarts."""
    zeros = partial(tree.map, torch.zeros_like)
    return with_field(roles.replace(state, "errors", zeros), "padding", zeros)


def with_field(state: Tree, name: str, f: Callable[[Tree], Tree]) -> Tree:
    """Return a tree of states with f of every field of a name, in the order of `fn.tree.fields`."""
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        pairs = zip(state._fields, state, strict=True)
        return type(state)(*(f(value) if field == name else with_field(value, name, f) for field, value in pairs))
    return tree.rebuilt(state, lambda value: with_field(value, name, f))
