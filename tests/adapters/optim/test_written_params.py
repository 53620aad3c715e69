"""Params that something else wrote between steps, such as a checkpoint that is loaded behind the construction."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Cases

import fn

case = Cases(2)
METHODS = {
    "diloco": (fn.diloco, fn.every(3)),
    "sparse_loco": (partial(fn.sparse_loco, k=4, tile=4), fn.every(3)),
    "muloco": (fn.muloco, fn.every(3)),
    "diloco, in fragments": (partial(fn.diloco, fragments=2), fn.every(4, fragments=2)),
    "zero_one_adam": (fn.zero_one_adam, fn.zero_one_schedule(2, 1, 1, 4)),
    "sharded_onebit_adam": (partial(fn.sharded_onebit_adam, gather=fn.int8()), fn.freeze_after(2)),
    "adamw": (fn.adamw, None),
}


def made(name: str, lr: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, fn.Optimizer]:
    method, schedule = METHODS[name]
    model = torch.nn.Linear(8, 8, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with fn.bind({"data": torch.distributed.group.WORLD}):
        make = partial(method, axis="data")
        return model, fn.Optimizer(model.named_parameters(), make, schedule=schedule, lr=lr)


def fives(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(p, 5.0) for name, p in model.state_dict().items()}


def train(model: torch.nn.Module, opt: fn.Optimizer, steps: range) -> list[str]:
    """Take steps; return the warnings of params that were written."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in steps:
            for p in model.parameters():
                seed = torch.Generator().manual_seed(t + 99 * torch.distributed.get_rank())
                p.grad = torch.randn(p.shape, generator=seed).to(p.dtype)
            opt.step()
    return [str(w.message) for w in caught if "something else than this optimizer wrote" in str(w.message)]


FIRST = [("diloco", torch.bfloat16, 0), *((name, torch.float32, 0) for name in METHODS)]
LATER = [(name, torch.float32, before) for name in ("diloco", "sparse_loco") for before in (1, 3, 4)]


@case
def loaded() -> dict[str, list[Any]]:
    """Return, by method and by when 5.0 was loaded, the params after nine steps of rate 0, and what was warned of."""
    found = {}
    for name, dtype, before in FIRST + LATER:
        model, opt = made(name, dtype=dtype)
        train(model, opt, range(before))
        model.load_state_dict(fives(model))
        found[f"{name} {dtype} {before}"] = [train(model, opt, range(before, 9)), model.weight.detach().float()]
    return found


@case
def of_one_rank() -> str:
    model, opt = made("diloco")
    if torch.distributed.get_rank() == 0:
        model.load_state_dict(fives(model))
    with pytest.raises(fn.RanksDisagree) as error:
        train(model, opt, range(1))
    return str(error.value)


RESUMED = ["diloco, in fragments", "zero_one_adam", "sharded_onebit_adam"]


@case
def resumed() -> dict[str, bool]:
    """Return whether a run that is loaded in the middle of a round goes on bit for bit, in either order of loading."""
    found = {}
    for name in RESUMED:
        model, opt = made(name, 0.01)
        train(model, opt, range(5))
        of_opt, of_model = opt.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        of_opt = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in of_opt.items()}
        train(model, opt, range(5, 11))
        for order in ("model first", "optimizer first"):
            again, resumed_opt = made(name, 0.01)
            loads = [lambda: again.load_state_dict(of_model), lambda: resumed_opt.load_state_dict(of_opt)]  # noqa: B023
            for load in loads if order == "model first" else reversed(loads):
                load()
            said = train(again, resumed_opt, range(5, 11))
            same = [torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)]
            found[f"{name}, {order}"] = all(same) and not said
    return found


@case
def own_writes() -> list[str]:
    """Return what is said of writes that are fn's own, within a round."""
    model, opt = made("diloco", 0.01)
    train(model, opt, range(4))
    with fn.adapters.agreed_params(opt):
        pass
    return train(model, opt, range(4, 9))


@pytest.mark.parametrize(("name", "dtype", "before"), FIRST)
def test_copies_follow_what_was_loaded_before_the_first_step(name, dtype, before):
    for found in case.answer("loaded"):
        said, weight = found[f"{name} {dtype} {before}"]
        assert said == []
        torch.testing.assert_close(weight, torch.full((8, 8), 5.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("name", "dtype", "before"), LATER)
def test_what_is_written_later_is_warned_of_with_the_cure(name, dtype, before):
    for found in case.answer("loaded"):
        (said,) = found[f"{name} {dtype} {before}"][0]
        assert "parameter weight" in said
        assert "before the first step" in said


def test_a_checkpoint_that_one_rank_alone_loaded_is_refused_by_the_parameters_name():
    for text in case.answer("of_one_rank"):
        assert "parameter weight in group 0" in text
        assert "load the same ones on all ranks" in text


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("name", RESUMED)
def test_model_and_optimizer_are_loaded_in_either_order(name, order):
    assert all(found[f"{name}, {order}"] for found in case.answer("resumed"))


def test_its_own_writes_are_no_other_hands():
    assert case.answer("own_writes") == [[], []]
