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
    return stepped(*started(make, schedule, groups))


def started(make: Any, schedule: Any, groups: dict[str, Any]) -> tuple[fn.Optimizer, torch.Tensor]:
    p = torch.nn.Parameter(torch.ones(4))
    with fn.bind(groups):
        return fn.Optimizer([p], make, schedule=schedule, lr=0.1), p


def behind_backward(how: str, groups: dict[str, Any]) -> list[float]:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=groups["data"])
    if how == "average_gradients":
        opt: Any = torch.optim.SGD(model.parameters(), 0.1)
        running: Any = ddp.average_gradients(model, fn.int8(8), fn.classic())
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
    "late": partial(in_rounds, fn.late(partial(fn.adamw, axis="data")), fn.every(1, delay=1)),
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
    assert ranks.outcomes(3, of_all_kinds, timeout=2 * LIMIT, group_timeout=LIMIT) == [dict.fromkeys(KINDS, True)] * 3


def on_two_axes() -> list[list[float]]:
    """Return what is trained on both axes of a mesh and on each one, four times: at first, beside groups of some ranks,
    where the first two ranks have made one of the groups anew, and where they take the old one again."""
    first, mesh = (dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")) for _ in range(2))
    again, found = dist.new_group([0, 1]), []
    for number in range(4):
        groups = {name: (mesh if number else first).get_group(name) for name in ("node", "local")}
        if number == 1:
            uneven()
        if number == 2 and dist.get_rank() < 2:
            groups["local"] = again
        axes: list[Any] = [("local", "node"), "node", "local"]
        makes = [partial(fn.diloco, axis=axis) for axis in axes]
        found.append([x for make in makes for x in in_rounds(make, fn.every(2, delay=1), groups)])
    return found


def test_two_axes_and_each_of_them_meet_beside_groups_of_some_ranks():
    for first, *others in ranks.outcomes(4, on_two_axes, timeout=2 * LIMIT, group_timeout=LIMIT):
        assert others == [first] * 3
        assert len({*first}) == 12  # of three trainings over other ranks


def twice() -> list[list[float]]:
    """Return what is trained before and after some ranks, then all, have destroyed their groups and made others."""
    found = [KINDS[kind]({"data": dist.group.WORLD}) for kind in KINDS]
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.destroy_process_group(pair)
    found += [KINDS[kind]({"data": dist.group.WORLD}) for kind in ("average_gradients", "overlap")]
    (whole, p), (halves, q) = (started(*KINDS["a delay"].args, {"data": dist.group.WORLD}) for _ in range(2))
    stepped(whole, p)
    stepped(halves, q)
    with fn.ledger() as sent:
        wanted = stepped(whole, p)
        whole.state_dict()
    assert halves.state_dict()  # waits for the mean that is on its way
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{where[0]}/store", world), rank=rank, world_size=world)
    uneven()
    with fn.ledger() as sent_anew:
        assert stepped(halves, q) == wanted  # the world has the name that it had
        halves.state_dict()
    assert sent_anew.messages == sent.messages != {}  # no step sends more for groups that are made in it
    return found + [KINDS[kind]({"data": dist.group.WORLD}) for kind in KINDS]


def test_groups_that_are_destroyed_and_made_anew():
    for found in ranks.outcomes(3, twice, timeout=2 * LIMIT, group_timeout=LIMIT):
        assert found == [*found[:4], *found[2:4], *found[:4]]


def given_back_on_one_rank() -> list[Any]:
    """Return the mean of what the ranks say in twins that one rank has given back and the others still have."""
    world, kept, found = dist.group.WORLD, [], []
    for t in range(4):
        model = torch.nn.Linear(4, 4)
        with fn.bind({"data": world}):
            opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(9))
        ddp.overlap(model, opt, least_wire_seconds=0.0)
        model(torch.ones(2, 4) + dist.get_rank()).square().mean().backward()
        opt.step()
        if (dist.get_rank() + t) % 3:
            ddp.close(opt)
        kept.append((model, opt))
        found.append([p.flatten().tolist() for p in model.parameters()])
    with bind_twin("data", world):
        return [fn.pmean(torch.full((2,), float(dist.get_rank())), "data").tolist(), found]


def test_twins_that_one_rank_has_given_back_and_another_has_not():
    first, *others = ranks.outcomes(3, given_back_on_one_rank, timeout=2 * LIMIT, group_timeout=LIMIT)
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


def test_ranks_that_do_not_meet_in_a_new_group_are_not_told_of_batches_and_phases(alone, monkeypatch):
    def waits(*args: Any, **options: Any) -> Any:
        raise dist.DistStoreError("wait timeout after 1800000ms")

    monkeypatch.setattr(dist, "new_group", waits)
    with pytest.raises(fn.PeerLost, match=r"axis 'data' is lost, noticed in the making of a process group") as raised:
        bind_twin("data", alone)
    assert "batches" not in str(raised.value)
    assert "phases" not in str(raised.value)
    assert raised.value.axis == "data"
