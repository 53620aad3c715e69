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
    "gpa": "there is no average of the params along the way",
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


def marked(case: Case) -> Any:
    reason = NOT_BUILT.get(case.row["method"])
    return pytest.param(case, id=case.row["name"], marks=[pytest.mark.skip(reason=reason)] if reason else [])


@pytest.mark.parametrize("case", [*map(marked, CASES)])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    assert 0 < replay(case, *in_simulation(case, METHODS[case.row["method"]](case, 0))) <= 1


def replay_on_rank(case: Case, rank: int) -> float:
    tx, start = METHODS[case.row["method"]](case, 0), case.each("init")
    return replay(case, step_of, tx.init(start), start, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_the_recorded_runs_are_replayed_by_real_ranks(world: int) -> None:
    cases = [case for case in BUILT if case.world == world]
    assert cases
    for found in ranks.run(world, on_this_rank, replay_on_rank, cases):
        assert 0 < max(found) <= 1


def test_every_recording_is_replayed_or_says_why_not() -> None:
    assert {case.row["method"] for case in CASES} == {*METHODS, *NOT_BUILT}
    assert not {*METHODS} & {*NOT_BUILT}
    for case in CASES:
        assert hashlib.sha256((ROUNDS / case.row["file"]).read_bytes()).hexdigest() == case.row["sha256"]
