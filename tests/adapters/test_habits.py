"""What people do with torch's optimizers besides stepping them: settings of the process, empty groups, copies."""

from __future__ import annotations

import pickle
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
    schedule = optimizer.schedule if len(optimizer.phases) > 1 else None
    opt = fn.Optimizer(groups, partial(optimizer.make, axis="data"), schedule=schedule, lr=optimizer.lr)
    go_on(opt, 0, steps)
    return opt


def go_on(opt: fn.Optimizer, first: int, last: int) -> None:
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
        opt.step()


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
            except fn.RanksDisagree as error:
                found.append(f"{error.field}, rank {error.rank}; {len(opt.states)} group stays")
            else:
                found.append("accepted")
    with fn.bind(init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "data"))):
        fn.Optimizer([unlike], hidden)  # these ranks hold different parts of a model
    return found


def test_ranks_that_start_from_other_numbers_are_refused_unless_they_may_differ():
    """Nothing else would say so: the updates are the same, so the parameters stay apart for ever."""
    refused = "parameter unlike in group 1, rank 1; 1 group stays"
    for found in ranks.run(2, built_from_other_numbers):
        assert found == [*(refused if o.replicated else "accepted" for o in OPTIMIZERS), refused, "accepted"]


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


@each_optimizer
def test_a_pickled_optimizer_goes_on_bit_for_bit(optimizer):
    """With its schedule, its parameters and its errors, as what a trainer sends to another process."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    opt = run(optimizer, [p], steps=10)
    copy = pickle.loads(pickle.dumps(opt))
    assert copy.param_groups[0]["params"][0] is not p
    for o in (opt, copy):
        go_on(o, 10, 30)
    assert torch.equal(copy.param_groups[0]["params"][0], p)
    assert copy.steps == opt.steps == 30
    assert all(map(torch.equal, tree.leaves(copy.states), tree.leaves(opt.states)))


@pytest.mark.parametrize("given", [{}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("make", [fn.adamw, lambda lr, weight_decay=0.0: fn.adamw(lr, weight_decay=weight_decay)])
def test_a_hyper_parameter_takes_effect_whether_or_not_the_constructor_was_given_it(make, given):
    ends = []
    for change in (False, True):
        p = torch.nn.Parameter(torch.ones(3))
        opt = fn.Optimizer([p], make, **given)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9, cycle_momentum=False)  # adds keys
        if change:
            opt.param_groups[0]["weight_decay"] = 0.5
        go_on(opt, 0, 3)
        scheduler.step()
        ends.append(float(p.detach().sum()))
    assert ends[1] < ends[0] - 1e-3
    opt.param_groups[0]["weight_decay"] = -1.0
    before = p.detach().clone()
    with pytest.raises(ValueError, match="weight_decay: is -1"):
        go_on(opt, 3, 4)
    assert torch.equal(p, before)
