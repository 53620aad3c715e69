"""`torch.set_default_device` and `set_default_dtype` change nothing of ours: steps are the same to the last bit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from registry import each_of_all
from torch.utils._device import _device_constructors

import fn
from fn import tree
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding

SHAPES = [(6, 5), (7,), (), (0,)]
MAKERS = {f"torch.{make.__name__}" for make in _device_constructors()}


@contextmanager
def elsewhere() -> Iterator[None]:
    """Make tensors that say nothing of it on no device, and in bfloat16."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_every_tensor_that_is_made_says_of_which_dtype_and_on_which_device():
    silent = []
    for path in Path(fn.__file__).parent.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            given = {keyword.arg for keyword in call.keywords}
            if ast.unparse(call.func) in MAKERS and None not in given and not {"dtype", "device"} <= given:  # **options
                silent.append(f"{path}:{call.lineno}")
    assert silent == []


def trained(optimizer: Any) -> list[torch.Tensor]:
    """Take 9 steps in all phases, 4 of them after a restart; return parameters, states, and what pure steps found."""
    way = transports.Transport(
        all_to_all=torch.clone, all_gather=lambda x: torch.stack([x, x]), psum=lambda x: x.add_(x)
    )
    binding = Binding({"data": Axis(2, torch.tensor(0, device="cpu"), transports.register("echo", way))})
    first, *others = optimizer.phases
    phases = [first, *reversed(others)] * 10
    if any(isinstance(phase, fn.Round) for phase in others):  # no warm-up comes behind rounds
        phases = [first, *others * 10]
    generator = torch.Generator().manual_seed(1)
    made = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    numbers = [[torch.randn(s, **made) for s in SHAPES] for _ in range(10)]

    def build() -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
        params = [torch.nn.Parameter(x.clone()) for x in numbers[-1]]
        with binding:
            options = {"schedule": phases.__getitem__, "lr": 0.01, "refuse_averaged": False, "max_norm": 1.0}
            return params, fn.Optimizer(params, partial(optimizer.make, axis="data"), **options)

    params, opt = build()
    for t in range(9):
        if t == 5:
            saved, before = opt.state_dict(), params
            params, opt = build()
            opt.load_state_dict(saved)
            for p, old in zip(params, before, strict=True):
                p.data.copy_(old.data)
        for p, g in zip(params, numbers[t], strict=True):
            p.grad = g.clone()
        opt.step()
    with binding:
        tx = optimizer.make(lr=0.01, axis="data")
        state, pure = tx.init(numbers[-1]), numbers[-1]
        for t in range(6):
            updates, state = tx.update(phases[t])(numbers[t], state, pure)
            pure = fn.apply_updates(pure, updates)
    return [*params, *tree.leaves(opt.states), *opt.state_dict().values(), *pure, *tree.leaves(state)]


@pytest.mark.filterwarnings("ignore:(eps|gradients):")
@each_of_all
def test_steps_are_the_same_whatever_the_default_device_and_dtype_are(optimizer):
    expected = trained(optimizer)
    with elsewhere():
        found = trained(optimizer)
    assert {x.device.type for x in found} == {"cpu"}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
