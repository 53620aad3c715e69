"""Pier follows its recorded runs, in simulated ranks and real ones."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_rounds import ROUNDS, Case, exact, in_simulation, inner_of, load
from torch import Tensor

import fn
from fn import Round, tree

CASES = load("index.json", ROUNDS)


def momentum_only(decay: float) -> fn.Transform:
    """Return a momentum that hands on what it is told."""
    kept = fn.trace(decay)
    return fn.lift(kept.init, lambda updates, state, params: (updates, kept.local_update(updates, state, params)[1]))


def pier(case: Case, number: int, *, warm: bool) -> fn.Transform:
    """Take the outer step of an exchange; in the warm-up the anchor becomes the params, and the momentum grows."""
    outer, rate = case.hyper["outer"], fn.scale_by_learning_rate
    momentum, lr = outer["momenta"][number], outer["lrs"][number]
    nesterov = fn.chain(fn.trace(momentum, outer["nesterov"]), rate(lr))
    outer_tx = fn.chain(momentum_only(momentum), rate(1.0)) if warm else nesterov
    return fn.outer(inner_of(case.hyper["inner"]), outer_tx, exact())


def replay_pier(case: Case, step: Any, state: Any, params: list[Tensor]) -> float:
    """The warm-up is of local steps on averaged gradients, so that all ranks stay where one of them is."""
    gradients, worst, h = case.gradients(), [0.0], case.hyper["H"]
    for t in range(int(case.hyper["steps"])):
        (number, place), warm = divmod(t, h), t < case.hyper["warmup"]
        g = gradients(t, params)
        if warm:
            g = [x.mean(0).expand_as(x).clone() for x in g]
        ends = place == h - 1
        params, state = step(pier(case, number, warm=warm), Round(0, 0) if ends else Round(), g, state, params)
        worst += [case.off(p, f"p{i}.param", t) for i, p in enumerate(params)]
        if ends:
            (momenta,) = tree.fields(state.outer[0], "mu")
            for i, x in enumerate(state.anchor):
                worst.append(case.off(x, f"p{i}.anchor", number, 0))
                worst.append(case.off(momenta[i], f"p{i}.outer_momentum", number, 0))
    return max(worst)


@pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    assert case.row["method"] == "pier"
    assert 0 < replay_pier(case, *in_simulation(case, pier(case, 0, warm=True))) <= 1
