"""States of the variants of Muon move to another number of ranks, where momenta of each rank start from their mean."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import roles, tree
from fn.adapters import checkpoint

NAMES = ("lion_muon", "sign_muon", "ef21_muon", "dion2", "muon_bp")


def built(name: str) -> tuple[nn.Module, fn.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    make = partial(getattr(fn, name), axis="data")
    return model, fn.Optimizer(model.parameters(), make, schedule=fn.periodic(3), lr=0.01)


def train(model: nn.Module, opt: fn.Optimizer, steps: range) -> None:
    for step in steps:
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 6, generator=seed)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def momenta(opt: fn.Optimizer) -> list[Tensor]:
    return [leaf.clone() for moment in roles.find(opt.states, "first_moment") for leaf in tree.leaves(moment)]


def saved(folder: Path) -> dict[str, list[Tensor]]:
    found = {}
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        for name in NAMES:
            model, opt = built(name)
            train(model, opt, range(5))
            checkpoint.save(folder / name, opt)
            found[name] = momenta(opt)
    return found


def loaded(folder: Path) -> dict[str, list[Tensor]]:
    found = {}
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        for name in NAMES:
            model, opt = built(name)
            checkpoint.load(folder / name, opt)
            found[name] = momenta(opt)
            train(model, opt, range(5, 9))
            assert opt.skipped == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_momenta_start_from_their_mean_on_another_number_of_ranks(old: int, new: int, tmp_path: Path) -> None:
    before, after = run(old, saved, tmp_path), run(new, loaded, tmp_path)
    for name in NAMES:
        means = [torch.stack(of_ranks).mean(0) for of_ranks in zip(*(found[name] for found in before), strict=True)]
        for found in after:
            torch.testing.assert_close(found[name], means, msg=name)
