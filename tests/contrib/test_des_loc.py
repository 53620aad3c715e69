"""What `fn.contrib.des_loc` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_rounds import Case, Method, in_simulation, load, replay
from torch import Tensor

import fn
from fn import Round, tree


def gradients(world: int, steps: int) -> Tensor:
    return torch.randn(world, steps, 5, generator=torch.Generator().manual_seed(0))


def test_the_moment_of_a_step_is_averaged_behind_it() -> None:
    """At period 1 what all ranks hold behind step t is the mean of their own moments of step t.

    Differs: fn.contrib._des_loc.des_loc: a moment is averaged after the step that its period ends with; the paper
        averages the moment of the last step just before it is used, which is one step later.
    """
    tx, g = fn.contrib.des_loc(0.1, b1=0.5, b2=0.5, axis="data"), gradients(2, 1)
    dims = fn.rank_dims(tx.init(g[0, 0]))

    def step(g: Tensor) -> Any:
        return tx.update(Round(1, 1))(g, tx.init(g), torch.zeros_like(g))[1]

    state = fn.simulate(step, "data", 2, out_dims=dims)(g[:, 0])
    (mu,) = tree.fields(state, "mu")
    torch.testing.assert_close(mu, g[:, 0].mean(0).expand(2, -1))


def test_periods_say_when_each_is_due() -> None:
    schedule = fn.contrib.periods(2, 3, 4, start=1)
    assert schedule(0) is fn.Phase.WARMUP
    numbers = [schedule(t).begin for t in range(1, 13)]
    assert numbers == [None, 0, 1, 4, None, 2, None, 4, 1, 0, None, 6]
    assert [schedule(t).end for t in range(1, 13)] == numbers
    for bad in ({"params": 0}, {"first_moment": 1.5}, {"second_moment": -1}, {"start": -1}):
        with pytest.raises((TypeError, ValueError), match=rf"{next(iter(bad))}: expected a whole number"):
            fn.contrib.periods(**{"params": 1, "first_moment": 1, "second_moment": 1, **bad})


RECORDED = load("index.json", Path(__file__).parent / "golden/des_loc")
each_recorded = pytest.mark.parametrize("case", RECORDED, ids=[case.row["name"] for case in RECORDED])


def recorded(case: Case) -> Method:
    periods = [case.hyper[name] for name in ("Kx", "Ku", "Kv")]
    hyper = case.hyper["inner"]
    tx = fn.contrib.des_loc(hyper["lr"], *hyper["betas"], weight_decay=hyper["weight_decay"], axis="data")
    return Method(tx, fn.contrib.periods(*periods))


@each_recorded
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    method = recorded(case)
    assert 0 < replay(case, method, *in_simulation(case, method.tx)) <= 1
