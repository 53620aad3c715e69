"""torch._dynamo.config.optimize_ddp = "python_reducer": DDP's hook is called with one gradient, in a compiled graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp

case = ranks.Cases(2)


@contextmanager
def python_reducer() -> Iterator[None]:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        yield
    finally:
        torch._dynamo.config.optimize_ddp = before


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(t: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * t + rank))


def backward(model: Any, x: torch.Tensor, *, compiled: bool) -> None:
    loss = model(x).square().mean()
    if not compiled:
        loss.backward()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()


def averaged(compiled: bool) -> tuple[list[float], int, list[int], bool]:
    with python_reducer():
        model = DistributedDataParallel(net())
        mean = fn.adapters.ddp.average_gradients(model, fn.int8(), fn.off(), schedule=fn.freeze_after(1))
        run = torch.compile(model, backend="eager") if compiled else model
        exact, errors, sent = net(), [], []
        for t in range(3):
            model.zero_grad()
            with fn.ledger() as book:
                backward(run, batch(t, dist.get_rank()), compiled=compiled)
            sent.append(book.total)
            exact.zero_grad()
            torch.stack([exact(batch(t, r)).square().mean() for r in range(2)]).mean().backward()
            pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
            errors.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        there = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(there, flat)
        fn.adapters.ddp.close(mean)
        return errors, mean.steps, [*mean.bytes.values()], torch.equal(*there)


@case
def averages() -> list[Any]:
    return [averaged(compiled) for compiled in (True, False)]


def trained(way: str, *, reduced_in_python: bool) -> list[torch.Tensor]:
    """Train through `keep_local` or `optimizer`, whose steps average themselves."""
    model: Any = net()
    with python_reducer() if reduced_in_python else warnings.catch_warnings():
        model, make = DistributedDataParallel(model), partial(fn.onebit_adam, axis="data")
        run = torch.compile(model, backend="eager") if reduced_in_python else model
        more = {"lr": 0.01, "elements": 1000, "least_wire_seconds": 0.0}
        if way == "optimizer":
            opt = fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(2), **more)
        else:
            fn.adapters.ddp.keep_local(model)
            with fn.bind({"data": dist.group.WORLD}):
                opt = fn.Optimizer(model.parameters(), make, schedule=fn.freeze_after(2), lr=0.01)
        for t in range(3):
            backward(run, batch(t, dist.get_rank()), compiled=reduced_in_python)
            opt.step()
            opt.zero_grad()
        fn.adapters.ddp.close(opt)
    return [p.detach().clone() for p in copy.deepcopy(model.module).parameters()]


@case
def steps() -> dict[str, list[list[torch.Tensor]]]:
    ways = ("keep_local", "optimizer")
    return {way: [trained(way, reduced_in_python=reduced) for reduced in (True, False)] for way in ways}


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_that_come_alone_are_averaged_exactly_and_then_in_codes(compiled):
    for answers in case.answer("averages"):
        (exact, *coded), count, sizes, alike = answers[0 if compiled else 1]
        assert exact < 1e-6
        assert all(0 < error < 0.02 for error in coded)
        assert (count, alike) == (3, True)
        assert 0 < sizes[1] < sizes[0] / 2


@pytest.mark.parametrize("way", ["keep_local", "optimizer"])
def test_a_step_that_communicates_itself_is_the_same_as_with_ddps_own_reducer(way):
    for found in case.answer("steps"):
        in_python, in_buckets = found[way]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(in_python, in_buckets, strict=True))
