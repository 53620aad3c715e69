"""Inside of `agreed_params` ranks evaluate one model, so buffers that differ between them become their mean."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters
from fn.adapters import agreed_params

two = ranks.Cases(2)


class Scaled(nn.Module):
    """Buffers of every kind: statistics beside params, in a part without params, whole numbers, and constants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen = nn.BatchNorm1d(8, affine=False)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1), persistent=False)
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("word", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.seen(x))


def trained(make: Any, schedule: Any, model: nn.Module | None = None) -> tuple[nn.Module, fn.Optimizer]:
    """Train for six steps on data of each rank's own."""
    model, rank = model or Scaled(), dist.get_rank()
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(model.parameters(), partial(make, axis="data"), schedule=schedule, lr=1e-2)
    g = torch.Generator().manual_seed(1 + rank)
    for _ in range(6):
        x = torch.randn(16, 8, generator=g) * (1 + rank) + rank
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    model.narrow.fill_(1 + rank)
    model.word.fill_(1 + rank)
    return model, opt


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.named_buffers()}


def means(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean of floating buffers over the ranks; of others this rank's own."""
    there: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(there, mine)
    rows = {name: torch.stack([of_rank[name] for of_rank in there]) for name in mine}
    return {n: x.double().mean(0).to(x.dtype) if x.is_floating_point() else mine[n] for n, x in rows.items()}


def loss_of(model: nn.Module) -> float:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return float((model.eval()(x) - x.sum(1, keepdim=True)).square().mean())


METHODS = {
    "diloco": (fn.diloco, fn.every(4)),
    "1-bit Adam": (fn.onebit_adam, fn.freeze_after(2)),
    "0/1 Adam": (fn.zero_one_adam, fn.zero_one_schedule(3, 2, 2, 4)),
}


@two
def inside() -> dict[str, Any]:
    found = {}
    for name, (make, schedule) in METHODS.items():
        model, opt = trained(make, schedule)
        before, wanted = buffers_of(model), means(buffers_of(model))
        for how, given in {"found": (), "given": (model,), "in a list": ([model.body, model],)}.items():
            with fn.ledger() as sent, agreed_params(opt, *given):
                there, loss = buffers_of(model), loss_of(model)
                with agreed_params(opt, *given):
                    again = loss_of(model)
                model.train()(torch.randn(4, 8))  # whoever forgets eval() in the body
            found[f"{name}, {how}"] = {
                "loss": (loss, again),
                "means": all(torch.allclose(x, wanted[n], rtol=1e-6, equal_nan=True) for n, x in there.items()),
                "constants": torch.equal(there["mask"], before["mask"]),
                "apart": sum(not torch.equal(x, before[n]) for n, x in there.items()),
                "back": all(torch.equal(x, before[n]) for n, x in model.named_buffers()),
                "word": there["word"].tolist(),
                "counted": sent.total,
            }
    return found


def test_ranks_evaluate_one_model_and_go_on_with_their_own_buffers():
    zero, one = two.answer("inside")
    assert len(zero) == 9
    for name, found in zero.items():
        for of_rank in (found, one[name]):
            assert of_rank["loss"] == (found["loss"][0], found["loss"][0])
            assert of_rank["means"]
            assert of_rank["constants"]
            assert of_rank["back"]
            assert of_rank["apart"] == 5  # two means and two variances, and `narrow`
            assert of_rank["counted"] == 0
        assert (found["word"], one[name]["word"]) == ([1, 1], [2, 2])


@two
def wrapped() -> list[float]:
    """In DDP, compiled, in a trainer's module, and a dead model that held the same params beside it."""
    losses = []
    for wrap in (DistributedDataParallel, partial(torch.compile, backend="eager"), nn.Sequential):
        model, opt = trained(fn.diloco, fn.every(4))
        outer = wrap(model)
        if dist.get_rank() == 1:
            dead = nn.Sequential(model.body, nn.BatchNorm1d(3))
            dead.circle = [dead]
            del dead
        with agreed_params(opt):
            losses.append(loss_of(model))
        del outer
    return losses


def test_models_are_found_inside_of_what_wraps_them():
    zero, one = two.answer("wrapped")
    assert zero == one
    assert len(zero) == 3


@two
def alone_and_apart() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = nn.Linear(8, 1)
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(plain.parameters(), partial(fn.diloco, axis="data"), schedule=fn.every(4))
    if dist.get_rank() == 0:  # nobody else does
        with agreed_params(opt):
            found["no buffers"] = True
    model, opt = trained(fn.diloco, fn.every(4))
    before = buffers_of(model)
    if dist.get_rank() == 0:
        with agreed_params(opt, ()):
            found["()"] = all(torch.equal(x, before[n]) for n, x in model.named_buffers())
    other = nn.Sequential(model, nn.BatchNorm1d(2 + dist.get_rank()))
    try:
        with agreed_params(opt):
            found["entered"] = True
    except fn.RanksDisagree as error:
        found["text"] = str(error)
    found["as before"] = all(torch.equal(x, before[n]) for n, x in model.named_buffers())
    del other
    with agreed_params(opt):  # all go on
        found["loss"] = loss_of(model)
    loose = [nn.Parameter(torch.ones_like(x)) for x in model.parameters()]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(loose, partial(fn.diloco, axis="data"), schedule=fn.every(4))
    for name, given in {"loose": (), "loose with model": (model,), "loose ()": ((),)}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with agreed_params(opt, *given):
                found[f"{name} mean"] = model.narrow.tolist()
        found[name] = [str(w.message) for w in caught]
    return found


def test_what_nobody_can_find_is_said_and_ranks_with_other_buffers_are_refused_before_any_travels():
    zero, one = two.answer("alone_and_apart")
    assert zero["no buffers"]
    assert zero["()"]
    for found in (zero, one):
        assert "entered" not in found
        assert "running_mean" in found["text"]
        assert found["as before"]
        assert found["loss"] == zero["loss"]
        (text,) = found["loose"]
        assert "no module is found that holds" in text
        assert "agreed_params(optimizer, model)" in text
        assert found["loose with model"] == found["loose ()"] == []
        assert found["loose with model mean"] == [1.5, 1.5]
    assert (zero["loose () mean"], one["loose () mean"]) == ([1.0, 1.0], [2.0, 2.0])


@pytest.mark.parametrize("model", [3, "model", [nn.Linear(1, 1), 3], torch.ones(2), {"a": nn.Linear(1, 1)}])
def test_a_model_that_is_none_is_refused_by_name(model):
    opt = fn.Optimizer([nn.Parameter(torch.ones(2))], fn.adamw)
    with pytest.raises(TypeError, match=r"^model: expected a module, several, or None"), agreed_params(opt, model):
        raise AssertionError("entered")
