"""A state of rounds is loaded with the `in_flight` and `eager` that it was saved with, or refused by these names."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch

import fn
from fn import tree
from fn.adapters import checkpoint

LATE: dict[str, tuple[dict[str, Any], Any]] = {
    "in_flight=1": ({}, fn.every(2)),
    "in_flight=2": ({"in_flight": 2}, fn.every(2, delay=2)),
    "in_flight=3": ({"in_flight": 3}, fn.every(2, delay=4)),
    "eager=True": ({"eager": True}, fn.every(2, delay=2)),
}


def optimizer(late: str, steps: int) -> fn.Optimizer:
    more, schedule = LATE[late]
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process that is alone
        opt = fn.Optimizer(params, partial(fn.diloco, axis="data", **more), schedule=schedule, lr=0.1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    return opt


def held(opt: fn.Optimizer) -> list[torch.Tensor]:
    leaves = [*opt.param_groups[0]["params"], *tree.leaves(opt.states)]
    return [x.detach().clone() for x in leaves]


@pytest.mark.parametrize(("there", "here"), [*permutations(LATE, 2)])
def test_a_state_of_other_late_means_is_refused_by_both_settings(there, here, tmp_path):
    saved, opt = optimizer(there, 5), optimizer(here, 1)
    before = held(opt)
    checkpoint.save(tmp_path, saved)
    loads = {"state_dict": lambda: opt.load_state_dict(saved.state_dict())}
    loads["checkpoint"] = lambda: checkpoint.load(tmp_path, opt)
    for argument, load in loads.items():
        with pytest.raises(
            ValueError, match=rf"^{argument}: expected one that was saved with {here}, .* with {there};"
        ):
            load()
        assert opt.steps == 1
        assert all(map(torch.equal, before, held(opt)))


@pytest.mark.parametrize("late", LATE)
def test_a_state_of_the_same_late_means_is_loaded(late, tmp_path):
    saved = optimizer(late, 5)
    checkpoint.save(tmp_path, saved)
    for load in (lambda opt: opt.load_state_dict(saved.state_dict()), partial(checkpoint.load, tmp_path)):
        opt = optimizer(late, 1)
        load(opt)
        assert opt.steps == 5
        assert all(map(torch.equal, tree.leaves(saved.states), tree.leaves(opt.states)))


def test_what_holds_no_state_of_rounds_is_refused_as_such():
    with pytest.raises(ValueError, match=r"is missing|is unexpected"):
        optimizer("eager=True", 0).load_state_dict(
            fn.Optimizer([torch.nn.Parameter(torch.ones(2))], fn.adamw).state_dict()
        )
