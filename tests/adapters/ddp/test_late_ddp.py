"""`fn.late` under DDP: each rank's own gradients, whatever memory they lie in, with accumulation, behind a warm-up."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(5, 4, generator=generator) for _ in range(2)]


def under_ddp(view: bool, to_none: bool, make: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view)
    opt = fn.adapters.ddp.optimizer(
        model, fn.late(make), schedule=fn.every(1, delay=1, start=2), lr=0.05, elements=20, least_wire_seconds=0.0
    )
    for step in range(7):
        first, second = batches(step, dist.get_rank())
        with model.no_sync():
            model(first).square().mean().backward()
        model(second).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=to_none)
    opt.states  # noqa: B018
    fn.adapters.ddp.close(opt)
    return [p.detach().clone() for p in model.parameters()]


def by_hand(make: Any) -> list[torch.Tensor]:
    """Accumulate without DDP, in one param group."""
    model = network()
    with fn.bind({"data": dist.group.WORLD}):
        labels = {} if make is fn.adamw else {"labels": fn.labels_of(model)}  # which the adapter gives
        made = partial(fn.late(make), axis="data")
        opt = fn.Optimizer(model.parameters(), made, schedule=fn.every(1, delay=1, start=2), lr=0.05, **labels)
    for step in range(7):
        for x in batches(step, dist.get_rank()):
            model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.states  # noqa: B018
    return [p.detach().clone() for p in model.parameters()]


def compared() -> dict[str, list[list[torch.Tensor]]]:
    found = {}
    for name, make in {"adamw": fn.adamw, "muon": fn.muon, "sign_muon": fn.sign_muon}.items():
        ways = [(False, False), (True, True), *([(False, True), (True, False)] if make is fn.adamw else [])]
        found[name] = [by_hand(make), *(under_ddp(*way, make) for way in ways)]
    return found


@pytest.mark.parametrize("name", ["adamw", "muon", "sign_muon"])
def test_gradients_are_those_of_a_loop_without_ddp_wherever_they_lie(name: str) -> None:
    first, second = found()
    for of_rank in (first[name], second[name]):
        expected, *others = of_rank
        for params in others:
            for p, q in zip(expected, params, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for p, q in zip(first[name][1], second[name][1], strict=True):
        assert torch.equal(p, q)


def found(cache: dict[str, Any] = {}) -> Any:  # noqa: B006
    if not cache:
        cache["found"] = ranks.run(2, compared)
    return cache["found"]
