"""Methods between sites follow their recorded runs, in simulated ranks and real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
from golden_cases import recorded_form
from own_pieces import window_guard
from recorded_rounds import ROUNDS, Case, in_simulation, load, on_this_rank, step_of
from torch import Tensor

import fn
from fn import Round, tree

CASES = load("index.json", ROUNDS)

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

    sync = fn.stateless(share)._replace(facts=fn.Facts(axes=("data",), unequal=True))
    return fn.average_params(inner_of(case.hyper["inner"]), sync)


def replay(case: Case, step: Any, state: Any, params: list[Tensor], rank: int | None = None) -> float:
    """Take all steps, from gradients at our own params; return how far off anything was, in units of the tolerance."""
    gradients, worst = case.gradients(rank), [0.0]
    for t in range(int(case.hyper["steps"])):
        params, state = step(sparta(case, t), Round(0, 0), gradients(t, params), state, params)
        worst += [case.off(p, f"p{i}.param", t, rank) for i, p in enumerate(params)]
        for name, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
            if f"p0.{name}" in case.arrays:
                leaves = recorded_form(state.inner, field, case.hyper["inner"].get("betas"))
                worst += [case.off(x, f"p{i}.{name}", t, rank) for i, x in enumerate(leaves)]
    return max(worst)


def sgd(hyper: dict[str, Any]) -> fn.Transform:
    return fn.chain(fn.trace(hyper["momentum"], hyper["nesterov"]), fn.scale_by_learning_rate(hyper["lr"]))


def units(case: Case) -> list[list[int]]:
    return case.hyper.get("units") or [[i] for i in range(case.count)]


def edit(case: Case) -> fn.Transform:
    """Guard each unit, a fragment of its own: as `fn.contrib.norm_guard` does, or as the authors' code."""
    hyper, number = case.hyper, {i: u for u, places in enumerate(units(case)) for i in places}
    if case.row["method"] == "edit_paper":
        rest = {"far": None, "temperature": hyper["temperature"], "clip": hyper["clip"]}
        sync = fn.contrib.norm_guard(exact(), **hyper["detector"], **rest)
    else:
        rest = {"temperature": hyper["temperature"], "clip": hyper["clip"], "leaves_out": hyper["skip"]}
        sync = fn.contrib.guarded(exact(), window_guard(**hyper["detector"], **rest))
    return fn.outer(
        inner_of(hyper["inner"]),
        sgd(hyper["outer"]),
        sync,
        fragments=lambda params: [number[i] for i in range(len(params))],
        on_skip="anchor",
    )


def all_fragments(tx: fn.Transform, when: Round, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
    """Take the local step of a round, and the exchanges of all fragments behind it."""
    moves, s = tx.local_update(g, s, p)
    p = fn.apply_updates(p, moves)
    for fragment in range(len(s.outer) if when != Round() else 0):
        p, s = tx.exchange.take(Round(fragment, fragment), s, p)
    return p, s


def replay_edit(case: Case, step: Any, state: Any, params: list[Tensor], rank: int | None = None) -> float:
    gradients, worst, tx, row = case.gradients(rank), [0.0], edit(case), 0
    for t in range(int(case.hyper["steps"])):
        ends = case.arrays["applied"][t] >= 0
        params, state = step(tx, Round(0, 0) if ends else Round(), gradients(t, params), state, params)
        worst += [case.off(p, f"p{i}.param", t, rank) for i, p in enumerate(params)]
        if not ends:
            continue
        for u, places in enumerate(units(case)):
            (momenta,), of_unit = tree.fields(state.outer[u], "mu"), state.sync[u]
            for place, i in enumerate(places):
                worst.append(case.off(state.anchor[i], f"p{i}.anchor", row, rank or 0))
                worst.append(case.off(momenta[place], f"p{i}.outer_momentum", row, rank or 0))
            found = {"ewma_mean": of_unit.history.mean, "ewma_var": of_unit.history.variance, "norm": of_unit.norm}
            # NaN is what was not recorded
            names = [k for k in found if not np.isnan(case.arrays.get(f"unit{u}.{k}", np.nan)).any()]
            worst += [case.off(found[k], f"unit{u}.{k}", row, rank) for k in names]
            recorded = torch.from_numpy(case.arrays[f"unit{u}.outlier"][row].astype(bool))
            assert torch.equal(of_unit.out, recorded if rank is None else recorded[rank])
            assert int(of_unit.number) == int(recorded.sum())
            assert int(of_unit.first) == (int(recorded.long().argmax()) if recorded.any() else -1)
        row += 1
    assert row == len(case.arrays["p0.anchor"]) > 1
    return max(worst)


def exact() -> fn.Transform:
    return fn.compressed_average("data", fn.identity(), fn.off())


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


def replay_pier(case: Case, step: Any, state: Any, params: list[Tensor], rank: int | None = None) -> float:
    """The warm-up is of local steps on averaged gradients, so that all ranks stay where one of them is."""
    gradients, worst, h = case.gradients(rank), [0.0], case.hyper["H"]
    for t in range(int(case.hyper["steps"])):
        (number, place), warm = divmod(t, h), t < case.hyper["warmup"]
        g = gradients(t, params)
        if warm:
            g = [x.mean(0).expand_as(x).clone() for x in g] if rank is None else fn.pmean(g, "data")
        ends = place == h - 1
        params, state = step(pier(case, number, warm=warm), Round(0, 0) if ends else Round(), g, state, params)
        worst += [case.off(p, f"p{i}.param", t, rank) for i, p in enumerate(params)]
        if ends:
            (momenta,) = tree.fields(state.outer[0], "mu")
            for i, x in enumerate(state.anchor):
                worst.append(case.off(x, f"p{i}.anchor", number, rank or 0))
                worst.append(case.off(momenta[i], f"p{i}.outer_momentum", number, rank or 0))
    return max(worst)


class TwiceState(NamedTuple):
    """States of `average_params` and of `outer`, whose own inner optimizer rests."""

    shared: Any
    rounds: Any


def sparta_diloco(case: Case) -> fn.Transform:
    return fn.outer(fn.scale_by_learning_rate(0.0), sgd(case.hyper["outer"]), exact())


def init_both(case: Case) -> fn.Transform:
    """Return a transform that only has an init: of both states."""
    first, second = sparta(case, 0), sparta_diloco(case)
    return first._replace(init=lambda params: TwiceState(first.init(params), second.init(params)))


def both(tx: tuple[fn.Transform, fn.Transform], when: Round, g: Any, s: TwiceState, p: Any) -> tuple[Any, Any]:
    """Take a step of SPARTA, and behind it the exchange of a round of DiLoCo, if there is one."""
    shared, rounds = tx
    p, of_shared = step_of(shared, Round(0, 0), g, s.shared, p)
    p, of_rounds = rounds.exchange.take(when, s.rounds, p)
    return p, TwiceState(of_shared, of_rounds)


def replay_both(case: Case, step: Any, state: Any, params: list[Tensor], rank: int | None = None) -> float:
    gradients, worst = case.gradients(rank), [0.0]
    for t in range(int(case.hyper["steps"])):
        when = Round(0, 0) if case.arrays["applied"][t] >= 0 else Round()
        tx = sparta(case, t), sparta_diloco(case)
        params, state = step(tx, when, gradients(t, params), state, params)
        worst += [case.off(p, f"p{i}.param", t, rank) for i, p in enumerate(params)]
        for name, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
            leaves = recorded_form(state.shared.inner, field, case.hyper["inner"].get("betas"))
            worst += [case.off(x, f"p{i}.{name}", t, rank) for i, x in enumerate(leaves)]
    return max(worst)


class Method(NamedTuple):
    """How runs of a method are replayed. first: what makes the state. replay, of_rank: the run, and a rank's step."""

    first: Callable[[Case], fn.Transform]
    replay: Callable[..., float]
    of_rank: Callable[..., tuple[Any, Any]] = step_of


METHODS = {
    "sparta": Method(lambda case: sparta(case, 0), replay),
    "edit": Method(edit, replay_edit, all_fragments),
    "edit_paper": Method(edit, replay_edit, all_fragments),
    "pier": Method(lambda case: pier(case, 0, warm=True), replay_pier),
    "sparta_diloco": Method(init_both, replay_both, both),
}
IN_ROUNDS = [case for case in CASES if case.row["method"] in METHODS]
AVERAGED = [case for case in CASES if case.row["method"] == "gpa"]


@pytest.mark.parametrize("case", IN_ROUNDS, ids=[case.row["name"] for case in IN_ROUNDS])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    """The authors' form of EDiT by a guard of one's own, for `fn.contrib.norm_guard` has not what is wrong."""
    method = METHODS[case.row["method"]]
    assert 0 < method.replay(case, *in_simulation(case, method.first(case), method.of_rank)) <= 1


def replay_on_rank(case: Case, rank: int) -> float:
    method, start = METHODS[case.row["method"]], case.each("init")
    return method.replay(case, method.of_rank, method.first(case).init(start), start, rank)


@pytest.mark.parametrize("case", AVERAGED, ids=[case.row["name"] for case in AVERAGED])
def test_averages_along_the_way_are_the_recorded_ones(case: Case) -> None:
    """Where the rate is constant, as here, its square cancels.

    Differs: fn.contrib._primal_average.primal_average: averaging=None weighs all steps alike; the authors' code
        weighs them by the square of the largest learning rate so far, which is the same where the rate is constant.
    """
    hyper, start, gradients = case.hyper["gpa"], case.each("init"), case.gradients(None)
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


@pytest.mark.parametrize("world", [2, 3])
def test_the_recorded_runs_are_replayed_by_real_ranks(world: int) -> None:
    cases = [case for case in IN_ROUNDS if case.world == world]
    assert len(cases) > 3
    for found in ranks.run(world, on_this_rank, replay_on_rank, cases):
        assert 0 < max(found) <= 1


def test_every_recording_is_replayed_and_is_what_was_recorded() -> None:
    assert {case.row["method"] for case in CASES} == {*METHODS, "gpa"}
    for case in CASES:
        assert hashlib.sha256((ROUNDS / case.row["file"]).read_bytes()).hexdigest() == case.row["sha256"]
