"""The way of one compressed step through the house is short: a reader follows it without jumping back and forth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase

ROOT = str(Path(fn.__file__).parent)
SHAPES = [(37, 5), (7,), (4097,)]


def files_entered(f: Callable[[], Any]) -> list[str]:
    """Return the files under fn/ that a call enters, in order, one entry for each change of file."""
    seen: list[str] = []

    def on_event(frame: Any, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            name = name[len(ROOT) + 1 :]
            if not seen or seen[-1] != name:
                seen.append(name)

    sys.setprofile(on_event)
    try:
        f()
    finally:
        sys.setprofile(None)
    return seen


def behind_the_optimizer() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    with fn.bind(mesh):
        opt = fn.Optimizer(params, partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(3), lr=1e-2)

    def step(seed: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()

    for seed in range(8):
        step(seed)
    return files_entered(partial(step, 8))


def test_a_compressed_step_behind_the_optimizer_enters_few_files():
    entered = ranks.run(2, behind_the_optimizer)[0]
    assert 5 < len(set(entered)) <= 39, sorted(set(entered))
    assert len(entered) <= 172, entered


def test_a_pure_compressed_step_enters_few_files_and_none_of_steps_in_place():
    tx = fn.onebit_adam(1e-2, axis="data")
    params = {str(i): torch.ones(shape) for i, shape in enumerate(SHAPES)}

    def init(params: Any) -> Any:
        return tx.init(params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(Phase.COMPRESSED)(grads, state, params)
        return fn.apply_updates(params, updates), state

    state = fn.simulate(init, "data", 2, in_dims=None, out_dims=fn.rank_dims(init(params)))(params)
    dims = fn.rank_dims(state)
    two = fn.simulate(step, "data", 2, in_dims=(None, dims, 0), out_dims=(None, dims))
    grads = {k: torch.randn(2, *p.shape) for k, p in params.items()}
    for _ in range(3):
        params, state = two(params, state, grads)
    entered = files_entered(lambda: two(params, state, grads))
    assert 5 < len(set(entered)) <= 31, sorted(set(entered))
    assert len(entered) <= 300, entered
    assert not any(name.startswith("inplace") for name in entered)
