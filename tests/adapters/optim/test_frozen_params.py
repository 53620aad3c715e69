"""Params whose `requires_grad` is switched off for a while, on all ranks alike: they stay, and the ranks stay alike."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase
from fn.adapters.ddp import overlap

STEPS = [Phase.WARMUP] * 4 + [Phase.LOCAL, Phase.LOCAL, Phase.COMPRESSED] * 3
"""A step of these synchronises if its number is divisible by three."""

OFF = range(5, 11)
"""Steps in which the second param requires no gradient: it begins and ends between two synchronisations."""

MAKES: dict[str, Any] = {
    "0/1 Adam": (fn.zero_one_adam, STEPS.__getitem__),
    "1-bit Adam": (fn.onebit_adam, fn.freeze_after(7)),
    "a master copy": (partial(fn.sharded_onebit_adam, master=True), fn.freeze_after(7)),
    "LoCo": (partial(fn.loco_adamw, master=True, codec=fn.identity(), feedback=fn.off()), fn.freeze_after(7)),
}


def trained(name: str, ahead: bool) -> list[list[torch.Tensor]]:
    """Return three params after each step."""
    (make, schedule), params = MAKES[name], [torch.nn.Parameter(torch.ones(n)) for n in (5, 6, 3)]
    with fn.bind({"data": dist.group.WORLD}):
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        opt = fn.Optimizer(groups, partial(make, axis="data"), schedule=schedule, lr=0.05, weight_decay=0.1)
    if ahead:
        overlap(torch.nn.ParameterList(params), opt, least_wire_seconds=0.0)
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for t in range(len(STEPS)):
        params[1].requires_grad_(t not in OFF)
        noise = [torch.randn(p.shape, generator=generator) for p in params]
        sum((p * g).sum() for p, g in zip(params, noise, strict=True)).backward()
        opt.step()
        opt.zero_grad()
        found.append([p.detach().clone() for p in params])
    return found


def cases() -> dict[tuple[str, bool], list]:
    return {(name, ahead): trained(name, ahead) for name in MAKES for ahead in (False, True)}


@cache
def answers() -> list[dict[tuple[str, bool], list]]:
    return ranks.run(2, cases)


@pytest.mark.parametrize("name", MAKES)
def test_they_stay_in_every_phase_and_go_on_afterwards(name):
    for rank in answers():
        for ahead in (False, True):
            found = rank[name, ahead]
            for t in OFF:
                assert torch.equal(found[t][1], found[OFF.start - 1][1])
                assert not torch.equal(found[t][0], found[t - 1][0])
            usual = max((found[t][0] - found[t - 1][0]).abs().max() for t in range(1, len(STEPS)))
            assert 0 < (found[OFF.stop][1] - found[OFF.stop - 1][1]).abs().max() < 2 * usual  # it does not jump


@pytest.mark.parametrize("name", MAKES)
def test_behind_backward_as_in_serial_steps(name):
    for rank in answers():
        for serial, ahead in zip(rank[name, False], rank[name, True], strict=True):
            assert all(map(torch.equal, serial, ahead))


@pytest.mark.parametrize("name", MAKES)
def test_the_ranks_are_alike_after_a_synchronisation(name):
    one, other = (rank[name, False] for rank in answers())
    assert all(map(torch.equal, one[12], other[12]))


def test_what_needed_no_gradient_at_construction_is_left_out_and_named_where_it_is_thawed():
    used, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    opt = fn.Optimizer([("used", used), ("frozen", frozen)], fn.adamw, lr=0.1)
    assert opt.param_groups[0]["param_names"] == ["used"]
    assert not any(x.shape == frozen.shape for x in fn.tree.leaves(opt.states))
    for p in (used, frozen.requires_grad_()):
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"parameter frozen .*call add_param_group"):
        opt.step()
    opt.add_param_group({"params": [("frozen", frozen)]})
    opt.step()
    assert used[0] != 1
    assert frozen[0] != 1


THAWED: dict[str, Any] = {
    **MAKES,
    "DiLoCo": (fn.diloco, fn.every(3, start=1)),
    "owned Muon": (fn.muon, None),
    "votes of Muon": (fn.sign_muon, fn.freeze_after(0)),
}


def thawed(name: str) -> tuple[list[str], torch.Tensor, list[torch.Tensor]]:
    """Return what steps said, the layer when it was thawed, and the params behind the cure and a synchronisation."""
    (make, schedule), model = THAWED[name], torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 6))
    model[0].requires_grad_(False)
    with fn.bind({"data": dist.group.WORLD}):
        more = {"labels": fn.labels_of(model)} if "Muon" in name else {}
        opt = fn.Optimizer(model.named_parameters(), partial(make, axis="data"), schedule=schedule, lr=0.05, **more)
    generator, said = torch.Generator().manual_seed(dist.get_rank()), []

    def step() -> None:
        model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        try:
            opt.step()
        except ValueError as error:
            said.append(str(error))
            opt.add_param_group({"params": [(f"0.{name}", p) for name, p in model[0].named_parameters()]})
            opt.step()
        opt.zero_grad()

    for _ in range(2):
        step()
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    for _ in range(2, len(STEPS)):
        step()
    return said, before, [p.detach().clone() for p in model.parameters()]


def all_thawed() -> dict[str, Any]:
    return {name: thawed(name) for name in THAWED}


def test_what_is_thawed_on_all_ranks_is_refused_on_all_and_trains_behind_the_cure():
    """Connections that were closed by the refusal would let no rank take a step again, behind the cure neither."""
    one, other = ranks.run(2, all_thawed)
    for name, (said, before, params) in one.items():
        assert ["call add_param_group" in text and "0.weight" in text for text in said] == [True], name
        assert not torch.equal(params[0], before), name
        assert all(map(torch.equal, params, other[name][2])), name


APART: dict[str, Any] = {
    "AdamW": (fn.adamw, None, 0),
    "1-bit Adam": (fn.onebit_adam, fn.freeze_after(2), 0),
    "DiLoCo": (fn.diloco, fn.every(2), 0),
    "DiLoCo, in a later round": (fn.diloco, fn.every(2), 3),
    "DiLoCo, late": (fn.diloco, fn.every(2, delay=1), 3),
    "DiLoCo, of fragments": (partial(fn.diloco, fragments=2), fn.every(4, fragments=2), 3),
    "late AdamW": (fn.late(fn.adamw), fn.every(1, delay=1, start=1), 3),
}
"""A method, its schedule, and the step in front of which one rank alone switches a parameter off."""


def switched_off_by_one_rank(name: str, rank: int) -> tuple[Any, ...]:
    """Return what the ranks said, in front of which step, the steps that count, and params behind the cure."""
    (make, schedule, off), params = APART[name], [torch.nn.Parameter(torch.ones(n)) for n in (5, 6, 3)]
    with fn.bind({"data": dist.group.WORLD}):
        groups = [{"params": [("first", params[0]), ("second", params[1])]}, {"params": [("third", params[2])]}]
        opt = fn.Optimizer(groups, partial(make, axis="data"), schedule=schedule, lr=0.05)
    generator, said = torch.Generator().manual_seed(dist.get_rank()), []

    def step() -> None:
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        opt.step()

    for _ in range(off):
        step()
    params[1].requires_grad_(dist.get_rank() != rank)
    for t in range(off, off + 4):
        try:
            step()
        except fn.RanksDisagree as error:
            said.append((t, error.rank, error.field, str(error)))
            break
    taken = opt.steps
    params[1].requires_grad_(False)
    before = params[1].detach().clone()
    for _ in range(4):
        step()
    opt.states  # noqa: B018  # lands what is on its way
    return said, taken, torch.equal(before, params[1]), [p.detach().clone() for p in params]


def apart() -> dict[tuple[str, int], Any]:
    return {(name, rank): switched_off_by_one_rank(name, rank) for name in APART for rank in (0, 1)}


def test_what_one_rank_alone_switches_off_is_named_on_all_before_the_next_exchange():
    """Such a parameter drifted: it stayed on one rank, and moved on the others."""
    found = ranks.run(2, apart)
    for (name, rank), (said, taken, stays, params) in found[0].items():
        assert found[1][name, rank][0] == said, name
        ((step, culprit, field, text),) = said
        off, left = APART[name][2], "nothing has moved" if APART[name][2] == 0 else "parameters and state are as after"
        assert (culprit, field) == (1, "requires_grad of parameter second in group 0"), name
        assert f"is {rank == 0} on rank 1 and {rank == 1} on rank 0; switch it on all ranks alike" in text, name
        assert left in text, name
        assert off <= step <= off + 2, name
        assert taken == (0 if off == 0 else step + 1), name
        assert stays, name
        if "Adam" in name and "late" not in name:
            assert all(map(torch.equal, params, found[1][name, rank][3])), name


def two_axes() -> list[tuple[int | None, str]]:
    """Let rank 3 of 2 x 2 alone switch a parameter off in front of the first step."""
    p, mesh = torch.nn.Parameter(torch.ones(3)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "data"))
    with fn.bind(mesh):
        opt = fn.Optimizer([p], lambda lr: fn.adamw(lr, axis=("node", "data")), lr=0.1)
    p.requires_grad_(dist.get_rank() != 3)
    p.grad = torch.ones(3) if p.requires_grad else None
    try:
        opt.step()
    except fn.RanksDisagree as error:
        return [(error.rank, str(error))]
    return []


def test_all_ranks_of_two_axes_hear_of_it():
    for found in ranks.run(4, two_axes):
        ((_, text),) = found
        assert "requires_grad of parameter 0 in group 0 is False on rank 1 and True on rank 0" in text
