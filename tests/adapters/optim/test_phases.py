"""Which phase a step is in: the schedule says it, and the transform says where a warm-up step has to come first."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

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
