"""Local steps follow the recorded runs of DiLoCo, Streaming DiLoCo and local SGD."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_cases import recorded_form
from recorded_rounds import Case, in_simulation, inner_of, load
from torch import Tensor

import fn
from fn import Phase, Round, tree

CASES = load("index.json")
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def fragments(case: Case) -> list[list[int]]:
    return case.hyper.get("fragments") or [[*range(case.count)]]


def round_of(case: Case, step: int) -> Phase | Round:
    """Return what happened in a step, as it was recorded."""
    if step < case.hyper.get("warmup", 0):
        return Phase.WARMUP
    ended = int(case.arrays["applied"][step])
    begun = int(case.arrays["prepared"][step]) if "prepared" in case.arrays else ended
    return Round(begun if begun >= 0 else None, ended if ended >= 0 else None)


def outer_of(hyper: dict[str, Any], lr: Tensor) -> fn.Transform:
    """Return the outer optimizer; the mean of the params, where there is none."""
    if not hyper.get("momentum"):
        return fn.scale_by_learning_rate(lr)
    return fn.chain(fn.trace(hyper["momentum"], hyper["nesterov"]), fn.scale_by_learning_rate(lr))


def transforms(case: Case, lr: Tensor) -> tuple[fn.Transform, fn.Transform]:
    """Return the transform, and one whose exchanges fail."""
    number = {i: f for f, places in enumerate(fragments(case)) for i in places}

    def make(factor: float) -> fn.Transform:
        spoiled = fn.stateless(lambda u, p: tree.map(lambda x: x * factor, u))
        tx = fn.outer(
            inner_of(case.hyper["inner"]),
            outer_of(case.hyper.get("outer", {}), lr),
            fn.chain(fn.compressed_average("data", fn.identity(), fn.off()), spoiled),
            fragments=lambda params: [number[i] for i in range(len(params))],
            alpha=case.hyper.get("alpha", 0.0),
            on_skip="anchor",
        )
        return fn.skip_nonfinite(fn.chain(fn.average("data"), tx))

    return make(1.0), make(float("nan"))


def replay(case: Case, step: Any, state: Any, params: list[Tensor], lr: Tensor) -> float:
    """Take all steps, from gradients at our own params; return how far off anything was, in units of the tolerance.

    Args: step: (tx, when, gradients, state, params) -> (params, state).
    """
    gradients = case.gradients()
    good, failing = transforms(case, lr)
    begun, ended, worst = [0] * case.count, [0] * case.count, 0.0
    attempt, exchange = 0, 0
    failed = set(case.hyper.get("fail", ()))
    for t in range(int(case.hyper["steps"])):
        when = round_of(case, t)
        ends = isinstance(when, Round) and when.end is not None
        if ends and "outer_lrs" in case.hyper:
            lr.fill_(case.hyper["outer_lrs"][exchange])
        spoil = isinstance(when, Round) and when.begin is not None and attempt in failed
        with fn.ledger() as sent:
            params, state = step(failing if spoil else good, when, gradients(t, params), state, params)
        if "bytes" in case.arrays and case.world > 1:
            assert (sent.total > 0) == bool(case.arrays["bytes"][t].any()), f"step {t}"
        worst = max([worst, *(case.off(p, f"p{i}.param", t) for i, p in enumerate(params))])
        own = state.inner[1]
        for name, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
            if f"p0.{name}" in case.arrays:
                leaves = recorded_form(own.inner, field, case.hyper["inner"].get("betas"))
                worst = max([worst, *(case.off(x, f"p{i}.{name}", t) for i, x in enumerate(leaves))])
        if not isinstance(when, Round) or "p0.anchor" not in case.arrays:
            continue
        if when.begin is not None:
            for i in fragments(case)[when.begin]:
                if when.end is None and attempt not in failed:
                    worst = max(worst, case.off(own.pending[i], f"p{i}.mean", begun[i], 0))
                begun[i] += 1
            attempt += 1
        if when.end is not None:
            exchange += 1
            momenta = tree.fields(own.outer[when.end], "mu")
            for place, i in enumerate(fragments(case)[when.end]):
                worst = max(worst, case.off(own.anchor[i], f"p{i}.anchor", ended[i], 0))
                if momenta:
                    buffer = momenta[0][place]
                    worst = max(worst, case.off(buffer, f"p{i}.outer_momentum", ended[i], 0))
                ended[i] += 1
    return worst


def outer_lr(case: Case) -> Tensor:
    return torch.tensor(float(case.hyper.get("outer", {}).get("lr", 1.0)))


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    """Anchor, means and outer momentum are replicated, which `simulate` checks.

    Differs: fn.local_optimizers.diloco: if an exchange is not finite, the ranks keep their params; torchft takes all of
        them back to the anchor, as `outer` does with on_skip="anchor".
    """
    lr = outer_lr(case)
    step, state, params = in_simulation(case, transforms(case, lr)[0])
    assert 0 < replay(case, step, state, params, lr) <= 1


def test_every_is_the_schedule_of_the_recorded_runs() -> None:
    """But of those whose rounds have other lengths, see tests/golden/outer/README.md."""
    others = ("diloco_gym", "post_localsgd")
    alike = [case for case in CASES if case.row["method"] not in others and "fail" not in case.hyper]
    assert len(alike) > 10
    for case in alike:
        check_schedule(case)


def check_schedule(case: Case) -> None:
    steps = range(int(case.hyper["steps"]))
    schedule = fn.every(case.hyper["H"], fragments=len(fragments(case)), delay=case.hyper.get("tau", 0))
    assert [schedule(t) for t in steps] == [round_of(case, t) for t in steps]
