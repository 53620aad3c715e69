"""Momentum: `trace`, as SGD and outer optimizers use it; `local_momentum` and `running_sum`, around an average."""

from __future__ import annotations

from typing import Any, NamedTuple

from fn import tree
from fn.arguments import check_flag, check_interval
from fn.base import Phase, Transform, UpdateFn, check_state, declare_rule, lift, missing
from fn.facts import ELEMENTWISE
from fn.kernels import rules
from fn.roles import declare
from fn.transforms.adam import moving_average, zero_moments
from fn.transforms.leafwise import apply

Tree = Any


@declare(first_moment=("mu",))
class MomentumState(NamedTuple):
    """State of `trace` and `scale_by_lion`. mu: the momentum, the same on all ranks; float32 for half precision."""

    mu: Tree


@declare_rule(name="trace", tensorwise=True)
class Trace(NamedTuple):
    """The rule of `trace`, with its arguments."""

    decay: float
    nesterov: bool

    def __call__(self, updates: Tree, state: MomentumState, params: Tree, /) -> tuple[Tree, MomentumState]:
        """Return the directions, and the state with the next momentum."""
        check_state(state, MomentumState)
        tree.check_updates(updates, state.mu)
        mu = apply(rules.plus, (updates, state.mu), self.decay, like=1)
        direction = apply(rules.plus, (updates, mu), self.decay, like=1) if self.nesterov else mu
        return direction, MomentumState(mu)


def trace(decay: float, nesterov: bool = False) -> Transform:
    """Add the updates to a decayed sum of the old ones: momentum, as in SGD.

        b <- decay b + d;    u = d + decay b with nesterov, else b

    The learning rate stands behind it, so that a changed rate scales the whole sum at once.

        >>> import torch, fn
        >>> tx = fn.chain(fn.trace(0.9), fn.scale_by_learning_rate(0.1))
        >>> params, state = torch.tensor([1.0]), tx.init(torch.tensor([1.0]))
        >>> for _ in range(3):
        ...     updates, state = tx.update(fn.Phase.WARMUP)(torch.tensor([1.0]), state, params)
        ...     params = fn.apply_updates(params, updates)
        >>> params                                  # 1 - 0.1 (1 + 1.9 + 2.71)
        tensor([0.4390])

    Raises: ValueError if decay is outside [0, 1); TypeError if nesterov is no bool.

    Paper: Polyak, Some methods of speeding up the convergence of iteration methods (1964); the form of
        `torch.optim.SGD` without dampening.
    """
    check_interval("decay", decay, "[0, 1)")
    check_flag("nesterov", nesterov)

    return lift(lambda params: MomentumState(zero_moments(params)), Trace(decay, nesterov), elementwise=True)


@declare(rank_local=("mu",), first_moment=("mu",))
class LocalMomentumState(NamedTuple):
    """State of `local_momentum` and Lion's direction. mu: the momentum, each rank's own; float32 for half precision."""

    mu: Tree


def local_momentum(eta: float) -> Transform:
    """Take a moving average of the rank's own updates, in front of an average over the ranks.

        v_r <- (1 - eta) v_r + eta g_r

    It is never averaged, and so differs from rank to rank. A checkpoint that is loaded on another number of ranks
    gives each of them the mean.

        >>> import torch, fn
        >>> tx = fn.local_momentum(0.5)
        >>> state = tx.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     v, state = tx.update(fn.Phase.COMPRESSED)(torch.tensor([1.0]), state, torch.zeros(1))
        >>> v                                       # 1 - 0.5^3
        tensor([0.8750])

    Args: eta: weight of the new update, 0 < eta <= 1; 1 keeps nothing, 0.1 averages over about ten steps.
    Raises: TypeError if eta is no number; ValueError if it is out of range.

    Paper: Fatkhullin, Tyurin and Richtarik, Momentum provably improves error feedback (arXiv 2305.15155), algorithm 1;
        Bernstein et al., signSGD with majority vote (arXiv 1810.05291), algorithm 1, with beta = 1 - eta.
    """
    check_interval("eta", eta, "(0, 1]")

    def update(updates: Tree, state: LocalMomentumState, params: Tree, /) -> tuple[Tree, LocalMomentumState]:
        check_state(state, LocalMomentumState)
        tree.check_updates(updates, state.mu)
        mu = moving_average(state.mu, tree.in_order(updates, state.mu, "updates"), 1.0 - eta)
        return mu, LocalMomentumState(mu)

    return lift(lambda params: LocalMomentumState(zero_moments(params)), update, elementwise=True)


@declare(errors=("total",))
class RunningSumState(NamedTuple):
    """State of `running_sum`. total: the sum of all updates so far; float32 for half precision."""

    total: Tree


def running_sum() -> Transform:
    """Add up the updates of compressed steps: behind an average of `differences`, the sum is the mean itself.

        s <- s + u;    u = s

    In the warm-up the mean itself arrives, and s becomes that. There is no local phase.

        >>> import torch, fn
        >>> tx = fn.running_sum()
        >>> state = tx.init(torch.zeros(1))
        >>> for phase, u in [(fn.Phase.WARMUP, 5.0), (fn.Phase.COMPRESSED, 1.0), (fn.Phase.COMPRESSED, -2.0)]:
        ...     s, state = tx.update(phase)(torch.tensor([u]), state, torch.zeros(1))
        >>> s
        tensor([4.])

    Paper: Richtarik, Sokolov and Fatkhullin, EF21 (arXiv 2106.05203), algorithm 2, line 8.
    """

    def update_of(adds: bool) -> UpdateFn:
        def update(updates: Tree, state: RunningSumState, params: Tree, /) -> tuple[Tree, RunningSumState]:
            check_state(state, RunningSumState)
            tree.check_updates(updates, state.total)
            if adds:
                total = apply(rules.added, (state.total, updates))
            else:
                total = tree.map(lambda s, u: u.to(s.dtype), state.total, updates)
            return total, RunningSumState(total)

        return update

    local = missing(Phase.LOCAL, "a running sum of what ranks send")
    return Transform(
        lambda params: RunningSumState(zero_moments(params)),
        update_of(False),
        update_of(True),
        local,
        facts=ELEMENTWISE,
    )
