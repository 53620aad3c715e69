"""Sums of updates: `trace`, as outer optimizers use it; `local_momentum` and `running_sum` around an average."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fn import tree
from fn.base import Facts, Phase, Transform, check_number, check_state, lift, missing
from fn.errors import expected
from fn.roles import Roles
from fn.transforms.adam import moving_average, zeros_like_moment

Tree = Any


class TraceState(NamedTuple):
    """State of `trace`. mu: the sum of the updates, those of the past decayed; float32 for half precision."""

    mu: Tree

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        return Roles(first_moment=("mu",))


def check_weight(argument: str, value: Any) -> None:
    """Refuse a weight of the past outside of [0, 1), by the name that its caller gave it."""
    check_number(argument, value)
    if not 0 <= value < 1:
        raise ValueError(expected(argument, "a number in [0, 1)", f"{value}"))


def trace(decay: float, nesterov: bool = False) -> Transform:
    """Add up the updates, those of the past decayed.

        b <- decay b + d;    u = d + decay b with nesterov, else b

    The learning rate comes behind it, so a rate that changes acts at once, on the past, too.

    Raises: ValueError if decay is outside [0, 1); TypeError if nesterov is no bool.

    Paper: Polyak, Some methods of speeding up the convergence of iteration methods (1964); the form of
        `torch.optim.SGD` without dampening.
    """
    check_weight("decay", decay)
    if not isinstance(nesterov, bool):
        raise TypeError(expected("nesterov", "True or False", f"{nesterov!r}"))

    def init(params: Tree) -> TraceState:
        tree.check_real(params, "params")
        return TraceState(tree.map(zeros_like_moment, params))

    def update(updates: Tree, state: TraceState, params: Tree, /) -> tuple[Tree, TraceState]:
        check_state(state, TraceState)
        tree.check_updates(updates, state.mu)
        mu = tree.map(lambda b, d: torch.add(d.to(b.dtype), b, alpha=decay), state.mu, updates)
        out = tree.map(lambda b, d: torch.add(d.to(b.dtype), b, alpha=decay), mu, updates) if nesterov else mu
        return out, TraceState(mu)

    return lift(init, update, elementwise=True)


class LocalMomentumState(NamedTuple):
    """State of `local_momentum`. mu: the moving average, each rank's own; float32 for half precision."""

    mu: Tree

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that are one rank's own."""
        return frozenset({"mu"})

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        return Roles(first_moment=("mu",))


def local_momentum(eta: float) -> Transform:
    """Take a moving average of the rank's own updates, in front of an average over the ranks.

        v_r <- (1 - eta) v_r + eta g_r

    It is never averaged, and so differs from rank to rank. On another number of ranks each goes on with the mean.

    Args: eta: weight of the new update, 0 < eta <= 1; 1 keeps nothing, 0.1 averages over about ten steps.
    Raises: TypeError if eta is no number; ValueError if it is out of range.

    Paper: Fatkhullin, Tyurin and Richtarik, Momentum provably improves error feedback (arXiv 2305.15155), algorithm 1;
        Bernstein et al., signSGD with majority vote (arXiv 1810.05291), algorithm 1, with beta = 1 - eta.
    """
    check_number("eta", eta)
    if not 0 < eta <= 1:
        raise ValueError(expected("eta", "a number in (0, 1]", f"{eta}"))

    def init(params: Tree) -> LocalMomentumState:
        tree.check_real(params, "params")
        return LocalMomentumState(tree.map(zeros_like_moment, params))

    def update(updates: Tree, state: LocalMomentumState, params: Tree, /) -> tuple[Tree, LocalMomentumState]:
        check_state(state, LocalMomentumState)
        tree.check_updates(updates, state.mu)
        mu = moving_average(state.mu, tree.in_order(updates, state.mu, "updates"), 1.0 - eta)
        return mu, LocalMomentumState(mu)

    return lift(init, update, elementwise=True)


class RunningSumState(NamedTuple):
    """State of `running_sum`. total: what arrived so far; float32 for half precision."""

    total: Tree


def running_sum() -> Transform:
    """Add up the updates in the compressed phase; behind an average of `differences`, which it turns into the mean.

        s <- s + u;    u = s

    In the warm-up, where the mean itself arrives, s becomes that. There is no local phase.

    Paper: Richtarik, Sokolov and Fatkhullin, EF21 (arXiv 2106.05203), algorithm 2, line 8.
    """

    def init(params: Tree) -> RunningSumState:
        tree.check_real(params, "params")
        return RunningSumState(tree.map(zeros_like_moment, params))

    def whole(updates: Tree, state: RunningSumState, params: Tree, /) -> tuple[Tree, RunningSumState]:
        check_state(state, RunningSumState)
        tree.check_updates(updates, state.total)
        total = tree.map(lambda s, u: u.to(s.dtype), state.total, updates)
        return total, RunningSumState(total)

    def summed(updates: Tree, state: RunningSumState, params: Tree, /) -> tuple[Tree, RunningSumState]:
        check_state(state, RunningSumState)
        tree.check_updates(updates, state.total)
        total = tree.map(lambda s, u: s + u.to(s.dtype), state.total, updates)
        return total, RunningSumState(total)

    return Transform(init, whole, summed, missing(Phase.LOCAL, "a running sum of what ranks send"), facts=Facts())
