"""A training run on a GPU: 1-bit Adam and LAMB beside AdamW, and beside the same runs on the CPU.

A small network learns what a random one of the same shape says. The axis "data" has two ranks, of which the other one
says what this one says, so that codes travel and errors are fed back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from step_checks import echo
from torch import nn

import fn
from benchmarks.gpu.rows import Checks, Options, Row, outcome

FREEZE = 0.25
"""The share of the run that is warm-up."""

NEAR_CPU, NEAR_ADAMW = 0.05, 0.5
"""How far a last loss may be from that on the CPU, and above that of AdamW."""

METHODS: dict[str, Callable[..., fn.Transform]] = {
    "adamw": fn.adamw,
    "onebit_adam": fn.onebit_adam,
    "onebit_lamb": fn.onebit_lamb,
}
"""None that shards its state: the other rank, which says what this one says, has no shard of its own."""


def checks(options: Options) -> Checks:
    """Return the checks by name."""
    names = tuple(METHODS)[:2] if options.quick else tuple(METHODS)
    return {f"a run of {name}": partial(of_run, options, name) for name in names}


def of_run(options: Options, name: str) -> Iterator[Row]:
    """Train on the device and on the CPU, and say where the losses are."""
    steps = 120 if options.quick else 800
    here, there = (losses(name, torch.device(kind), steps) for kind in (options.device, "cpu"))
    for share in (0.25, 0.5, 0.75, 1.0):
        at = int(share * steps) - 10
        yield Row(f"loss of {name} at {100 * share:.0f} %", mean(here[at : at + 10]), note=f"CPU {there[at]:.4g}")
    last, on_cpu = mean(here[-10:]), mean(there[-10:])
    fault = None if abs(last / on_cpu - 1) <= NEAR_CPU else f"{last:.4g} on the device, {on_cpu:.4g} on the CPU"
    yield outcome(f"the run of {name} ends as on the CPU", fault)
    best = last if name == "adamw" else mean(losses("adamw", torch.device(options.device), steps)[-10:])
    fault = None if last <= (1 + NEAR_ADAMW) * best else f"{last:.4g}, where AdamW ends at {best:.4g}"
    yield outcome(f"the run of {name} ends near AdamW's", fault)


def mean(numbers: list[float]) -> float:
    """Return the mean."""
    return sum(numbers) / len(numbers)


def network(seed: int, device: torch.device) -> nn.Sequential:
    """Return a network that is the same on every device."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)


def losses(name: str, device: torch.device, steps: int) -> list[float]:
    """Return the loss of every step."""
    warnings.simplefilter("ignore")  # of gradients that are the same on both ranks
    teacher, model = network(1, device), network(2, device)
    generator = torch.Generator().manual_seed(0)
    with echo():
        opt = fn.Optimizer(model.parameters(), partial(METHODS[name], axis="data"), lr=3e-3, refuse_averaged=False,
                           schedule=lambda t: fn.Phase.WARMUP if name == "adamw" else fn.freeze_after(
                               int(FREEZE * steps))(t))  # fmt: skip
    found = []
    for _ in range(steps):
        x = torch.randn(128, 32, generator=generator).to(device)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        found.append(loss.detach())
    return [float(x) for x in found]
