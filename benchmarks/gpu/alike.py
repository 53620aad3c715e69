"""Every named optimizer on a GPU: its steps are the CPU's, in place they are the pure ones, and an Inf changes nothing.

The axis "data" has two ranks, of which the other one says what this one says; see `tests/gpu/step_checks.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import step_checks
import torch
from registry import EVERY, Named

import fn
from benchmarks.gpu.rows import Check, Checks, Options, Row, outcome

QUICK = ("adamw", "onebit_adam", "diloco")
STEPS = 30
ELSEWHERE = 0.02
"""The share of a parameter's elements that may go elsewhere: a direction that is a sign, or an element that is chosen
by its size, may turn on a last digit."""


def checks(options: Options) -> Checks:
    """Return the checks by name: all optimizers like the CPU first."""
    found: dict[str, Check] = {
        f"{named.name}: like the CPU": partial(of_named, options, named)
        for named in EVERY if not options.quick or named.name in QUICK
    }  # fmt: skip
    for what, name in step_checks.pairs():
        if "compiled" not in what and (not options.quick or name in QUICK):
            found[f"{what}: {name}"] = partial(of_step, options, what, name)
    return found


def of_step(options: Options, what: str, name: str) -> Iterator[Row]:
    """Run a check of `tests/gpu/step_checks.py`."""
    more = {"backend": "aot_eager"} if options.quick and "compiled" in what else {}
    yield outcome(f"{what}: {name}", step_checks.CHECKS[what](name, options.torch_device, **more))


def of_named(options: Options, named: Named) -> Iterator[Row]:
    """Compare 30 steps, of all its phases, with those on the CPU."""
    here, there = (trained(named, torch.device(kind)) for kind in (options.device, "cpu"))
    fault = None
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        share = float((~torch.isclose(a, b, 1e-4, 1e-3 * named.lr)).double().mean()) if a.numel() else 0.0
        if share > ELSEWHERE:
            fault = f"{100 * share:.1f} % of parameter {i} went elsewhere"
    yield outcome(f"{named.name}: like the CPU", fault)


def trained(named: Named, device: torch.device) -> list[torch.Tensor]:
    """Return the parameters after 30 steps on a device, on the CPU."""
    warnings.simplefilter("ignore")  # of gradients that are the same on all ranks, and of short warm-ups
    params = [torch.nn.Parameter(x) for x in step_checks.numbers(0, device)]
    with step_checks.echo():
        opt = fn.Optimizer(params, partial(named.make, axis="data"), lr=named.lr, schedule=named.schedule,
                           refuse_averaged=False)  # fmt: skip
    for step in range(STEPS):
        for p, g in zip(params, step_checks.numbers(1 + step, device), strict=True):
            p.grad = g
        opt.step()
    return [p.detach().cpu() for p in params]
