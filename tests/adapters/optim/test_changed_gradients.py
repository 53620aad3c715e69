"""Gradients that somebody changes between backward and step, where `overlap` has sent them already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_cases import Net, arrays, backward, build, same, train, wrapped

import fn
from fn.adapters.ddp import overlap

MODELS: dict[str, Callable[[], Any]] = {
    "a plain module": Net,
    "DDP, buckets apart": lambda: wrapped(gradient_as_bucket_view=False),
    "DDP, views of buckets": lambda: wrapped(gradient_as_bucket_view=True),
}


def weight(model: Any) -> torch.nn.Parameter:
    return next(p for p in model.parameters() if p.ndim == 2)


@torch.no_grad()
def mask(model: Any) -> None:
    """Leave the first element as it is."""
    grad = weight(model).grad
    grad.mul_(torch.arange(grad.numel()).view_as(grad) % 2 == 0)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def of_data(model: Any) -> None:
    """As old scripts do it, behind the back of autograd's versions."""
    weight(model).grad.data.mul_(0.5)


def break_it(model: Any) -> None:
    weight(model).grad.fill_(float("nan"))


def read(model: Any) -> None:
    """As transformers' Trainer reads the norm: by clipping to infinity, which writes what was there."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


CHANGES = {f.__name__: f for f in (mask, clip, of_data, break_it)}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(model: Any, least: float) -> fn.Optimizer:
    opt = build(model)
    overlap(model, opt, least_wire_seconds=least)
    train(model, opt, range(4))
    backward(model, 4)
    return opt


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "least"), [(name, 0.0) for name in MODELS] + [("a plain module", 3600.0)], ids=str)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_refused_and_nothing_moves(what, name, least):
    model = MODELS[name]()
    opt = prepared(model, least)
    before = arrays(list(model.parameters()), opt.states)
    CHANGES[what](model)
    with pytest.raises(ValueError, match=r"gradients of param group .* changed between backward and step; leave out"):
        opt.step()
    assert same(before, arrays(list(model.parameters()), opt.states))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_are_only_read_are_not(name):
    model = MODELS[name]()
    opt = prepared(model, 0.0)
    read(model)
    opt.step()
    assert opt.steps == 5


def on_one_rank(name: str, least: float) -> str:
    """Rank 1 changes its gradients; both go on until they cannot."""
    model = MODELS[name]()
    opt = prepared(model, least)
    if dist.get_rank() == 1:
        clip(model)
    try:
        opt.step()
        train(model, opt, range(5, 8))
    except (ValueError, fn.PeerLost) as error:
        ranks.stay(2)  # or the other one would notice only that this one has ended
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("name", "least"), [("a plain module", 3600.0), ("DDP, buckets apart", 0.0)])
def test_the_others_do_not_wait_for_a_rank_that_refuses_its_own(name, least):
    other, own = ranks.outcomes(2, on_one_rank, name, least)
    assert other.startswith("PeerLost: ")
    assert "changed between backward and step" in own


def a_group_in_between() -> tuple[int, list]:
    model, late = Net(), torch.nn.Parameter(torch.ones(3))
    optimizer = build(model)
    overlap(model, optimizer, least_wire_seconds=0.0)
    train(model, optimizer, range(1))
    backward(model, 1)
    late.grad = torch.full((3,), 1.0 + dist.get_rank())
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    return optimizer.steps, arrays([*model.parameters(), late])


def test_a_group_that_comes_behind_backward_is_in_the_step():
    answers = ranks.run(2, a_group_in_between)
    assert [steps for steps, _ in answers] == [2, 2]
    assert same(*(numbers for _, numbers in answers))
    assert all((numbers[-1] < 1.0).all() for _, numbers in answers)
