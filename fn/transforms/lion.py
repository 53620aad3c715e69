"""Lion: the sign of a momentum. `scale_by_lion`, and `lion_direction`, of which ranks may vote."""

from __future__ import annotations

from typing import Any, NamedTuple

from fn import tree
from fn.base import Phase, Transform, UpdateFn, check_is_transform, check_state, combine, lift
from fn.roles import Roles
from fn.transforms.adam import check_betas, moving_average, zeros_like_moment
from fn.transforms.scaling import sign_of

Tree = Any


class LionState(NamedTuple):
    """State of `scale_by_lion`. mu: the momentum, like the params; float32 for half precision."""

    mu: Tree

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        return Roles(first_moment=("mu",))


class SyncedLionState(NamedTuple):
    """State of `scale_by_lion` with a sync. mu: the momentum, each rank's own. sync: the state of the mean."""

    mu: Tree
    sync: Tree

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that are one rank's own."""
        return frozenset({"mu"})

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        return Roles(first_moment=("mu",), others=("sync",))


class LocalLionState(NamedTuple):
    """State of `lion_direction`. mu: the momentum, each rank's own; float32 for half precision."""

    mu: Tree

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that are one rank's own."""
        return frozenset({"mu"})

    @property
    def roles(self) -> Roles:
        """Say what the fields are."""
        return Roles(first_moment=("mu",))


def lion_direction(b1: float = 0.9, b2: float = 0.99) -> Transform:
    """Return what Lion takes the sign of, from the rank's own updates; it stands in front of an average.

        u_r = b1 mu_r + (1 - b1) g_r,    mu_r <- b2 mu_r + (1 - b2) g_r

    Args: b1, b2: as for `scale_by_lion`.
    Raises: ValueError if b1 or b2 is outside [0, 1).

    Paper: Liu et al., Distributed Lion (arXiv 2404.00438), algorithm 1, line 4.
    """
    check_betas(b1, b2, 0.0)

    def init(params: Tree) -> LocalLionState:
        tree.check_real(params, "params")
        return LocalLionState(tree.map(zeros_like_moment, params))

    def update(updates: Tree, state: LocalLionState, params: Tree, /) -> tuple[Tree, LocalLionState]:
        check_state(state, LocalLionState)
        tree.check_updates(updates, state.mu)
        updates = tree.in_order(updates, state.mu, "updates")
        mu = moving_average(state.mu, updates, b2)
        return moving_average(state.mu, updates, b1), LocalLionState(mu)

    return lift(init, update, elementwise=True)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99, *, sync: Transform | None = None) -> Transform:
    """Return the sign of a momentum, which weighs the gradient more than the momentum that is kept does.

        u = sign(C(b1 mu + (1 - b1) g)),    mu <- b2 mu + (1 - b2) g

    The sign of 0 is 0, and where the momentum is not finite, u is NaN.

    Args:
        b1: weight of the old momentum in the step, b2: in the momentum that is kept; both in [0, 1).
        sync: what averages the ranks' directions before their sign is taken, C, in the phases in which it does. Their
            momenta stay their own and are never averaged. None: the gradients are averaged in front of the link.
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
        updates = tree.in_order(updates, mu, "updates")
        return moving_average(mu, updates, b1), moving_average(mu, updates, b2)

    if sync is None:

        def init(params: Tree) -> LionState:
            tree.check_real(params, "params")
            return LionState(tree.map(zeros_like_moment, params))

        def update(updates: Tree, state: LionState, params: Tree, /) -> tuple[Tree, LionState]:
            check_state(state, LionState)
            direction, mu = mixed(updates, state.mu)
            return tree.map(sign_of, direction), LionState(mu)

        return lift(init, update, elementwise=True)

    check_is_transform("sync", sync)

    def synced_init(params: Tree) -> SyncedLionState:
        tree.check_real(params, "params")
        mu = tree.map(zeros_like_moment, params)
        return SyncedLionState(mu, sync.init(mu))

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        (found,) = updates_of

        def update(updates: Tree, state: SyncedLionState, params: Tree, /) -> tuple[Tree, SyncedLionState]:
            check_state(state, SyncedLionState)
            params = params if params is None else tree.in_order(params, state.mu, "params")
            direction, mu = mixed(updates, state.mu)
            mean, after = found(direction, state.sync, params)
            return tree.map(sign_of, mean), SyncedLionState(mu, after)

        return update

    return combine([sync], synced_init, compose)
