"""DDP with the communication of `fn`: real gloo ranks, small models, results compared bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.nn.parallel import DistributedDataParallel

import fn
from fn import tree
from fn.adapters.ddp import bucketed, keep_local, overlap

MAKES = {
    "onebit_adam": partial(fn.onebit_adam, axis="data"),
    "lazy": partial(fn.onebit_adam, axis="data", feedback=fn.classic(lazy=True), codec=fn.sign(64)),
    "onebit_lamb": partial(fn.onebit_lamb, axis="data", layout="flat"),
    "zero_one_adam": partial(fn.zero_one_adam, axis="data"),
}
SCHEDULES = {"zero_one_adam": partial(fn.zero_one_schedule, 3, 2, 4, 4)}


class Net(torch.nn.Module):
    """A few layers; `extra` takes part only if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Linear(33, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)
        )
        self.norm = torch.nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(x))


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), bucket_cap_mb=0.001, **options)


def build(model: Any, name: str, elements: int = 300) -> fn.Optimizer:
    schedule = SCHEDULES.get(name, partial(fn.freeze_after, 3))()
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(bucketed(model.parameters(), elements), MAKES[name], schedule=schedule, lr=0.01)


def batch(step: int, part: int = 0) -> torch.Tensor:
    """Return this rank's part of a batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 12, generator=generator)


def train(model: Any, opt: fn.Optimizer, steps: range, accumulate: int = 1) -> None:
    for t in steps:
        for part in range(accumulate):
            with nullcontext() if part == accumulate - 1 else model.no_sync():
                model(batch(t, part)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def numpy(t: Any) -> list[Any]:
    return [leaf.detach().numpy().copy() for leaf in tree.leaves(t)]


def both_ways(name: str, accumulate: int, view: bool) -> tuple[Any, Any, Any]:
    serial = keep_local(wrapped(gradient_as_bucket_view=view))
    ahead = wrapped(gradient_as_bucket_view=view)
    first, second = build(serial, name), build(ahead, name)
    running = overlap(ahead, second, least_wire_seconds=0.0)
    train(serial, first, range(9), accumulate)
    train(ahead, second, range(9), accumulate)
    found = [numpy((list(m.parameters()), o.states)) for m, o in ((serial, first), (ahead, second))]
    return *found, {phase.value: size for phase, size in running.bytes.items()}


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "accumulate", "view"),
    [("onebit_adam", 1, False), ("lazy", 3, True), ("onebit_lamb", 2, False), ("zero_one_adam", 1, True)],
)
def test_overlapped_steps_are_bitwise_the_serial_ones_through_all_phases(name, accumulate, view):
    """DDP rearranges its buckets after the first step; with several small param groups nothing is lost by it."""
    for serial, ahead, sent in run(2, both_ways, name, accumulate, view):
        assert same(serial, ahead)
        assert sent["compressed"] < sent["warmup"] / 3
