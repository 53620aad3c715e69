"""Compressed steps keep the next errors beside the old ones until they are written: the numbers of the pure chain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.inplace.match import in_place

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

ROOT = Path(__file__).parents[2]
SHAPES = [(37, 5), (7,), (), (0,), (4097,), (8, 16), (130, 130)]
def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step == 5 and dist.get_rank() == 1:
        grads[4][9] = float("inf")  # all ranks skip this one
    return grads


def bits(t: object) -> list[torch.Tensor]:
    return [leaf.detach().flatten().clone().view(torch.uint8) for leaf in tree.leaves(t)]


def same(a: object, b: object) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def staged_twice() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    for make in (fn.onebit_adam, fn.zero_one_adam):
        params = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in SHAPES]
        with fn.bind(mesh):
            tx = make(1e-2, axis="data")
            state = tx.init(params)
            for step, phase in enumerate([Phase.WARMUP, Phase.WARMUP, Phase.COMPRESSED, Phase.COMPRESSED]):
                update, before = tx.update(phase), [x.clone() for x in tree.leaves([params, state])]
                thrown_away, found = (in_place(update).stage(gradients(step), state, params) for _ in range(2))
                assert thrown_away.ok
                assert same(before, [params, state]), (make, step)
                found.commit()
                changed = [not same(a, b) for a, b in zip(before, tree.leaves([params, state]), strict=True)]
                assert any(changed), (make, step)


def test_a_step_that_is_thrown_away_leaves_the_errors():
    ranks.run(2, staged_twice)


def peak_per_parameter(name: str, parameters: int = 4_000_000) -> float:
    """Return the bytes that a step holds above parameters, gradients and state, in a process of its own."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.steps.step", "--peak", name, "--parameters", str(parameters)]
    options = {"cwd": ROOT, "env": env, "timeout": ranks.LIMIT}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    found = int(done.stdout.split()[-1])
    if found < 0:
        pytest.skip("this system does not forget the peak of a process")
    return found / parameters


@pytest.mark.reliability
def test_a_compressed_step_holds_the_next_errors_and_the_codes():
    errors = 4 + 4 / 2  # a worker's, and a server's of two ranks
    for name in ("1-bit Adam compressed, fn.Optimizer", "1-bit Adam compressed, fn.Optimizer, lazy error"):
        assert errors <= peak_per_parameter(name) < 1.1 * errors, name
