"""Which ranks' differences count in the mean of a round, and how much: `norm_guard`, a `sync` around a `sync`.

G_r                      the norm of rank r's difference to the anchor, of the fragment that is exchanged
  | outlier              far above its own history, far above the other ranks', or not finite: weight 0
  | w_r                  the weights of the others, of sum 1; every rank computes them from all norms
  | d = sum w_r d_r      clipped
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_is_transform, check_number, check_whole, checked
from fn.base import check_state, facts_of
from fn.collectives.agreement import check_agreement, device_of
from fn.errors import expected
from fn.facts import merged
from fn.kernels import lists, rules
from fn.roles import declare

__all__ = ["Guard", "guarded", "norm_guard", "norm_rule"]

Tree = Any


class Guard(NamedTuple):
    """How `guarded` judges norms: what `norm_guard` makes, or one of your own.

    init: device -> what a rank remembers of its norms, a tree of 0-d tensors.
    is_outlier: (norm, history) -> 0-d bool, whether this rank leaves its own difference out.
    weights: norms (W,), infinite where a difference is left out -> weights (W,) of at least 0, in any unit. Where a
        weight is 0, the difference is left out, too. All ranks get the same norms.
    told: (norm, whether it was left out, history) -> the next history.
    clip: the largest norm of the mean. None: any.
    """

    init: Callable[[torch.device], Tree]
    is_outlier: Callable[[Tensor, Tree], Tensor]
    weights: Callable[[Tensor], Tensor]
    told: Callable[[Tensor, Tensor, Tree], Tree]
    clip: float | None = None


class NormHistory(NamedTuple):
    """What `norm_guard` remembers. norms: how many so far, int64. mean, variance: moving ones, float32. All 0-d."""

    norms: Tensor
    mean: Tensor
    variance: Tensor


@checked("threshold", "alpha", "warmup", "far", "temperature")
def norm_rule(threshold: float, alpha: float, warmup: int, far: float | None, temperature: float | None) -> Guard:
    """Return how `norm_guard` judges differences.

    Take it for a `guarded` that judges alike in all but some points: `norm_rule(...)._replace(weights=...)`.

    Args: as for `norm_guard`, which checks them.
    """

    def init(device: torch.device) -> NormHistory:
        zero = torch.zeros((), dtype=torch.float32, device=device)
        # A clone: of two numbers in one memory, an adapter that writes states in place would keep the last one for
        # both.
        return NormHistory(torch.zeros((), dtype=torch.int64, device=device), zero, zero.clone())

    def is_outlier(norm: Tensor, history: NormHistory) -> Tensor:
        # Without a variance, as of equal norms, any larger norm would be an outlier.
        has_history = (history.norms >= warmup) & (history.variance > 0)
        return has_history & (norm - history.mean > threshold * history.variance.sqrt())

    def weights(norms: Tensor) -> Tensor:
        near = norms if far is None else torch.where(norms <= far * median(norms), norms, math.inf)
        # Relative to the smallest norm: exp(-G / T) itself is zero for all where norms are far above T. If all are
        # infinite, it is NaN, and not selected below.
        found = torch.ones_like(near) if temperature is None else ((near.min() - near) / temperature).exp()
        return torch.where(near.isfinite(), found, 0.0)

    def told(norm: Tensor, out: Tensor, history: NormHistory) -> NormHistory:
        mean = torch.where(history.norms > 0, torch.lerp(history.mean, norm, alpha), norm)
        variance = torch.lerp(history.variance, (norm - mean).square(), alpha)
        new = NormHistory(history.norms + 1, mean, variance)
        kept = out | (norm == 0)  # a rank that has not moved has nothing to say
        return NormHistory(*(torch.where(kept, old, x) for x, old in zip(new, history, strict=True)))

    return Guard(init, is_outlier, weights, told)


def median(norms: Tensor) -> Tensor:
    """Return the median of the finite norms of ranks that have moved, the lower one of two; infinity of none."""
    # Ranks that have not moved are put behind the finite norms, out of the count.
    norms = torch.where(norms > 0, norms, math.inf)
    place = (norms.isfinite().sum() - 1).clamp(min=0) // 2
    # (W,) -> (); gathered, for an index that lies on the device would be waited for
    return norms.sort().values.gather(0, place.view(1))[0]


@declare(
    rank_local=("history", "norm", "weight", "out"),
    local_params=True,
    difference=("weight",),
)
class GuardState(NamedTuple):
    """State of `guarded`, of a fragment. All numbers are 0-d.

    sync: the state of the average inside. history: the guard's. norm: of this rank's last difference. weight: the
    factor of that difference, such as a number of tokens. It has the role of a difference: `outer` sets it to 1 where
    an exchange begins, and a link that multiplies differences multiplies it, too; it is 0 behind a mean that left this
    rank out, which then goes on from the anchor. out: whether it was left out. left_out: how many were left out so far,
    of all ranks. first: the lowest rank that was left out of the last mean, and number: how many were.
    """

    sync: Tree
    history: Tree
    norm: Tensor
    weight: Tensor
    out: Tensor
    left_out: Tensor
    first: Tensor
    number: Tensor


@checked("guard")
def guarded(sync: fn.Transform, guard: Guard) -> fn.Transform:
    """Weigh what ranks send by their norms, as a guard says: `norm_guard` with a rule of your own.

    Args: sync: the average inside. guard: which differences count, and how much.
    Returns: as `norm_guard`.
    Raises: TypeError for what is no transform; ValueError if sync does not name its axes.
    """
    check_is_transform("sync", sync)
    if facts_of(sync).silent:
        cure = "give it facts=fn.Facts(axes=(...,)), for norms are compared over the same axes"
        raise ValueError(expected("sync", "an average that names its axes, for there is a guard", "one without", cure))
    axes = facts_of(sync).axes

    def init(params: Tree) -> GuardState:
        tree.check_real(params, "params")
        device = device_of(params)
        zero, no = torch.zeros((), dtype=torch.float32, device=device), torch.zeros((), dtype=torch.bool, device=device)
        left_out, first, number = (torch.full((), n, dtype=torch.int64, device=device) for n in (0, -1, 0))
        return GuardState(sync.init(params), guard.init(device), zero, zero + 1, no, left_out, first, number)

    def compressed(updates: Tree, state: GuardState, params: Tree, /) -> tuple[Tree, GuardState]:
        check_state(state, GuardState)
        steps, structure = tree.flatten(updates)
        # Before the average: a weight needs the norms of all ranks, and then any average of differences will do.
        steps, after = weighed(guard, state, steps, axes)
        mean, of_sync = sync.compressed_update(tree.unflatten(structure, steps), state.sync, params)
        if guard.clip is not None:
            means, structure = tree.flatten(mean)
            mean = tree.unflatten(structure, clipped(means, guard.clip))
        return mean, after._replace(sync=of_sync)

    def through(update: fn.UpdateFn) -> fn.UpdateFn:
        def run(updates: Tree, state: GuardState, params: Tree, /) -> tuple[Tree, GuardState]:
            check_state(state, GuardState)
            updates, of_sync = update(updates, state.sync, params)
            return updates, state._replace(sync=of_sync)

        return run

    facts = merged(facts_of(sync), fn.Facts(whole=("norm_guard",), tree=("norm_guard",)))
    warmup, local = through(sync.warmup_update), through(sync.local_update)
    return fn.Transform(init, warmup, compressed, local, sync.needs_warmup, facts=facts)


def weighed(
    guard: Guard, state: GuardState, differences: list[Tensor], axes: tuple[str, ...]
) -> tuple[list[Tensor], GuardState]:
    """Tell the other ranks the norm, and multiply the differences by this rank's share: their mean is then weighed.

    If no rank counts, the differences become NaN, and so does the mean, which `outer` then leaves out.
    """
    weight = state.weight
    norm = lists.squared_norms(differences).sum().sqrt().to(state.norm)
    norm = torch.where(weight > 0, norm / weight, norm)  # that of the difference itself
    # NaN compares as no outlier, so it is asked for by itself.
    out = guard.is_outlier(norm, state.history) | ~norm.isfinite()
    # An infinite norm says that a rank leaves itself out, so one message says it all.
    row = torch.stack([torch.where(out, math.inf, norm), weight])  # (2,)
    rows = fn.all_gather(row, axes) if axes else row[None]  # (W, 2)
    ranks = torch.arange(len(rows), dtype=torch.int64, device=norm.device)
    mine = ranks == (fn.axis_index(axes) if axes else 0)  # (W,), the index lies on the host
    norms, tokens = rows.unbind(1)
    weights = guard.weights(norms)
    is_out = ~norms.isfinite() | ~(weights > 0)  # (W,), NaN among them
    weights = torch.where(is_out, 0.0, weights)
    total, out = (weights * tokens).sum(), (is_out & mine).any()
    # Times W, for the average inside divides by W.
    share = len(rows) * torch.where(mine, weights, 0.0).sum() / torch.where(total > 0, total, 1.0)
    number = is_out.sum()
    after = state._replace(
        history=guard.told(norm, out, state.history),
        norm=torch.where(norm.isfinite(), norm, 0.0),  # no state holds what is not finite
        weight=torch.where(out, 0.0, weight),
        out=out,
        left_out=state.left_out + number,
        # (W,) -> (), the first one that is true
        first=torch.where(number > 0, is_out.long().argmax(), -1),
        number=number,
    )
    # what is left out may be NaN, which times 0 is NaN
    kept = lists.elementwise(rules.kept_at_zero, (differences,), share, 0.0, 0.0)
    return lists.elementwise(rules.scaled, (kept,), torch.where(total > 0, share, math.nan)), after


def clipped(means: list[Tensor], clip: float) -> list[Tensor]:
    """Scale a mean down to the largest norm that it may have."""
    if not means:
        return means
    norm = lists.squared_norms(means).sum().sqrt()
    scaled: list[Tensor] = lists.elementwise(rules.scaled, (means,), (clip / (norm + 1e-6)).clamp(max=1.0))
    return scaled


def norm_guard(
    sync: fn.Transform,
    *,
    threshold: float = 3.0,
    alpha: float = 0.02,
    warmup: int = 10,
    far: float | None = 100.0,
    temperature: float | None = None,
    clip: float | None = None,
) -> fn.Transform:
    """Leave out of a round's mean what is an outlier by its norm: a spike, a NaN, or what a broken rank sends.

    Take it where ranks break, or data are dirty: one difference of 1e30 ruins the anchor of all ranks otherwise.

        z_r = (G_r - m_r) / sqrt(v_r);    w_r = exp(-G_r / T), 0 where z_r is above the threshold
        d = sum w_r d_r / sum w_r;    d <- d min(1, clip / |d|)
        m_r <- a G_r + (1 - a) m_r;    v_r <- (1 - a) v_r + a (G_r - m_r)^2      where G_r is no outlier

    A difference is an outlier, too, if its norm is more than `far` times the median of all ranks' norms, or is not
    finite. So the first exchanges are guarded, in which nobody has a history. If all are outliers, the mean is NaN, so
    `outer` leaves out the exchange. The norms are one message of 8 bytes from each rank to all others.

        >>> import torch, fn
        >>> rate, mean = fn.scale_by_learning_rate(1.0), fn.compressed_average("data", fn.identity(), fn.off())
        >>> tx = fn.outer(rate, rate, fn.contrib.norm_guard(mean))
        >>> def train(g):                                     # of each rank; rank 2 is broken
        ...     p, state = torch.zeros(1), tx.init(torch.zeros(1))
        ...     updates, state = tx.update(fn.Round(0, 0))(g, state, p)
        ...     return fn.apply_updates(p, updates)
        >>> fn.simulate(train, "data", 3)(torch.tensor([[1.0], [3.0], [1e30]]))
        tensor([[-2.],
                [-2.],
                [-2.]])

    Args:
        sync: the average that is guarded, over any axes and in any codes.
        threshold: the largest z. alpha: a in (0, 1], the weight of a new norm. warmup: norms of a rank before it looks
            at z.
        far: how many times the median a norm may be; None: any.
        temperature: T above 0, in units of the norm: the larger a norm, the less its difference counts. None: all that
            are no outliers count alike.
        clip: the largest norm of the mean, above 0. None: any.
    Returns: the `sync` of an `outer`, with a `GuardState`. Norms are of whole fragments, so their params may not be
        shards.
    Raises: TypeError or ValueError that names the argument.

    Paper: Cheng et al., EDiT (arXiv 2412.07210): the pseudo-gradient penalty.
    Differs: `far`, which bounds the first norms; NaN is an outlier, and in the authors' code it reaches all ranks.
        There an outlier's norm is told to its history, which makes it blind for long, and larger norms count more where
        there is no temperature. If all are outliers, their params go back to the anchor, as on_skip="anchor" does.
    """
    above_zero = {"threshold": threshold, "far": far, "temperature": temperature, "clip": clip}
    for name, value in above_zero.items():
        if value is None and name != "threshold":
            continue
        check_number(name, value)
        if value is None or not 0 < value < math.inf:
            raise ValueError(expected(name, "a number above 0", f"{value}"))
    check_interval("alpha", alpha, "(0, 1]")
    check_whole("warmup", warmup, 0)
    rule = norm_rule(threshold, alpha, warmup, far, temperature)._replace(clip=clip)
    tx, axes = guarded(sync, rule), facts_of(sync).axes

    def init(params: Tree) -> GuardState:
        if axes:
            check_agreement(
                axes[0] if len(axes) == 1 else axes, {**above_zero, "alpha": alpha, "warmup": warmup}, device_of(params)
            )
        state: GuardState = tx.init(params)
        return state

    return tx._replace(init=init)
