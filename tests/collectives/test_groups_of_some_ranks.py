"""Process groups that some ranks have and others lack, drop or make anew: ranks meet in twins all the same.

torch names a group that is made by its own ranks by how many groups a process has. Ranks under other names wait for
each other until the group's timeout, which is shorter here than a test may take.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import fn
from fn.adapters import ddp
from fn.collectives.comm_thread import bind_twin

LIMIT = 40.0
"""Seconds after which ranks that do not meet raise: longer than they take on a busy machine."""


def stepped(opt: torch.optim.Optimizer, p: torch.Tensor, steps: int = 6) -> list[float]:
    for t in range(steps):
        p.grad = torch.arange(4.0) + dist.get_rank() + t
        opt.step()
    return p.tolist()


def in_rounds(make: Any, schedule: Any, groups: dict[str, Any]) -> list[float]:
    p = torch.nn.Parameter(torch.ones(4))
    with fn.bind(groups):
        return stepped(fn.Optimizer([p], make, schedule=schedule, lr=0.1), p)


def behind_backward(how: str, groups: dict[str, Any]) -> list[float]:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=groups["data"])
    if how == "average_gradients":
        opt: Any = torch.optim.SGD(model.parameters(), 0.1)
        running: Any = ddp.average_gradients(model, fn.int8(4), fn.classic())
    else:
        schedule = fn.freeze_after(2)
        running = opt = ddp.optimizer(model, fn.onebit_adam, schedule=schedule, lr=0.1, least_wire_seconds=0.0)
    for t in range(4):
        opt.zero_grad()
        model(torch.arange(8.0).view(2, 4) + dist.get_rank() + t).square().mean().backward()
        opt.step()
    ddp.close(running)
    return [x for p in model.parameters() for x in p.flatten().tolist()]


KINDS = {
    "late": partial(in_rounds, fn.late(partial(fn.adamw, axis="data")), None),
    "a delay": partial(in_rounds, partial(fn.diloco, axis="data"), fn.every(2, delay=1)),
    "average_gradients": partial(behind_backward, "average_gradients"),
    "overlap": partial(behind_backward, "overlap"),
}


def uneven() -> None:
    """Give rank 0 two groups and rank 1 one that no other rank has."""
    for _ in range(max(0, 2 - dist.get_rank())):
        dist.new_group([dist.get_rank()])


def of_all_kinds() -> dict[str, bool]:
    """Return, by kind, whether what is trained is as without groups of some ranks."""
    groups = {kind: (dist.new_group(), dist.new_group()) for kind in KINDS}
    wanted = {kind: KINDS[kind]({"data": first}) for kind, (first, _) in groups.items()}
    uneven()
    return {kind: KINDS[kind]({"data": second}) == wanted[kind] for kind, (_, second) in groups.items()}


def test_groups_of_some_ranks_change_nothing():
    assert ranks.outcomes(3, of_all_kinds, group_timeout=LIMIT) == [dict.fromkeys(KINDS, True)] * 3


def on_two_axes() -> list[bool]:
    """On a mesh of two axes and on each one, with groups of some ranks in between; the last axes are one rank's own."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("local", "node"))
    uneven()
    names: list[Any] = [("local", "node"), "node", "local"]
    pairs = {name: mesh.get_group(name) for name in ("local", "node")}
    if dist.get_rank() == 0:
        pairs["log"] = dist.new_group([0])  # beside the axes of the optimizer
    mine = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = []
    for axis in names:
        p = torch.nn.Parameter(torch.zeros(4))
        with fn.bind(pairs):
            opt = fn.Optimizer([p], partial(fn.local_sgd, axis=axis), schedule=fn.every(1, delay=1), lr=1.0)
            p.grad = -mine * (1 + dist.get_rank())
            opt.step()  # from here on, nothing but the mean of what was moved
            for _ in range(3):
                p.grad = torch.zeros(4)
                opt.step()
            found.append(torch.allclose(p, mine * fn.pmean(torch.tensor(1.0 + dist.get_rank()), axis)))
    return found


def test_two_axes_and_each_of_them_meet_beside_groups_of_some_ranks():
    assert ranks.outcomes(4, on_two_axes, group_timeout=LIMIT) == [[True] * 3] * 4


def some_have_more() -> list[Any]:
    """Return what two optimizers come to, the first of which rank 0 has bound beside an axis of its own."""
    world = dist.group.WORLD
    own = {"log": dist.new_group([0])} if dist.get_rank() == 0 else {}
    pair = {"pair": dist.new_group([0, 1], use_local_synchronization=True)} if dist.get_rank() < 2 else {}
    kind = KINDS["a delay"]
    return [kind({"data": world}), kind({**own, "data": world}), kind({"data": world, **pair, **own})]


def test_axes_that_some_ranks_bind_beside_those_of_the_optimizer_change_nothing():
    for found in ranks.outcomes(3, some_have_more, group_timeout=LIMIT):
        assert found == [found[0]] * 3


def twice() -> list[list[float]]:
    """Return what is trained before and after some ranks, then all, have destroyed their groups and made others."""
    found = [KINDS[kind]({"data": dist.group.WORLD}) for kind in KINDS]
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.destroy_process_group(pair)
    found += [KINDS[kind]({"data": dist.group.WORLD}) for kind in ("average_gradients", "overlap")]
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{where[0]}/store", world), rank=rank, world_size=world)
    uneven()
    return found + [KINDS[kind]({"data": dist.group.WORLD}) for kind in KINDS]


def test_groups_that_are_destroyed_and_made_anew():
    for found in ranks.outcomes(3, twice, group_timeout=LIMIT):
        assert found == [*found[:4], *found[2:4], *found[:4]]


def given_back_on_one_rank() -> list[Any]:
    """Return the mean of what the ranks say in twins that one rank has given back and the others still have."""
    model = torch.nn.Linear(4, 4)
    world, opts = dist.group.WORLD, []
    for t in range(4):
        with fn.bind({"data": world}):
            opts.append(fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"), lr=0.1))
        ddp.overlap(model, opts[-1], least_wire_seconds=0.0)
        model(torch.ones(2, 4) + dist.get_rank()).square().mean().backward()
        opts[-1].step()
        if (dist.get_rank() + t) % 3:
            ddp.close(opts[-1])
    with bind_twin("data", world), fn.ledger() as sent:
        mean = fn.pmean(torch.full((2,), float(dist.get_rank())), "data").tolist()
    return [mean, [p.flatten().tolist() for p in model.parameters()], sum(row.bytes for row in sent)]


def test_twins_that_one_rank_has_given_back_and_another_has_not():
    first, *others = ranks.outcomes(3, given_back_on_one_rank, group_timeout=LIMIT)
    assert first[0] == [1.0, 1.0]
    assert others == [first] * 2


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("error")
def test_this_torch_takes_the_name_that_ranks_have_agreed_on(alone):
    """It has no public argument for that: a torch that asks for names otherwise has to be answered otherwise."""
    names = {bind_twin("data", alone).axes["data"].transport for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("fn ") for name in names)
    assert str(dist.new_group([0], use_local_synchronization=True).group_name) not in names  # torch names it again


@pytest.mark.parametrize("asks", [True, False])
def test_under_a_torch_that_names_groups_otherwise_a_warning_says_what_ranks_need(alone, asks, monkeypatch):
    made = dist.new_group([0], use_local_synchronization=True)
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made)
    if not asks:
        monkeypatch.delattr(c10d, "_process_group_name")
    with pytest.warns(UserWarning, match="make the same groups on all ranks"):
        twin = bind_twin("data", alone)
    assert twin.axes["data"].transport == made.group_name
    with twin:
        assert fn.pmean(torch.ones(2), "data").tolist() == [1.0, 1.0]
