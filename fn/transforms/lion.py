"""Lion, which steps along the sign of a momentum: `scale_by_lion`, and `lion_direction`, on whose signs ranks vote."""

from __future__ import annotations

from typing import Any, NamedTuple

from fn import tree
from fn.arguments import check_is_transform
from fn.base import Phase, Transform, UpdateFn, check_state, combine, lift
from fn.kernels import rules
from fn.roles import declare
from fn.transforms.adam import check_betas, zero_moments
from fn.transforms.leafwise import apply
from fn.transforms.momentum import LocalMomentumState, MomentumState

Tree = Any


@declare(rank_local=("mu",), first_moment=("mu",))
class SyncedLionState(NamedTuple):
    """State of `scale_by_lion` with a sync. mu: the momentum, each rank's own. sync: the state of that transform."""

    mu: Tree
    sync: Tree


def lion_direction(b1: float = 0.9, b2: float = 0.99) -> Transform:
    """Return what Lion takes the sign of, made of the rank's own gradient; it stands in front of an average.

        u_r = b1 mu_r + (1 - b1) g_r,    mu_r <- b2 mu_r + (1 - b2) g_r

    Args: b1, b2: as for `scale_by_lion`.
    Raises: ValueError if b1 or b2 is outside [0, 1).

    Paper: Liu et al., Distributed Lion (arXiv 2404.00438), algorithm 1, line 4.
    """
    check_betas(b1, b2, 0.0)

    def update(updates: Tree, state: LocalMomentumState, params: Tree, /) -> tuple[Tree, LocalMomentumState]:
        check_state(state, LocalMomentumState)
        tree.check_updates(updates, state.mu)
        direction, mu = apply(rules.lion, (state.mu, updates), b1, b2)
        return direction, LocalMomentumState(mu)

    return lift(lambda params: LocalMomentumState(zero_moments(params)), update, elementwise=True)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99, *, sync: Transform | None = None) -> Transform:
    """Return the sign of b1 mu + (1 - b1) g, in which the gradient weighs more than in the momentum mu that is kept.

        u = sign(C(b1 mu + (1 - b1) g)),    mu <- b2 mu + (1 - b2) g

    The sign of 0 is 0. Where the momentum is not finite, u is NaN.

        >>> import torch, fn
        >>> tx = fn.scale_by_lion()
        >>> params, state = torch.tensor([1.0, 2.0]), tx.init(torch.tensor([1.0, 2.0]))
        >>> for g in ([1.0, -1.0], [-0.05, 4.0]):                   # the momentum outweighs -0.05, not 4
        ...     u, state = tx.update(fn.Phase.WARMUP)(torch.tensor(g), state, params)
        >>> u
        tensor([1., 1.])

    Args:
        b1: weight of the old momentum in the step. b2: its weight in the momentum that is kept. Both are in [0, 1).
        sync: C, the transform that averages the ranks' directions before their sign is taken. The momenta are each
            rank's own and are never averaged. None: a link in front averages the gradients.
    Raises: ValueError if b1 or b2 is outside [0, 1); TypeError if sync is no transform.

    Paper: Chen et al., Symbolic discovery of optimization algorithms (arXiv 2302.06675), algorithm 2; with a sync, Liu
        et al., Distributed Lion (arXiv 2404.00438).
    Differs: of Distributed Lion's votes `sync` gives the mean, and a tie, whose mean is 0, moves nothing; in the
        authors' code it counts as -1, as does a vote of 0.
    """
    check_betas(b1, b2, 0.0)

    def mixed(updates: Tree, mu: Tree) -> tuple[Tree, Tree]:
        """Return the direction, and the next momentum."""
        tree.check_updates(updates, mu)
        direction, after = apply(rules.lion, (mu, updates), b1, b2)
        return direction, after

    if sync is None:

        def update(updates: Tree, state: MomentumState, params: Tree, /) -> tuple[Tree, MomentumState]:
            check_state(state, MomentumState)
            direction, mu = mixed(updates, state.mu)
            return apply(rules.sign_of, (direction,)), MomentumState(mu)

        return lift(lambda params: MomentumState(zero_moments(params)), update, elementwise=True)

    check_is_transform("sync", sync)

    def synced_init(params: Tree) -> SyncedLionState:
        mu = zero_moments(params)
        return SyncedLionState(mu, sync.init(mu))

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        (average,) = updates_of

        def update(updates: Tree, state: SyncedLionState, params: Tree, /) -> tuple[Tree, SyncedLionState]:
            check_state(state, SyncedLionState)
            params = params if params is None else tree.in_order(params, state.mu, "params")
            direction, mu = mixed(updates, state.mu)
            mean, sync_state = average(direction, state.sync, params)
            return apply(rules.sign_of, (mean,)), SyncedLionState(mu, sync_state)

        return update

    return combine([sync], synced_init, compose)
