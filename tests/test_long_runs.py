"""Nothing piles up over 1000 steps or 100 optimizers; parameters may freeze, thaw and join in the compressed phase."""

from __future__ import annotations

import functools
import gc
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
from fn import Phase, tree

SHAPES = [(6, 5), (7,), (), (0,), (30, 100)]
BY_NAME = {o.name: o for o in OPTIMIZERS}
COMPRESSING = [o.name for o in OPTIMIZERS if Phase.COMPRESSED in o.phases]


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
        assert after[:3] == before[:3]
        assert after[3] < 1.01 * before[3]
        assert last[:3] == first[:3]
        assert last[3] < 1.01 * first[3]
        assert alive == 1


def frozen(name: str) -> tuple:
    """Freeze the first parameter for 3 compressed steps; return whether (it, another) moved then, and afterwards."""
    params, opt = build(name, lambda t: Phase.WARMUP if t < 3 else Phase.COMPRESSED)
    moved = []
    for first, last, needed in ((0, 5, True), (5, 8, False), (8, 11, True)):
        params[0].requires_grad_(needed)
        before = [p.detach().clone() for p in params]
        for t in range(first, last):
            step(opt, params, t)
        moved.append((not torch.equal(before[0], params[0]), not torch.equal(before[4], params[4])))
    return moved, [p.detach() for p in params], opt.skipped, opt.steps


def joined(name: str) -> tuple:
    """Add a group after 2 compressed steps, then 2 of warm-up and 4 compressed; return whether it moved in each."""
    asked = [Phase.WARMUP] * 3 + [Phase.COMPRESSED] * 2 + [Phase.WARMUP] * 2 + [Phase.COMPRESSED] * 4
    params, opt = build(name, asked.__getitem__)
    for t in range(5):
        step(opt, params, t)
    params.append(torch.nn.Parameter(torch.ones(9)))
    opt.add_param_group({"params": params[-1:], "lr": 0.02})
    moved = []
    for first, last in ((5, 7), (7, 11)):
        before = [p.detach().clone() for p in params]
        for t in range(first, last):
            step(opt, params, t)
        moved.append((not torch.equal(before[-1], params[-1]), not torch.equal(before[0], params[0])))
    return moved, [p.detach() for p in params], opt.skipped, opt.steps


def all_cases() -> dict[tuple[str, str], tuple]:
    return {(f.__name__, name): f(name) for f in (frozen, joined) for name in COMPRESSING}


@functools.cache
def answers() -> list[dict[tuple[str, str], tuple]]:
    return ranks.run(2, all_cases)


def check(f: str, name: str, expected: list[tuple[bool, bool]]) -> None:
    found = [rank[f, name] for rank in answers()]
    for moved, params, skipped, steps in found:
        assert moved == expected
        assert (skipped, steps) == (0, 11)
        assert all(bool(torch.isfinite(p).all()) for p in tree.leaves(params))
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0 if BY_NAME[name].replicated else 1e-6, atol=1e-7)


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_parameter_that_freezes_in_the_compressed_phase_stays_and_moves_again_afterwards(name):
    check("frozen", name, [(True, True), (False, True), (True, True)])


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_group_that_joins_in_the_compressed_phase_trains_after_a_warm_up(name):
    check("joined", name, [(True, True), (True, True)])
