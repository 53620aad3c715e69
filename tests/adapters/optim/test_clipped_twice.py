"""`clip_grad_norm_` beside `max_norm`: the script clips each rank's own gradient, and the optimizer clips once more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import fn

two = ranks.Cases(2)
Change = Callable[[list[torch.Tensor], int], Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def said(change: Change, steps: int = 5, times: int = 1, **options: Any) -> list[int]:
    """Return behind which steps something is said about clipping."""
    net = model()
    options = {"make": fn.adamw, "max_norm": 0.5, "lr": 0.01, **options}
    opt, found = fn.Optimizer(net.parameters(), options.pop("make"), **options), []
    for t in range(steps):
        for i in range(times):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * t + i + 1000 * rank()))
            (10 * net(x)).square().mean().backward()
        change([*net.parameters()], t)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        opt.zero_grad()
        found += [t for w in caught if str(w.message).startswith("max_norm: gradients come clipped to a norm of")]
    return found


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def clip(most: float, params: list[torch.Tensor], t: int) -> None:
    torch.nn.utils.clip_grad_norm_(params, most)


def clip_from_third(params: list[torch.Tensor], t: int) -> None:
    if t >= 2:
        clip(0.5, params, t)


def halve(params: list[torch.Tensor], t: int) -> None:
    for p in params:
        p.grad.div_(2)


def refill(params: list[torch.Tensor], t: int) -> None:
    """Write the same numbers, as a captured graph does into the gradients that it keeps."""
    for p in params:
        p.grad.fill_(0.125)


def signs(params: list[torch.Tensor], t: int) -> None:
    """Gradients of a sum of magnitudes: of one norm in every step."""
    for p in params:
        p.grad.sign_().mul_(torch.randn(p.shape, generator=torch.Generator().manual_seed(t)).sign())


@pytest.mark.parametrize(
    ("change", "steps"),
    [(partial(clip, 0.5), [0]), (partial(clip, 1.0), [2]), (partial(clip, 0.25), [2]), (clip_from_third, [3])],
)
def test_it_is_said_once_at_the_first_step_that_tells(change, steps):
    assert said(change) == steps
    assert said(change, times=2) == steps
    assert said(change, max_norm=None) == []


@pytest.mark.parametrize("change", [lambda params, t: None, halve, refill, signs, partial(clip, 1e6)])
@pytest.mark.parametrize("times", [1, 2])
def test_what_is_not_clipped_is_not_said_to_be(change, times):
    assert said(change, steps=30, times=times) == []


@two
def on_two() -> list[list[int]]:
    with fn.bind({"data": dist.group.WORLD}):
        every_step = partial(fn.onebit_adam, axis="data")
        return [
            said(partial(clip, 0.5), make=every_step, schedule=fn.freeze_after(2)),
            said(partial(clip, 0.25), make=every_step, schedule=fn.freeze_after(2)),
            said(partial(clip, 0.5), make=partial(fn.diloco, axis="data"), schedule=fn.every(2)),
            said(halve, make=every_step, schedule=fn.freeze_after(2)),
        ]


def test_each_rank_says_it_of_its_own():
    for found in two.answer("on_two"):
        assert found == [[0], [2], [0], []]
