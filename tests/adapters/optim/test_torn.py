"""A kernel that raises while a step is written: the error says what is half written, and nothing goes on from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fn
from fn import kernels
from fn.adapters import checkpoint
from fn.kernels.reference import REFERENCES

OPS = "adamw_", "onebit_adam_", "lamb_step_"


class Broken(Exception):
    """What the kernel raises."""


@pytest.fixture
def break_after() -> Iterator[Callable[[int], None]]:
    """Register kernels that work, until they are told after how many calls they raise."""
    calls = float("inf")

    def kernel(op: str, *args: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise Broken(op)
        return REFERENCES[op](*args)

    def arm(count: int) -> None:
        nonlocal calls
        calls = count

    row = kernels.Accelerator("cpu", {op: partial(kernel, op) for op in OPS}, provider="breaks")
    kernels.register(row)
    yield arm
    kernels.unregister(row)


def trained(make: Any = fn.adamw) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    params = [torch.nn.Parameter(torch.ones(9)) for _ in range(3)]
    opt = fn.Optimizer([{"params": [p]} for p in params], make, lr=0.1)
    step(params, opt)
    return params, opt


def step(params: list[torch.nn.Parameter], opt: fn.Optimizer) -> None:
    for p in params:
        p.grad = torch.ones(9)
    opt.step()


def test_a_kernel_that_raises_between_two_groups_tears_the_training_until_it_is_loaded(break_after, tmp_path: Path):
    params, opt = trained()
    checkpoint.save(tmp_path, opt)
    saved, kept = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    break_after(1)
    with pytest.raises(Broken):
        step(params, opt)
    assert [torch.equal(p, old) for p, old in zip(params, kept, strict=True)] == [False, True, True]
    break_after(100)
    refused: dict[str, Callable[[], Any]] = {
        "step": lambda: step(params, opt),
        "state_dict": opt.state_dict,
        "checkpoint": lambda: checkpoint.save(tmp_path, opt),
        "agreed_params": lambda: fn.adapters.agreed_params(opt).__enter__(),
    }
    for what, call in refused.items():
        with pytest.raises(RuntimeError, match=f"{what}: refused, for an exception came .*load both from a checkpoint"):
            call()
    with pytest.raises(RuntimeError, match="checkpoint: refused"):
        checkpoint.gather(opt)
    with pytest.raises(ValueError, match="state_dict"):
        opt.load_state_dict({"steps": torch.tensor(1)})
    with pytest.raises(RuntimeError, match="step: refused"):  # what was refused has mended nothing
        step(params, opt)
    checkpoint.load(tmp_path, opt)
    assert all(map(torch.equal, params, kept))
    step(params, opt)
    opt.load_state_dict(saved)
    assert opt.steps == 1


@pytest.mark.parametrize("first", [True, False])
def test_what_is_loaded_by_hand_mends_it_too(break_after, first: bool):
    params, opt = trained()
    saved, kept = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    break_after(0 if first else 2)
    with pytest.raises(Broken):
        step(params, opt)
    break_after(100)
    with torch.no_grad():
        for p, old in zip(params, kept, strict=True):
            p.copy_(old)
    opt.load_state_dict(saved)
    step(params, opt)
    others, other = trained()
    step(others, other)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def test_an_exchange_whose_state_cannot_be_written_is_refused_before_anything_is(break_after):
    """A transform of one's own that changes a dtype: the training goes on from the local step."""

    def make(lr: Any) -> fn.Transform:
        tx = fn.diloco(lr, axis="data")

        def wrong(number: int, state: Any, params: Any) -> tuple[Any, Any]:
            params, after = tx.exchange.outer(number, state, params)
            return params, fn.tree.map(torch.Tensor.double, after)

        return tx._replace(exchange=tx.exchange._replace(outer=wrong))

    p = torch.nn.Parameter(torch.ones(9))
    opt = fn.Optimizer([p], make, schedule=fn.every(2), lr=0.1)
    step([p], opt)
    with pytest.raises(ValueError, match="update: changed a leaf"):
        step([p], opt)
    opt.state_dict()
    step([p], opt)
    assert opt.steps == 3


def test_what_raises_before_anything_is_written_leaves_all_as_it_was(break_after):
    """A gradient that cannot be taken, say; the step is taken again."""
    params, opt = trained()
    kept = [p.detach().clone() for p in params]
    params[2].grad = torch.ones(9).to_sparse()
    with pytest.raises(TypeError):
        opt.step()
    assert all(map(torch.equal, params, kept))
    step(params, opt)
    assert opt.steps == 2
