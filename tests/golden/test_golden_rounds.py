"""Methods between sites follow their recorded runs, in simulated ranks and real ones; others say what is missing."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import ranks
import torch
from recorded_rounds import ROUNDS, Case, in_simulation, load, on_this_rank, step_of
from torch import Tensor

import fn
from fn import Round, tree

CASES = load("index.json", ROUNDS)

NOT_BUILT = {
    "sparta_diloco": "fn.outer has no averages between its exchanges",
    "eager": "fn.outer has one anchor for all ranks, and an eager step leads each rank to its own",
    "delayed": "fn.every has no delay of a whole round",
    "pier": "fn.outer has no momentum that builds up in the warm-up",
    "edit": "fn.outer has no guard",
    "edit_paper": "fn.outer has no guard",
}
"""Why the runs of a method cannot be replayed yet."""


def inner_of(hyper: dict[str, Any]) -> fn.Transform:
    links = (fn.add_decayed_weights(hyper.get("weight_decay", 0.0)), fn.scale_by_learning_rate(hyper["lr"]))
    if hyper["kind"] == "adamw":
        return fn.chain(fn.scale_by_adam(*hyper.get("betas", (0.9, 0.999))), *links)
    return fn.chain(fn.trace(hyper.get("momentum", 0.0)), *links)


def sparta(case: Case, t: int) -> fn.Transform:
    """Average what the recorded mask of a step says: the originals draw it in three ways, and broadcast it."""
    masks = [mask[t, 0].bool() for mask in case.each("mask")]

    def share(updates: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        pairs = zip(masks, updates, fn.pmean(updates, "data"), strict=True)
        return [torch.where(mask, mean, own) for mask, own, mean in pairs]

    return fn.average_params(inner_of(case.hyper["inner"]), fn.stateless(share))


def replay(case: Case, step: Any, state: Any, params: list[Tensor], rank: int | None = None) -> float:
    """Take all steps, from gradients at our own params; return how far off anything was, in units of the tolerance."""
    gradients, worst = case.gradients(rank), [0.0]
    for t in range(int(case.hyper["steps"])):
        params, state = step(METHODS[case.row["method"]](case, t), Round(0, 0), gradients(t, params), state, params)
        worst += [case.off(p, f"p{i}.param", t, rank) for i, p in enumerate(params)]
        for name, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
            if f"p0.{name}" in case.arrays:
                (leaves,) = tree.fields(state.inner, field)
                worst += [case.off(x, f"p{i}.{name}", t, rank) for i, x in enumerate(leaves)]
    return max(worst)


METHODS = {"sparta": sparta}
BUILT = [case for case in CASES if case.row["method"] in METHODS]
AVERAGED = [case for case in CASES if case.row["method"] == "gpa"]


def marked(case: Case) -> Any:
    reason = NOT_BUILT.get(case.row["method"])
    return pytest.param(case, id=case.row["name"], marks=[pytest.mark.skip(reason=reason)] if reason else [])


@pytest.mark.parametrize("case", [*map(marked, [case for case in CASES if case not in AVERAGED])])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    assert 0 < replay(case, *in_simulation(case, METHODS[case.row["method"]](case, 0))) <= 1


def replay_on_rank(case: Case, rank: int) -> float:
    tx, start = METHODS[case.row["method"]](case, 0), case.each("init")
    return replay(case, step_of, tx.init(start), start, rank)


@pytest.mark.parametrize("case", AVERAGED, ids=[case.row["name"] for case in AVERAGED])
def test_averages_along_the_way_are_the_recorded_ones(case: Case) -> None:
    """Where the rate is constant, as here, its square cancels.

    Differs: fn.transforms.primal_average.primal_average: averaging=None weighs all steps alike; the authors' code
        weighs them by the square of the largest learning rate so far, which is the same where the rate is constant.
    """
    hyper, start, gradients = case.hyper["gpa"], case.each("init"), case.gradients(None)
    rate, free = fn.scale_by_learning_rate(hyper["lr"]), hyper["type"] == "schedule_free"
    average = fn.primal_average(
        fn.chain(fn.scale_by_adam(hyper["beta1"], hyper["beta2"]), rate),
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
        found = {"param": params, "average": fn.primal_params(state, params)}
        found |= {"z": tree.fields(state, "fast")[0], "exp_avg": tree.fields(state, "mu")[0]}
        for name, leaves in {**found, "exp_avg_sq": tree.fields(state, "nu")[0]}.items():
            worst += [case.off(x, f"p{i}.{name}", t, 0) for i, x in enumerate(leaves)]
    assert 0 < max(worst) <= 1


@pytest.mark.parametrize("world", [2, 3])
def test_the_recorded_runs_are_replayed_by_real_ranks(world: int) -> None:
    cases = [case for case in BUILT if case.world == world]
    assert cases
    for found in ranks.run(world, on_this_rank, replay_on_rank, cases):
        assert 0 < max(found) <= 1


def test_every_recording_is_replayed_or_says_why_not() -> None:
    assert {case.row["method"] for case in CASES} == {*METHODS, *NOT_BUILT, "gpa"}
    assert not {*METHODS} & {*NOT_BUILT}
    for case in CASES:
        assert hashlib.sha256((ROUNDS / case.row["file"]).read_bytes()).hexdigest() == case.row["sha256"]
