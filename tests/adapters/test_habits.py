"""What people do with torch's optimizers besides stepping them: settings of the process, empty groups, copies."""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS, each_optimizer
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import tree


def run(optimizer, groups, steps: int = 30) -> fn.Optimizer:
    """Take steps through all phases of an optimizer."""
    opt = fn.Optimizer(groups, partial(optimizer.make, axis="data"), schedule=optimizer.schedule, lr=optimizer.lr)
    for t in range(steps):
        generator = torch.Generator().manual_seed(t)
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
        opt.step()
    return opt


def built_from_other_numbers() -> list[str]:
    """Build optimizers over parameters of which one differs between the ranks; return what each said."""
    rank, found = dist.get_rank(), []
    alike, unlike = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.tensor([1.0, 1.0 + rank]))
    hidden = lambda lr: fn.adamw(lr, axis="data")  # noqa: E731  # the axis can be seen in its transform only
    for make in [*(partial(o.make, axis="data") for o in OPTIMIZERS), hidden, fn.adamw]:
        with fn.bind({"data": dist.group.WORLD}):
            opt = fn.Optimizer([("alike", alike)], make)
            try:
                opt.add_param_group({"params": [("unlike", unlike)]})
                found.append("accepted")
            except fn.RanksDisagree as error:
                assert error.rank == 1
                assert len(opt.param_groups) == len(opt.states) == 1
                found.append(error.field)
    with fn.bind(init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "data"))):
        fn.Optimizer([unlike], hidden)  # these ranks hold different parts of a model
    return found


def test_ranks_that_start_from_other_numbers_are_refused_unless_they_may_differ():
    """Nothing else would say so: the updates are the same, so the parameters stay apart for ever."""
    refused = ["parameter unlike in group 1" if o.replicated else "accepted" for o in OPTIMIZERS]
    for found in ranks.run(2, built_from_other_numbers):
        assert found == [*refused, "parameter unlike in group 1", "accepted"]


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_changes_nothing(optimizer, dtype):
    found = []
    for default in (torch.float32, torch.float64):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float32).to(dtype))
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            opt = run(optimizer, [p])
        finally:
            torch.set_default_dtype(before)
        found.append((p.detach(), [leaf.dtype for leaf in tree.leaves(opt.states)]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@each_optimizer
def test_a_group_without_parameters_takes_part_in_every_phase(optimizer):
    """As models leave behind whose norms, say, were to get a group of their own and that have none."""
    alone, beside = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    run(optimizer, [{"params": [alone]}])
    opt = run(optimizer, [{"params": []}, {"params": [beside]}])
    torch.testing.assert_close(beside, alone)
    assert opt.skipped == 0
