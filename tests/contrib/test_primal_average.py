"""The average of the params along the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recorded_muon
import torch
from golden_cases import recorded_form
from recorded_rounds import Case, load
from torch import Tensor

import fn
from fn import Phase, tree

FOLDER = Path(__file__).parent / "golden/primal_average"


def sgd(lr: float = 0.1) -> fn.Transform:
    return fn.scale_by_learning_rate(lr)


def by_hand(mu: float, c: float | None, gradients: list[float]) -> tuple[float, float, float]:
    """Return x, y and z after steps of 0.1 from 1, by the three sequences."""
    x = y = z = 1.0
    for k, g in enumerate(gradients, 1):
        keep = 1 - 1 / k if c is None else c
        z = z - 0.1 * g
        x = keep * x + (1 - keep) * z
        y = mu * x + (1 - mu) * z
    return x, y, z


@pytest.mark.parametrize("mu", [0.3, 1.0])
@pytest.mark.parametrize("c", [0.0, 0.9, None])
def test_the_params_are_the_three_sequences(mu: float, c: float | None) -> None:
    gradients = [1.0, -3.0, 0.5, 2.0, 4.0]
    tx = fn.contrib.primal_average(sgd(), interpolation=mu, averaging=c)
    p = torch.ones(1, dtype=torch.float64)
    state = tx.init(p)
    for g in gradients:
        updates, state = tx.update(Phase.WARMUP)(torch.full((1,), g, dtype=torch.float64), state, p)
        p = fn.apply_updates(p, updates)
    x, y, z = by_hand(mu, c, gradients)
    for ours, theirs in ((fn.contrib.primal_params(state, p), x), (p, y), (state.fast, z)):
        assert float(ours) == pytest.approx(theirs, rel=1e-12)


def test_half_precision_has_its_fast_params_in_float32() -> None:
    tx, p = fn.contrib.primal_average(sgd(1e-3)), torch.ones(3, dtype=torch.bfloat16)
    state = tx.init(p)
    for _ in range(8):
        updates, state = tx.update(Phase.WARMUP)(torch.ones_like(p), state, p)
        p = fn.apply_updates(p, updates)
    torch.testing.assert_close(state.fast, torch.full((3,), 0.992))
    assert fn.contrib.primal_params(state, p).dtype == torch.bfloat16


def refusals() -> dict[str, Any]:
    return {
        "interpolation: expected a number in": lambda: fn.contrib.primal_average(sgd(), interpolation=0.0),
        "averaging: expected a number in": lambda: fn.contrib.primal_average(sgd(), averaging=1.0),
        "decays: expected 'fast' or 'params'": lambda: fn.contrib.primal_average(sgd(), decays="z"),  # type: ignore[arg-type]
        "inner: expected a transform with phases only": lambda: fn.contrib.primal_average(fn.diloco(axis="data")),
        "state: expected that of one fn.contrib.primal_average": lambda: fn.contrib.primal_params((), torch.ones(1)),
        r"state: expected z in the shapes of params, \(2, 3\), but got \(3,\)": lambda: fn.contrib.primal_params(
            fn.contrib.primal_average(sgd()).init(torch.ones(3)), torch.ones(2, 3)
        ),
    }


@pytest.mark.parametrize("text", refusals())
def test_what_does_not_fit_is_refused_by_name(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        refusals()[text]()


@recorded_muon.each_of(FOLDER)
def test_averages_along_the_way_are_the_recorded_ones(case: recorded_muon.Case) -> None:
    hyper, rate = case.hyper, fn.scale_by_learning_rate(case.hyper["lr"])
    average = fn.contrib.primal_average(
        fn.chain(fn.scale_by_adam(*hyper["betas"], hyper["eps"]), rate),
        interpolation=hyper["mu_y"],
        averaging=hyper["mu_x"],
        decay=fn.chain(fn.add_decayed_weights(hyper["weight_decay"]), rate),
        decays="params" if hyper["wd_on_y"] else "fast",
    )
    tx = fn.skip_nonfinite(fn.chain(fn.average("data"), average))
    for t, params, state in recorded_muon.replayed(case, tx, lambda step: Phase.WARMUP):
        found = {"param": params, "x": fn.contrib.primal_params(state, params), "z": tree.fields(state, "fast")[0]}
        found |= {"momentum": recorded_form(state, "mu", hyper["betas"])}
        found |= {"variance": recorded_form(state, "nu", hyper["betas"])}
        for name, leaves in found.items():
            for i, x in enumerate(leaves):
                case.hold(x, f"p{i}.{name}", t)


ROUNDS = load("index_rounds.json", FOLDER)


@pytest.mark.parametrize("case", ROUNDS, ids=[case.row["name"] for case in ROUNDS])
def test_the_runs_of_its_authors_code_are_replayed(case: Case) -> None:
    """Where the rate is constant, as here, its square cancels.

    Differs: fn.contrib._primal_average.primal_average: averaging=None weighs all steps alike; the authors' code
        weighs them by the square of the largest learning rate so far, which is the same where the rate is constant.
    """
    hyper, start, gradients = case.hyper["gpa"], case.each("init"), case.gradients()
    rate, free = fn.scale_by_learning_rate(hyper["lr"]), hyper["type"] == "schedule_free"
    betas = hyper["beta1"], hyper["beta2"]
    average = fn.contrib.primal_average(
        fn.chain(fn.scale_by_adam(*betas), rate),
        interpolation=hyper["train_interp_coeff"],
        averaging=None if free else hyper["eval_interp_coeff"],
        decay=fn.chain(fn.add_decayed_weights(hyper["weight_decay"]), rate),
        decays="params" if hyper.get("use_wd_on_y") else "fast",
    )
    tx, params = fn.skip_nonfinite(fn.chain(fn.average("data"), average)), start
    state = tx.init(params)
    dims = fn.rank_dims(state)

    def step(g: list[Tensor], s: Any, p: list[Tensor]) -> tuple[Any, Any]:
        updates, s = tx.warmup_update(g, s, p)
        return fn.apply_updates(p, updates), s

    run, worst = fn.simulate(step, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims)), [0.0]
    for t in range(int(case.hyper["steps"])):
        params, state = run(gradients(t, params), state, params)
        found = {"param": params, "average": fn.contrib.primal_params(state, params)}
        found |= {"z": tree.fields(state, "fast")[0], "exp_avg": recorded_form(state, "mu", betas)}
        for name, leaves in {**found, "exp_avg_sq": recorded_form(state, "nu", betas)}.items():
            worst += [case.off(x, f"p{i}.{name}", t, 0) for i, x in enumerate(leaves)]
    assert 0 < max(worst) <= 1
