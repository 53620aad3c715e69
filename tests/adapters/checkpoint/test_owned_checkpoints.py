"""Owned tensors and slices move whole: to the same ranks bit for bit, to any other number with what is undelivered."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import tree
from fn.adapters import checkpoint
from fn.transforms.owned import OwnedState

SHAPES = ((6, 5), (6, 5), (7,), (3, 8), (), (6, 5), (5, 4, 3))


def build() -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    """Return params and NorMuon in codes both ways, gradients with damped errors in 8 bits; the axes are bound."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    labels = ["hidden" if len(shape) > 1 else "other" for shape in SHAPES]
    make = partial(fn.normuon, axis="data", codec=fn.int8(), labels=labels)
    return params, fn.Optimizer(params, make, schedule=fn.freeze_after(1), lr=0.05)


def step(params: list[torch.nn.Parameter], opt: fn.Optimizer, t: int) -> None:
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * t + i)
        p.grad = torch.randn(p.shape, generator=generator)
    opt.step()


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def owned_part(opt: fn.Optimizer) -> dict[str, torch.Tensor]:
    """Return what this rank owns, by path."""
    return {k: x.clone() for k, x in opt.state_dict().items() if k.startswith("state.") and not k.startswith("rank ")}


def undelivered(opt: fn.Optimizer) -> list[torch.Tensor]:
    """Return the mean of the ranks' errors of each gradient."""
    (state,) = tree.instances(opt.states, OwnedState)
    return [fn.pmean(e, "data") for e in state.errors.worker]


def saving(folder: str) -> dict[str, Any]:
    with fn.bind(mesh()):
        params, opt = build()
        for t in range(4):
            step(params, opt, t)
        checkpoint.save(folder, opt)
        whole = checkpoint.gather(opt)
        if dist.get_rank() == 0:
            torch.save(whole, f"{folder}/gathered.pt")
        torch.save(opt.state_dict(), f"{folder}/of_rank_{dist.get_rank()}.pt")
        found = {
            "owned": owned_part(opt),
            "undelivered": undelivered(opt),
            "params": [p.detach().clone() for p in params],
        }
        for t in (4, 5):
            step(params, opt, t)
        return {**found, "end": [p.detach().clone() for p in params]}


def loading(folder: str, old: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    with fn.bind(mesh()):
        params, opt = build()
        step(params, opt, 77)  # a state that is nowhere near
        checkpoint.load(folder, opt)
        found = {
            "owned": owned_part(opt),
            "undelivered": undelivered(opt),
            "params": [p.detach().clone() for p in params],
        }
        for t in (4, 5):
            step(params, opt, t)
        found["end"] = [p.detach().clone() for p in params]
        gathered = torch.load(f"{folder}/gathered.pt", weights_only=True)
        params, opt = build()
        step(params, opt, 77)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            opt.load_state_dict(gathered)
        found["gathered"], found["said"] = owned_part(opt), [str(w.message) for w in said]
        if old == world:
            torch.save(opt.state_dict(), f"{folder}/again_{rank}.pt")
            opt.load_state_dict(torch.load(f"{folder}/of_rank_{rank}.pt", weights_only=True))
            try:
                opt.load_state_dict(torch.load(f"{folder}/of_rank_{(rank + 1) % world}.pt", weights_only=True))
            except ValueError as error:
                found["refused"] = str(error)
        return found


@pytest.mark.parametrize(("old", "new"), [(2, 2), (3, 2), (2, 3), (1, 2)])
def test_whole_tensors_move(old: int, new: int, tmp_path: Path) -> None:
    saved = ranks.run(old, saving, str(tmp_path))
    loaded = ranks.run(new, loading, str(tmp_path), old)
    of_all = {path: x for found in saved for path, x in found["owned"].items()}
    for found in loaded:
        assert all(map(torch.equal, found["params"], saved[0]["params"]))
        for key in ("owned", "gathered"):
            mine = {path: x for path, x in found[key].items() if not path.endswith("owners")}
            assert any("mu" in path for path in mine)
            assert all(torch.equal(x, of_all[path]) for path, x in mine.items() if path in of_all), key
        for a, b in zip(found["undelivered"], saved[0]["undelivered"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        if old == new:
            assert all(map(torch.equal, found["end"], saved[0]["end"]))
            assert not found["said"]
            assert "which this rank owns" in found["refused"]
        elif old > 1:
            assert "its own errors" in found["said"][0]
    names = [{path for path in found["owned"] if path.endswith(("mu.0", "mu.1", "mu.2"))} for found in loaded]
    assert sum(map(len, names)) == len(set().union(*names)) == 3 + 2  # each has one owner
