"""Nothing piles up over 1000 steps or 100 optimizers; parameters may freeze, thaw and join in the compressed phase."""

from __future__ import annotations

import gc
import operator
import os
import warnings
import weakref
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS
from torch.distributed.device_mesh import init_device_mesh

import fn

SHAPES = [(6, 5), (7,), (), (0,), (30, 100)]
BY_NAME = {o.name: o for o in OPTIMIZERS}


def build(name: str, schedule) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        return params, fn.Optimizer(params, partial(BY_NAME[name].make, axis="data"), schedule=schedule, lr=0.01)


def step(opt: fn.Optimizer, params: list[torch.nn.Parameter], t: int) -> None:
    """Take a step; what needs no gradient gets none."""
    generator = torch.Generator().manual_seed(1000 * t + dist.get_rank())
    for p in params:
        g = torch.randn(p.shape, generator=generator)
        p.grad = g if p.requires_grad else None
    opt.step()


def held() -> tuple[int, ...]:
    """Return the numbers of open descriptors, threads and tensors, and last the resident bytes."""
    gc.collect()
    tensors = sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in gc.get_objects())
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), tensors, resident


def soak(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    params, opt = build(name, BY_NAME[name].schedule)
    held()  # counting touches modules that load late
    for t in range(200):
        step(opt, params, t)
    before = held()
    for t in range(200, 1200):
        step(opt, params, t)
    return before, held()


def rebuild(name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Build and use 140 optimizers and bindings; return what is held after 40 and at the end, and how many live."""
    alive = []
    for i in range(141):
        if i == 40:
            before = held()
        params, opt = build(name, fn.freeze_after(1))
        for t in range(2):
            step(opt, params, t)
        alive.append(weakref.ref(opt))
    after = held()
    return before, after, sum(r() is not None for r in alive)


def both(name: str) -> tuple:
    warnings.simplefilter("ignore")  # of torch's own modules, touched while objects are counted
    return soak(name), rebuild(name)


@pytest.mark.reliability
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("name", ["onebit_adam", "loco_adamw", "zero_one_adam"])
def test_nothing_grows_over_a_thousand_steps_and_over_a_hundred_optimizers(name):
    for (before, after), (first, last, alive) in ranks.run(2, both, name, timeout=300):
        print(f"{name}: steps {after[-1] / before[-1] - 1:+.2%}, optimizers {last[-1] / first[-1] - 1:+.2%}")
        assert all(map(operator.le, after[:3], before[:3]))
        assert after[3] < 1.01 * before[3]
        assert all(map(operator.le, last[:3], first[:3]))  # fewer is no growth: a cache may have let a tensor go
        assert last[3] < 1.01 * first[3]
        assert alive == 1
