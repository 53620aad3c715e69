"""NoLoCo: local steps, and averages of two ranks in place of all; ranks never agree on one anchor.

turn k     pairs of ranks, by a hash of (seed, k) that all ranks compute
ranks a, b  d <- mean(d_a, d_b) + pull (x - mean(x_a, x_b))       one message from a to b and one back; nobody else
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_is_transform, check_number, check_whole, checked
from fn.base import Guarded, check_params, check_state, facts_of, unchanged
from fn.collectives.agreement import check_agreement, describe, device_of
from fn.collectives.simulation import replicated_if_equal
from fn.errors import expected
from fn.facts import Averages
from fn.kernels.tracing import is_concrete
from fn.roles import declare
from fn.transforms.average import agreed
from fn.transforms.decay_and_lr import check_rate
from fn.transforms.skip_nonfinite import SkipState, all_finite

__all__ = ["no_loco", "own_anchors", "pair_average", "random_pairs"]

Tree = Any
Pairs = Callable[[int, int], Sequence[int]]
"""(turn, ranks) -> for each rank the one that it averages with, which may be itself."""


MASK = 2**32 - 1


def hashed(x: int) -> int:
    """Return 32 bits that look random, as a whole number. x: below 2^33."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = x & MASK
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 15)


@checked("turn", "ranks", "seed")
def random_pairs(turn: int, ranks: int, seed: int = 0) -> list[int]:
    """Return for each rank its partner in a turn; one of an odd number of ranks is its own.

    Take it in a `pairs` of your own for `pair_average`, whose default it is:

        >>> import fn
        >>> fn.contrib.random_pairs(0, 5), fn.contrib.random_pairs(1, 5)
        ([2, 4, 0, 3, 1], [0, 3, 4, 1, 2])

    Args: turn: number of the average. ranks: how many there are. seed: of the pairs; all ranks need the same one.
    Returns: a list of the ranks' partners, which is its own inverse.
    """
    key = hashed(hashed(seed % MASK) + turn % MASK)
    order = sorted(range(ranks), key=lambda rank: (hashed(key + rank), rank))
    partners = [*range(ranks)]
    for a, b in zip(order[::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return partners


@declare(rank_local=("left_out",), left_out=("left_out",))
class PairAverageState(NamedTuple):
    """State of `pair_average`.

    turn: averages so far, 0-d int64 in the host's memory, where it says who the pairs are. left_out: those of this
    rank's that were not finite, 0-d int64.
    """

    turn: Tensor
    left_out: Tensor


def pair_average(axis: str, *, pull: float = 0.0, seed: int = 0, pairs: Pairs | None = None) -> fn.Transform:
    """Average differences between two ranks, and pull their anchors together, in every compressed step with others.

        d <- mean(d) + pull (x - mean(x))        the means of this rank and another one; x: the params, in float32

    It is a `sync` of `own_anchors`, whose params are the anchors. `outer` refuses it: its anchor is the same on
    all ranks.

        >>> import torch, fn
        >>> tx = fn.contrib.pair_average("data", pull=0.5)
        >>> def turn(d, x):
        ...     return tx.update(fn.Phase.COMPRESSED)(d, tx.init(x), x)[0]
        >>> fn.simulate(turn, "data", 2)(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]))
        tensor([[1.],
                [3.]])

    Where the numbers of one of the two are not finite, a rank keeps its own d, and d = 0 if that is not finite, and
    counts it: others know nothing of it, and go on. In the warm-up and the local phase the updates pass.

    Args:
        axis: the axis' name. pull: how strongly anchors attract each other, at least 0.
        seed: of the pairs, which are others in every turn. With an odd number of ranks one stays alone.
        pairs: (turn, ranks) -> for each rank its partner, in place of random ones; the same on all ranks.
    Returns: a transform with a `PairAverageState`. Its compressed update runs where the turn is a number that the host
        knows, so not inside of torch.compile.
    Raises: TypeError or ValueError that names the argument; from the update, if the partners are no pairs.

    Paper: Kolehmainen et al., NoLoCo (arXiv 2506.10911), section 3.
    """
    check_number("pull", pull)
    if not 0 <= pull < float("inf"):
        raise ValueError(expected("pull", "a number of at least 0", f"{pull}"))
    check_whole("seed", seed)
    if not isinstance(axis, str):
        raise ValueError(expected("axis", "the name of one axis", f"{axis!r}"))
    if pairs is not None and not callable(pairs):
        raise TypeError(expected("pairs", "a function of (turn, ranks), or None", f"{pairs!r}"))
    partners_in = pairs if pairs is not None else lambda turn, ranks: random_pairs(turn, ranks, seed)

    def init(params: Tree) -> PairAverageState:
        tree.check_real(params, "params")
        check_agreement(axis, {"pull": float(pull), "seed": seed, "pairs": describe(pairs)}, device_of(params))
        turn = torch.zeros((), dtype=torch.int64, device="cpu")
        return PairAverageState(turn, torch.zeros((), dtype=torch.int64, device=device_of(params)))

    def compressed(updates: Tree, state: PairAverageState, params: Tree, /) -> tuple[Tree, PairAverageState]:
        check_state(state, PairAverageState)
        check_params(params)
        turn = replicated_if_equal(state.turn, axis)
        # The pairs depend on the number: a compiled step would let the same ranks meet for good.
        if not is_concrete(turn):
            wanted = "a number that the host knows, for it says which ranks are pairs"
            raise ValueError(expected("state.turn", wanted, "one that is traced or batched", "run it uncompiled"))
        size = fn.axis_size(axis)
        partners = [*partners_in(int(turn), size)]
        # Every rank checks all pairs before it sends: a rank whose partner is with another one would wait for ever.
        if sorted(partners) != [*range(size)] or any(partners[p] != r for r, p in enumerate(partners)):
            wanted = f"for each of the {size} ranks its partner, and partners that have each other"
            raise ValueError(expected("pairs", wanted, f"{partners}"))
        own, structure = tree.flatten(updates)
        # In the dtype of the differences, so that both make one message.
        anchors = [x.to(d.dtype) for x, d in zip(tree.leaves(params), own, strict=True)]
        # a rank alone gets its own, whose mean is itself
        theirs = _swapped([*own, *anchors], axis, partners)
        means = [(x + y) / 2 for x, y in zip([*own, *anchors], theirs, strict=True)]
        ok = all_finite(means)
        # What this rank goes on with where the mean is not finite: its own difference, or none.
        own_is_finite = all_finite(own)
        kept = [torch.where(own_is_finite.to(d.device), d, 0.0) for d in own]
        # `means` has those of the differences first, then those of the anchors.
        pulled = [d + pull * (x - y) for d, x, y in zip(means[: len(own)], anchors, means[len(own) :], strict=True)]
        # Selected without a look: the flag is another one in another pair, and a step that is run again would send.
        found = [torch.where(ok.to(d.device), d, old) for d, old in zip(pulled, kept, strict=True)]
        after = PairAverageState(state.turn + 1, state.left_out + (~ok).to(state.left_out))
        return tree.unflatten(structure, found), after

    facts = fn.Facts((axis,), unequal=True, averages=Averages(compressed=(axis,)))
    return fn.Transform(init, unchanged, compressed, unchanged, facts=facts)


def _swapped(mine: list[Tensor], axis: str, partners: list[int]) -> list[Tensor]:
    """Exchange tensors with the partner, those of one dtype and device in one message."""

    def swap(some: list[Tensor]) -> list[Tensor]:
        # (...) each -> (n,), to the partner and from it
        message = fn.permute(torch.cat([x.reshape(-1) for x in some]), axis, partners)
        # (n,) -> the shapes of what was sent
        return [part.view_as(x) for x, part in zip(some, message.split([x.numel() for x in some]), strict=True)]

    return tree.in_groups(swap, ((x.dtype, x.device) for x in mine), mine)


@declare(rank_local=("inner", "anchor", "pending", "outer", "dropped", "left_out", "sound"))
class OwnAnchorState(fn.OuterState):
    """State of `own_anchors`: anchors and outer states are each rank's own."""

    local_params = True  # there is nothing that all ranks agree on


def own_anchors(
    average: fn.Transform, inner: fn.Transform, outer_tx: fn.Transform, sync: fn.Transform, **settings: Any
) -> fn.Transform:
    """Return `outer` with anchors that may differ between the ranks, guarded in the warm-up.

    Later each rank guards itself: an exchange that is not finite is left out by those who take part in it.

    Args: average: the average of gradients in the warm-up. inner, outer_tx, settings: as for `outer`. sync: an average
        that may differ between the ranks, such as `pair_average`.
    Raises: TypeError that names what is no transform; others as `outer`.

        >>> import torch, fn
        >>> sgd, rate = fn.scale_by_learning_rate(0.5), fn.scale_by_learning_rate(1.0)
        >>> tx = fn.contrib.own_anchors(fn.average("data"), sgd, rate, fn.contrib.pair_average("data"))
        >>> def train(g):                                     # of each rank
        ...     p, state = torch.zeros(1), tx.init(torch.zeros(1))
        ...     for step in range(2):
        ...         updates, state = tx.update(fn.every(2)(step))(g, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.0], [3.0]]))          # 2 steps of 0.5 times 2
        tensor([[-2.],
                [-2.]])
    """
    check_is_transform("average", average)
    check_is_transform("sync", sync)
    # `outer` refuses an average that differs between ranks, for its anchor is the same on all; here it need not be.
    made = fn.outer(inner, outer_tx, sync._replace(facts=facts_of(sync)._replace(unequal=False)), **settings)
    whole = fn.chain(average, made._replace(init=lambda params: OwnAnchorState(*made.init(params))))
    guarded = fn.skip_nonfinite(whole)

    def run(update: fn.UpdateFn, updates: Tree, state: SkipState, params: Tree, /) -> tuple[Tree, SkipState]:
        check_state(state, SkipState)
        moves, inner_state = update(updates, state.inner, params)
        return moves, state._replace(inner=inner_state)

    assert whole.exchange is not None
    # Past the guard: what one pair sees the others do not, so that ranks would skip apart.
    unguarded = whole.exchange.at(0)  # 0: `inner` of the guard's state
    # What was hidden from `outer` is said again to whoever is outside.
    facts = facts_of(guarded)._replace(unequal=True)
    around = Guarded(whole.compressed_update, False, run)
    return guarded._replace(compressed_update=around, exchange=unguarded, facts=facts)


def no_loco(
    lr: float | Tensor = 4e-4,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: str,
    outer_lr: float | Tensor = 0.7,
    outer_momentum: float = 0.5,
    pull: float = 0.9,
    seed: int = 0,
) -> fn.Transform:
    """NoLoCo: local AdamW steps, then an exchange with one other rank, another one each time; no global exchange.

    Take it between many sites of which any two can talk: no exchange waits for all of them.

        d <- mean(x - p) of a pair + pull (x - mean x);    b <- mu b + d;    x <- x - outer_lr b;    p <- x

        >>> import fn
        >>> fn.testing.train(fn.contrib.no_loco(0.05, axis="data"), fn.every(5))
        Loss(before=0.944, after=0.063)

    Args:
        lr, b1, b2, eps, weight_decay: of AdamW. lr: start with AdamW's rate. axis: the ranks that train together.
        outer_lr, outer_momentum: of the outer step. pull: how strongly the anchors of a pair attract each other, in
            units of the outer rate. seed: of the pairs, which follow from it and from the number of the exchange.
    Returns: a transform with a warm-up, exact, and rounds; `every(50)` is its schedule. The ranks' params and anchors
        differ for good, by less the more they exchange.
    Raises: TypeError or ValueError that names the argument.

    Paper: Kolehmainen et al., NoLoCo (arXiv 2506.10911): b <- mu b + lr d + gamma (x - mean x); x <- x - b.
    Differs: `pull` is gamma / lr, as the outer rate stands behind the momentum here.
    """
    rate = fn.scale_by_learning_rate(lr)
    adamw = fn.chain(fn.scale_by_adam(b1, b2, eps), fn.add_decayed_weights(weight_decay), rate)
    check_interval("outer_momentum", outer_momentum, "[0, 1)")
    check_rate(outer_lr, "outer_lr")
    outer_tx = fn.chain(fn.trace(outer_momentum), fn.scale_by_learning_rate(outer_lr))
    sync = pair_average(axis, pull=pull, seed=seed)
    return agreed(own_anchors(fn.average(axis), adamw, outer_tx, sync), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""

    def pairs(model: Any, ranks: int) -> list[Any]:
        """Return what goes to one other rank: differences and anchors, in float32 at least."""
        size = 2 * model.params * max(4, model.width)
        return [planner.Message("data", "permute", size)] if ranks > 1 else []

    passes, h = planner.EXCHANGE + 32, options.local_steps
    return [planner.Row("no_loco", pairs, passes, interval=h, local=True, two_level=False)]
