"""Which phase a step is in: the schedule says it, and the transform says where a warm-up step has to come first."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn import Phase


class LocalState(NamedTuple):
    """The state of `local_sgd`: of an inner AdamW, which has a field `nu`, one rank's own."""

    inner: Any

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the field that is one rank's own."""
        return frozenset({"inner"})

    @property
    def local_params(self) -> bool:
        """Return that the params are, too."""
        return True


def local_sgd(lr: Any, *, axis: str = "data") -> fn.Transform:
    """Step alone, with AdamW; in the compressed phase average the params after the step."""
    inner = fn.adamw(lr)
    alone = inner.warmup_update

    def together(updates: Any, state: LocalState, params: Any, /) -> tuple[Any, LocalState]:
        moves, after = alone(updates, state.inner, params)
        there = fn.pmean(fn.apply_updates(params, moves), axis)
        return fn.tree.map(torch.sub, there, params), LocalState(after)

    def local(updates: Any, state: LocalState, params: Any, /) -> tuple[Any, LocalState]:
        moves, after = alone(updates, state.inner, params)
        return moves, LocalState(after)

    return fn.Transform(lambda params: LocalState(inner.init(params)), together, together, local)


def every_third(step: int) -> Phase:
    """Meet in every third step."""
    return Phase.COMPRESSED if step % 3 == 2 else Phase.LOCAL


def local_steps_from_the_first_one() -> tuple[list[Phase], list[list[float]], list[str]]:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    seen, found = [], []
    with warnings.catch_warnings(record=True) as said, fn.bind({"data": dist.group.WORLD}):
        warnings.simplefilter("always")
        opt = fn.Optimizer(params[:2], local_sgd, schedule=every_third, lr=0.1)
        for step in range(6):
            if step == 4:
                opt.add_param_group({"params": params[2:]})
            for p in params[: 1 if step == 0 else 3]:
                p.grad = torch.full((3,), 1.0 if dist.get_rank() else -1.0)
            seen.append(opt.phase)
            opt.step()
            found.append([float(p[0]) for p in params])
    return seen, found, [str(w.message) for w in said if "phase" in str(w.message) or "warm-up" in str(w.message)]


def test_local_sgd_around_adamw_begins_with_local_steps_and_warns_of_no_warm_up():
    """Its state has a second moment, which no phase freezes; a parameter may come late, and so may a group."""
    answers = ranks.run(2, local_steps_from_the_first_one)
    for phases, _, said in answers:
        assert phases == [Phase.LOCAL, Phase.LOCAL, Phase.COMPRESSED] * 2
        assert said == []
    (_, one, _), (_, other, _) = answers
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, False, True] * 2
    assert one[0][0] == pytest.approx(1.1 - 0.001, abs=1e-3)  # alone, each its own way
    assert other[0][0] == pytest.approx(0.9 - 0.001, abs=1e-3)
    assert one[-1][2] != 1.0


NEEDING = {
    "onebit_adam": (fn.onebit_adam, {Phase.COMPRESSED}),
    "onebit_lamb": (fn.onebit_lamb, {Phase.COMPRESSED}),
    "sharded_onebit_adam": (fn.sharded_onebit_adam, {Phase.COMPRESSED}),
    "zero_one_adam": (fn.zero_one_adam, {Phase.COMPRESSED, Phase.LOCAL}),
    "loco_adamw": (fn.loco_adamw, set()),
    "adamw": (fn.adamw, set()),
    "in a chain": (lambda axis: fn.chain(fn.average(axis), fn.onebit_adam(axis=axis)), {Phase.COMPRESSED}),
    "in a mask": (lambda axis: fn.mask(fn.onebit_adam(axis=axis), [True]), {Phase.COMPRESSED}),
    "in a partition": (
        lambda axis: fn.partition({"a": fn.adamw(), "b": fn.onebit_adam(axis=axis)}, ["a"]),
        {Phase.COMPRESSED},
    ),
    "unfrozen": (lambda axis: fn.unfrozen(fn.onebit_adam(axis=axis)), set()),
}


@pytest.mark.parametrize(("make", "phases"), NEEDING.values(), ids=NEEDING)
def test_a_transform_says_which_phases_need_a_warm_up_step_before_them(make, phases):
    assert make(axis="data").needs_warmup == phases


def test_a_transform_of_ones_own_says_so_too_and_gets_its_warm_up_step():
    def halve(updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        return fn.tree.map(lambda u: -u / 2, updates), state

    tx = fn.Transform(lambda params: (), halve, halve, halve, needs_warmup=frozenset({Phase.LOCAL}))
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="schedule: has no warm-up") as said:
        opt = fn.Optimizer([p], lambda lr: tx, schedule=lambda step: Phase.LOCAL)
    assert [str(w.message) for w in said] == [
        "schedule: has no warm-up; the first step is one, for Phase.LOCAL of this optimizer needs one before it"
    ]
    seen = []
    for value in (float("inf"), 1.0, 1.0):
        seen.append(opt.phase)
        p.grad = torch.full((3,), value)
        opt.step()
    assert seen == [Phase.WARMUP, Phase.WARMUP, Phase.LOCAL]  # a skipped step is none


def test_loco_may_begin_in_codes_since_nothing_of_it_is_frozen():
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], partial(fn.loco_adamw, axis="data"), schedule=fn.freeze_after(0), lr=0.1)
    assert opt.phase is Phase.COMPRESSED
    p.grad = torch.ones(3)
    opt.step()
    assert float((1 - p.detach()).min()) == pytest.approx(0.1, rel=0.05)
