"""A small model under DDP on two gloo ranks, for the tests of `fn.adapters.ddp` and of the trainers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import chains
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fn
from fn import tree
from fn.adapters.ddp import bucketed

MAKES = {
    "onebit_adam": partial(fn.onebit_adam, axis="data"),
    "lazy": partial(fn.onebit_adam, axis="data", feedback=fn.classic(lazy=True), codec=fn.sign(64)),
    "no servers": partial(fn.onebit_adam, axis="data", servers=False),
    "onebit_lamb": partial(chains.onebit_lamb, axis="data", layout="flat"),
    "zero_one_adam": partial(fn.zero_one_adam, axis="data"),
}
SCHEDULES = {"zero_one_adam": partial(fn.zero_one_schedule, 3, 2, 4, 4)}


class Net(torch.nn.Module):
    """A few layers. The norm comes last in the list of parameters but first in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Linear(33, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)
        )
        self.norm = torch.nn.LayerNorm(12)
        self.skip_last = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers[:4] if self.skip_last else self.layers)(self.norm(x))


class Stop(Exception):
    """Raised in the middle of a backward pass."""


class Plain(Net):
    """Without the norm, whose gradients come last but leave first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Identity()

    def break_off(self, backward: Callable[[], None]) -> None:
        """Run a backward pass that breaks off before it has come to the first layer."""
        handle = self.layers[0].weight.register_hook(lambda g: (_ for _ in ()).throw(Stop))
        try:
            backward()
        except Stop:
            return
        finally:
            handle.remove()
        raise AssertionError("the pass did not break off")


def wrapped(make: Callable[[], torch.nn.Module] = Net, **options: Any) -> DistributedDataParallel:
    """Return a model in DDP, with buckets of a few hundred elements."""
    return DistributedDataParallel(make(), bucket_cap_mb=0.001, **options)


def build(model: Any, name: str = "onebit_adam", elements: int = 300, **more: Any) -> fn.Optimizer:
    """Return a named optimizer, frozen after three steps."""
    schedule = SCHEDULES.get(name, partial(fn.freeze_after, 3))()
    with fn.bind({"data": dist.group.WORLD}):
        groups = bucketed(model.parameters(), elements)
        return fn.Optimizer(groups, MAKES[name], schedule=schedule, lr=0.01, **more)


def batch(step: int, part: int = 0) -> torch.Tensor:
    """Return this rank's part of a batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 12, generator=generator)


def backward(model: Any, step: int, accumulate: int = 1, scale: float = 1.0) -> None:
    """Leave the gradients of a batch, in several parts."""
    for part in range(accumulate):
        with nullcontext() if part == accumulate - 1 else model.no_sync():
            (scale * model(batch(step, part)).square().mean()).backward()


def train(model: Any, opt: torch.optim.Optimizer, steps: range, accumulate: int = 1) -> None:
    """Take steps."""
    for t in steps:
        backward(model, t, accumulate)
        opt.step()
        opt.zero_grad()


def arrays(*trees: Any) -> list[Any]:
    """Return the leaves as NumPy arrays, which travel between processes."""
    return [leaf.detach().numpy().copy() for leaf in tree.leaves(trees)]


def same(a: list[Any], b: list[Any]) -> bool:
    """Tell whether arrays are bitwise the same."""
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
