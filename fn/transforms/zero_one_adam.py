"""0/1 Adam: steps without any message between steps that agree in codes on where the ranks went."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag, check_is_transform
from fn.base import NewParams, Phase, Transform, UpdateFn, check_arguments, declare_rule, facts_of
from fn.collectives.axis import SIMULATED, current_binding
from fn.collectives.simulation import replicated_if_equal
from fn.errors import expected
from fn.facts import Averages
from fn.kernels import rules
from fn.kernels.reference.steps import over_root
from fn.kernels.tracing import is_concrete
from fn.roles import declare
from fn.transforms.adam import (
    FILLED,
    adam_direction,
    by_tensor,
    check_betas,
    limit_of,
    moving_average,
    moving_average_of_squares,
    older,
    start_ages,
    start_moments,
    start_rested,
    started,
    widest,
)
from fn.transforms.decay_and_lr import check_decay, check_rate
from fn.transforms.skip_nonfinite import all_finite, ends

Tree = Any


@declare(
    rank_local=("mu", "anchor", "dropped"),
    first_moment=("mu",),
    second_moment=("nu",),
    copies=("anchor",),
    ages=("ages",),
    rested=("rested",),
    local_params=lambda state, params: tree.leaves(state.anchor) if float(state.elapsed) else None,
    watched=("peak",),
    dropped=("dropped",),
)
class ZeroOneAdamState(NamedTuple):
    """State of `scale_by_zero_one_adam`.

    step, mu, nu, ages, rested: as for Adam; between synchronisations mu differs between ranks. The age of nu counts
        variance steps. That of mu counts local steps that were left out, too, and is `FILLED` behind a synchronising
        step.
    anchor: the params that all ranks agreed on last, in the dtype of the moments. It is made of params that differ
        between ranks, so a simulation cannot know that it is the same on all.
    elapsed: the sum of learning rates since the last synchronisation, 0-d.
    dropped: local steps that this rank left out because its gradient was not finite, 0-d int64.
    peak: the largest magnitude in the last exchange, 0-d, NaN if that or what followed was not finite. Where
        a step in place takes signs of several ranks as they came, it is a bound of that: the largest of their scales.
    sync: the state of the transform that averages.
    """

    step: Tensor
    mu: Tree
    nu: Tree
    ages: tuple[Tensor, ...]
    anchor: Tree
    elapsed: Tensor
    dropped: Tensor
    peak: Tensor
    sync: Tree
    rested: Tree = ()


class ZeroOneAdam(NamedTuple):
    """The hyper-parameters of `scale_by_zero_one_adam`."""

    lr: float | Tensor
    b1: float
    b2: float
    eps: float
    weight_decay: float
    corrected: bool
    max_step: float


@declare_rule(now=True)
class VarianceStep(NamedTuple):
    """The rule of a variance step."""

    hyper: ZeroOneAdam
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


@declare_rule(now=True)
class LocalStep(NamedTuple):
    """The rule of a local step; the decay comes with the synchronisation."""

    hyper: ZeroOneAdam
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


@declare_rule(now=True)
class SynchronisingStep(NamedTuple):
    """The rule of a synchronising step. average: of the steps since the last one."""

    hyper: ZeroOneAdam
    average: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


def scale_by_zero_one_adam(
    lr: float | Tensor,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    sync: Transform,
    bias_correction: bool = False,
    max_step: float | None = None,
) -> Transform:
    """Update the variance in some steps, agree on the parameters in some, and step alone in between.

        variance step (warm-up phase): g is the mean;  nu, mu as Adam;  p <- p - lr mu / (sqrt(nu) + eps)
        local step:                    mu <- b1 mu + (1 - b1) g_r;      p <- p - lr mu / (sqrt(nu) + eps)
        synchronising step (compressed phase): a local step, then, with x the params agreed on last,
            s = C((p - x) (sqrt(nu) + eps)),  mu <- -s / sum of lr,  p <- x + s / (sqrt(nu) + eps),  x <- p

    The learning rate and the weight decay are inside the link, because what is agreed on is where the ranks went; its
    updates are added to the parameters as they are, and a synchronising step returns `NewParams`, the same on all ranks
    bit by bit. Momentum and steps stay zero where nu is zero, as in `scale_by_onebit_adam`.

        >>> import torch, fn
        >>> link = fn.scale_by_zero_one_adam(0.1, sync=fn.compressed_average("data", fn.sign()))
        >>> tx = fn.chain(fn.average("data"), link)
        >>> def steps(g):                                # a rank's gradient; the last step brings params together
        ...     p = torch.zeros(2)
        ...     state = tx.init(p)
        ...     for phase in (fn.Phase.WARMUP, fn.Phase.LOCAL, fn.Phase.LOCAL, fn.Phase.COMPRESSED):
        ...         u, state = tx.update(phase)(g, state, p)
        ...         p = fn.apply_updates(p, u)
        ...     return p
        >>> fn.simulate(steps, "data", 2)(torch.tensor([[1.0, 2.0], [2.0, -0.5]]))
        tensor([[-1.9467, -3.5771],
                [-1.9467, -3.5771]])

    Args:
        lr: a float or a 0-d tensor. b1, b2, eps: as for Adam. weight_decay: decoupled; that of all steps since the last
            synchronisation is applied there, to the params agreed on last, so that no decay enters the momentum.
        sync: the transform that averages the steps. bias_correction: as for `scale_by_onebit_adam`.
        max_step: clamp each element of a step to +-max_step times lr, in a synchronising step to +-max_step times the
            sum of lr since the last one; None for no clamp. Steps of all phases, for the momentum of codes that they
            follow is not clamped. See `scale_by_onebit_adam`.
    Returns: a transform with all three phases. Between synchronisations params and mu differ between ranks. A variance
        step does not bring them together, so none may follow a local step; in `fn.zero_one_schedule` none does.
    Raises: ValueError if an argument is out of range; from a variance step behind a local one, but for a pure one on
        an accelerator, which would have to wait for it.

    Paper: Lu et al., 0/1 Adam (arXiv 2202.06009), algorithm 1; T_v and T_u are `fn.zero_one_schedule`.
    Differs: a variance step uses the exact mean for the momentum, too, and sends no codes. The ranks return to the
        anchor instead of taking their steps back, so they do not drift apart by rounding. A rank whose gradient is
        not finite in a local step leaves that step out alone, and counts it: no message tells the others. Steps are
        clamped to `max_step`.
    """
    check_is_transform("sync", sync)
    check_betas(b1, b2, eps)
    check_decay(weight_decay)
    check_rate(lr)
    check_flag("bias_correction", bias_correction)
    limit = limit_of(max_step)

    def init(params: Tree) -> ZeroOneAdamState:
        step, mu, nu = start_moments(params)
        elapsed = torch.zeros((), dtype=widest(mu), device=step.device)
        peak = torch.zeros((), dtype=torch.float32, device=step.device)
        # A copy: an anchor in the memory of params, which adapters write into, would move with them, and every drift
        # would be zero.
        anchor = tree.map(lambda p, m: p.detach().to(m.dtype, copy=True), params, mu)
        ages, rested = start_ages(step, bias_correction), start_rested(mu, bias_correction)
        dropped = torch.zeros_like(step)
        return ZeroOneAdamState(step, mu, nu, ages, anchor, elapsed, dropped, peak, sync.init(mu), rested)

    def later(elapsed: Tensor) -> Tensor:
        return (elapsed + lr).to(elapsed.dtype)  # here and below: 0-d tensors of two dtypes meet in the wider one

    def zeros_kept(x: Tree, nu: Tree) -> Tree:
        return tree.map(lambda a, v: rules.kept_at_zero(a, v, 0.0, 0.0), x, nu)

    def warmup(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        check_synchronised(state.elapsed)
        state = started(state) if bias_correction else state
        ages = older(state.ages, bias_correction)
        of_mu, of_nu = by_tensor(ages, state.rested)
        mu = moving_average(state.mu, updates, b1, of_mu)
        nu = moving_average_of_squares(state.nu, updates, b2, of_nu)
        out = common_step(lr, eps, weight_decay, mu, nu, params, limit)
        # The largest gradient is a mean, alike on all ranks, so a guard that looks at it skips on all of them.
        peak = peak_of(largest(updates), all_finite(tree.leaves(out)))
        # The ranks agree on the new params, as they are rounded.
        anchor = tree.map(lambda p, u: (p + u).to(p.dtype).to(u.dtype), params, out)
        return out, state._replace(step=state.step + 1, mu=mu, nu=nu, ages=ages, anchor=anchor, peak=peak)

    def momentum(updates: Tree, state: ZeroOneAdamState) -> tuple[Tree, tuple[Tensor, ...]]:
        ages = older(state.ages, bias_correction, frozen=True)
        of_mu, _ = by_tensor(ages, state.rested)
        return zeros_kept(moving_average(state.mu, updates, b1, of_mu), state.nu), ages

    def local(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        mu, ages = momentum(updates, state)
        # Back to the dtype of the moments: a 0-d rate in float64 may decide that of a 0-d update.
        moves = tree.map(lambda u: (-lr * u).to(u.dtype), adam_direction(mu, state.nu, eps, limit))
        # where nu is zero, moves are zero whatever the gradient is
        ok = all_finite([*tree.leaves(moves), *tree.leaves(updates)]).to(state.dropped.device)
        moves, mu = kept_if(ok, moves, mu, state.mu)
        dropped = state.dropped + (~ok).to(torch.int64)
        elapsed = later(state.elapsed)
        return moves, state._replace(step=state.step + 1, mu=mu, ages=ages, elapsed=elapsed, dropped=dropped)

    def synchronise(updates: Tree, state: ZeroOneAdamState, params: Tree, /) -> tuple[Tree, ZeroOneAdamState]:
        updates, params = check_arguments(updates, state, params, ZeroOneAdamState, "mu")
        # The momentum of this step is dropped: it is rebuilt below, from the step that all ranks take. This one is not
        # clamped, for what is cut off before it is sent would be missing from the momentum, too.
        mu, ages = momentum(updates, state)
        elapsed = later(state.elapsed)

        def drift(p: Tensor, x: Tensor, m: Tensor, v: Tensor) -> Tensor:
            # All that this rank went since the anchor, in units of the momentum: codes of steps themselves would move
            # elements with a large second moment as far as those with a small one. This step joins behind the
            # difference, as in the kernels: added to p it would be rounded to the spacing of p, and codes would flip.
            drifted: Tensor = rules.drift(p.to(m.dtype), x, m, v, eps, lr)
            return drifted.to(m.dtype)

        scaled = tree.map(drift, params, state.anchor, mu, state.nu)
        mean, sync_state = sync.compressed_update(scaled, state.sync, params)
        # Before elements are set to zero, which would hide a NaN.
        peak = largest(mean)
        mean = zeros_kept(mean, state.nu)
        mu = rebuilt_momentum(mean, elapsed)

        def move(x: Tensor, s: Tensor, v: Tensor) -> Tensor:
            step = rules.clamped(over_root(s, v, eps), limit * elapsed) if limit < math.inf else over_root(s, v, eps)
            return (x - elapsed * weight_decay * x + step).to(x.dtype)

        # From the anchor, not from the params: steps taken back would leave rounding of another kind on each rank.
        anchor = tree.map(move, state.anchor, mean, state.nu)
        peak = peak_of(peak, all_finite([*tree.leaves(anchor), *tree.leaves(mu)]))
        zero = torch.zeros_like(state.elapsed)
        ages = tuple(torch.full_like(age, FILLED) if i == 0 else age for i, age in enumerate(ages))
        state = state._replace(mu=mu, ages=ages, anchor=anchor, elapsed=zero, peak=peak, sync=sync_state)
        return NewParams(anchor), state._replace(step=state.step + 1)

    frozen = frozenset({Phase.COMPRESSED, Phase.LOCAL})  # nu stays as the last variance step left it
    hyper = ZeroOneAdam(lr, b1, b2, eps, weight_decay, bias_correction, limit)
    variance = VarianceStep(hyper, warmup)
    agreed = SynchronisingStep(hyper, sync.compressed_update, synchronise)
    synced = facts_of(sync).averaged.compressed  # a synchronising step averages what local steps have done, too
    facts = facts_of(sync)._replace(averages=Averages((), synced, synced))
    return Transform(init, variance, agreed, LocalStep(hyper, local), needs_warmup=frozen, facts=facts)


def common_step(
    lr: float | Tensor, eps: float, weight_decay: float, mu: Tree, nu: Tree, params: Tree, max_step: float = math.inf
) -> Tree:
    """Return the updates from moments that all ranks share."""

    def update(u: Tensor, p: Tensor) -> Tensor:
        return (-lr * (u + weight_decay * p.to(u.dtype))).to(u.dtype)

    return tree.map(update, adam_direction(mu, nu, eps, max_step), params)


def kept_if(ok: Tensor, moves: Tree, mu: Tree, mu_last: Tree) -> tuple[Tree, Tree]:
    """Return moves and momentum of a local step; no move, and the last momentum, where the step is left out."""
    moves = tree.map(lambda u: torch.where(ok, u, -0.0), moves)  # -0.0 changes no param, not even one of -0.0
    return moves, tree.map(lambda new, last: torch.where(ok, new, last), mu, mu_last)


def rebuilt_momentum(mean: Tree, elapsed: Tensor) -> Tree:
    """Return minus the mean of steps over the learning rates that they took; zero where these are zero."""
    return tree.map(lambda s: torch.where(elapsed > 0, -s / elapsed, 0.0).to(s.dtype), mean)


def check_synchronised(elapsed: Tensor) -> None:
    """Refuse a variance step behind local ones, where the host can tell: ranks would keep params of their own."""
    if elapsed.device.type == "cpu" and is_concrete(elapsed) and elapsed > 0:
        wanted = "COMPRESSED after LOCAL, for only a synchronising step brings the ranks together again"
        raise ValueError(expected("phase", wanted, "WARMUP", "take a step of COMPRESSED in between"))


def peak_of(peak: Tensor, ok: Tensor) -> Tensor:
    """Return the peak, or NaN where not ok. `ok` is the same on all ranks, although it is made of a rank's own numbers.

    A compiled simulation cannot know that it is the same, so there the peak stays as it is.
    """
    axes = current_binding().axes
    if torch.compiler.is_compiling() and any(bound.transport == SIMULATED for bound in axes.values()):
        return peak
    ok = replicated_if_equal(ok, tuple(axes)) if axes else ok
    return torch.where(ok.to(peak.device), peak, torch.nan)


def largest(updates: Tree) -> Tensor:
    """Return the largest magnitude over all leaves, 0-d float32; NaN or Inf where an element is."""
    # Of no elements there is no largest one: torch raises.
    leaves = [u for u in tree.leaves(updates) if u.numel()]
    # (2 S,) -> ()
    return ends(leaves).abs().max().float() if leaves else torch.zeros((), dtype=torch.float32, device="cpu")
