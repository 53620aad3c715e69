"""A rank whose steps are in place and one whose steps are pure skip the same ones: those that are not finite."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist

import fn

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

STEPS, FIRST = 8, 3  # steps; of these in the warm-up
METHODS: dict[str, tuple[Any, Any]] = {
    "adamw": (fn.adamw, None),
    "onebit_adam": (fn.onebit_adam, fn.freeze_after(FIRST)),
    "onebit_adam without a clamp": (partial(fn.onebit_adam, max_step=None), fn.freeze_after(FIRST)),
    "onebit_lamb": (fn.onebit_lamb, fn.freeze_after(FIRST)),
    "zero_one_adam": (fn.zero_one_adam, fn.zero_one_schedule(4, local_step_clipper=2, local_step_scaler=1)),
    "diloco": (fn.diloco, fn.every(3, start=FIRST)),
    "loco_adamw": (fn.loco_adamw, fn.freeze_after(FIRST)),
}
HALVES = (torch.bfloat16, torch.float16)
NEAR_THE_END = 3e38
BAD = (1e25, NEAR_THE_END, math.inf, math.nan)
EARLY, LATE = 1, 5
"""Steps in which rank 1 has a bad number: in the warm-up, and behind it."""
CASES = [(name, torch.float32, bad, step) for name in METHODS for bad in BAD for step in (EARLY, LATE)]
CASES += [(name, dtype, bad, LATE) for name in METHODS for dtype in HALVES for bad in (1e25, math.nan)]

two = ranks.Cases(2)


def trained(name: str, dtype: torch.dtype, bad: float, step: int) -> tuple[list[int], list[int]]:
    """Return how many steps were skipped, and how many local ones left out, after each step."""
    make, schedule = METHODS[name]
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in (40, 9)]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, partial(make, axis="data"), schedule=schedule, lr=1e-2)
    skipped, dropped = [], []
    for t in range(step + 2):
        generator = torch.Generator().manual_seed(10 * t + dist.get_rank())
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        if t == step and dist.get_rank() == 1:
            params[0].grad[3] = bad
        if dist.get_rank() == 1:
            with opt.binding:
                in_place_steps.stage_purely(opt)
        opt.step()
        skipped.append(opt.skipped)
        dropped.append(sum(int(x) for x in fn.roles.find(opt.states, "dropped")))
    return skipped, dropped


@two
def skipped_steps() -> list[Any]:
    return [trained(*case) for case in CASES]


def test_both_skip_the_same_steps():
    """Behind the warm-up 0/1 Adam and DiLoCo take local steps, which a rank leaves out alone."""
    for (_, dtype, bad, step), (one, _), (other, dropped) in zip(CASES, *two.answer("skipped_steps"), strict=True):
        is_finite = bool(torch.tensor(bad).to(dtype).isfinite())
        assert one == other
        assert other[step - 1] == 0
        if bad != NEAR_THE_END or not is_finite:  # codes of it may overflow
            assert other[-1] + dropped[-1] == (0 if is_finite else 1)
