"""Islands of two ranks over gloo and torchft: DDP, FSDP2 or Muon inside, a rank that is killed, an island that returns.

`make torchft-test` runs these in an environment that has torchft.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pickle
import re
import signal
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sea import Sea
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fn
from fn import tree
from fn.adapters.optim.core import stage_exchange
from fn.adapters.optim.shards import pieces

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not installed: make torchft-test"),
]

H = 3
RANKS = 2
LOST_IN = 2
"""The round in which a rank is killed, counted by the manager's steps; 0 is the one in which all meet."""


class Job(NamedTuple):
    """What a rank does. port: of its island's store. at: where it is killed. full: how many islands are in the end."""

    island: int
    rank: int
    lighthouse: str
    port: int
    full: int
    ranks: int = RANKS
    inside: str = "ddp"
    outer_lr: float = 0.7
    lr: float = 0.02
    allow: str = ""
    patience: float = 60
    start: int = 0
    delay: int = 0
    at: str | int | None = None
    init_sync: bool = True
    least: int = LOST_IN + 2


class Told(NamedTuple):
    """What a rank tells in the end. anchors: by round. params: by step. exchanges: (round, islands, written)."""

    anchors: dict[int, str]
    params: dict[int, str]
    exchanges: list[tuple[int, int, bool]]
    rate: float


def rank_of_island(job: Job, end: Any) -> None:
    import torchft

    import fn.adapters.torchft.islands as adapter

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["FN_ISLAND_ALLOW"] = job.allow
    limit = timedelta(seconds=120)
    store = dist.TCPStore("localhost", job.port, is_master=False, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=dist.PrefixStore("inside", store), rank=job.rank, world_size=job.ranks)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=job.patience)), load_state_dict=None, state_dict=None,
        min_replica_size=1, use_async_quorum=False, timeout=limit, quorum_timeout=limit, rank=job.rank,
        world_size=job.ranks, store_addr="localhost", store_port=job.port, lighthouse_addr=job.lighthouse,
        hostname="localhost", replica_id=f"island_{job.island}", init_sync=job.init_sync,
    )  # fmt: skip
    torch.manual_seed(job.island)  # islands start apart
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    if job.inside == "ddp":
        model = DistributedDataParallel(model)
    elif job.inside == "owned":  # the optimizer itself averages in the island
        pass
    elif job.inside == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    else:  # copies of a model in one piece: what is averaged is as in HSDP
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard")))
    schedule = fn.every(H, start=job.start, delay=job.delay)
    make = owned if job.inside == "owned" else partial(fn.diloco, weight_decay=0.0)
    with fn.bind(init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("data",))):
        of_job = partial(make, outer_lr=job.outer_lr)
        opt = adapter.optimizer(model.parameters(), of_job, manager, schedule=schedule, lr=job.lr)
    exchanges: list[tuple[int, int, bool]] = []
    ask, begin = manager.should_commit, manager.start_quorum

    def here(point: str | int) -> None:
        if job.at == point and manager.current_step() == LOST_IN:
            end.send_bytes(pickle.dumps(None))
            os.kill(os.getpid(), signal.SIGKILL)

    def start_quorum() -> None:
        here("quorum")
        begin()

    def should_commit() -> bool:
        here("commit")
        number, written = manager.current_step(), ask()
        exchanges.append((number, manager.num_participants(), written))
        here("written")
        return written

    def staged(*args: Any) -> Any:
        here("counted")
        found = stage_exchange(*args)
        here("staged")
        return found

    anchors: dict[int, str] = {}
    params: dict[int, str] = {}
    end.send_bytes(b"")
    end.recv_bytes()  # now all have their libraries
    with (
        mock.patch.object(manager, "should_commit", should_commit),
        mock.patch.object(manager, "start_quorum", start_quorum),
        mock.patch.object(adapter, "stage_exchange", staged),
    ):
        while True:
            full = [written and count == job.full for _, count, written in exchanges[-2:]]
            if full == [True, True] and manager.current_step() >= job.least and opt.steps % H == 0:
                break
            here(opt.steps % H)
            draw = torch.Generator().manual_seed(1000 * opt.steps + 10 * job.island + job.rank)
            x = torch.randn(8, 5, generator=draw)
            (model(x) - x[:, :4].sin()).square().mean().backward()
            try:
                opt.step()
            except ValueError as error:
                end.send_bytes(pickle.dumps(str(error)))
                os._exit(1)
            opt.zero_grad()
            params[opt.steps] = digest(pieces([*model.parameters()]))
            (anchor,) = tree.fields(opt.states, "anchor")
            anchors[manager.current_step()] = digest(anchor)
    end.send_bytes(pickle.dumps(Told(anchors, params, exchanges, opt.param_groups[0]["lr"])))
    end.recv_bytes()  # the others may still talk to this one
    os._exit(0)


def owned(lr: Any, axis: str, outer_lr: float) -> fn.Transform:
    """Return rounds of Muon whose steps the ranks of an island share; vectors go in codes within the island."""
    codes = fn.chain(fn.compressed_average("data", fn.int8()), fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
    kinds = {"muon": fn.muon(lr, axis="data"), "codes": codes}
    inner = fn.partition(kinds, lambda params: tree.map(lambda p: "muon" if p.ndim == 2 else "codes", params))
    mean = fn.compressed_average(axis, fn.identity(), fn.off())
    return fn.chain(fn.average(axis), fn.outer(inner, fn.scale_by_learning_rate(outer_lr), mean))


def digest(leaves: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in leaves)).hexdigest()


class Islands(Sea):
    """Islands of two ranks, by (island, rank)."""

    def start(self, islands: Any, victim: tuple[int, int] | None = None, at: Any = None, **job: Any) -> None:
        """Let islands begin together.

        Args: islands: their numbers, or number -> fields of `Job`. victim, at: the rank that is killed, and where.
        """
        jobs = {}
        for island in islands:
            # A store for each start, as torchrun has one prefix for each.
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self.stores = [*getattr(self, "stores", []), store]
            asked = {**job, **(islands[island] if isinstance(islands, dict) else {})}
            for rank in range(asked.get("ranks", RANKS)):
                point, address = at if (island, rank) == victim else None, self.lighthouse.address()
                jobs[island, rank] = Job(island, rank, address, store.port, at=point, **asked)
        self.begin(rank_of_island, jobs)


def check_alike(found: dict[tuple[int, int], Told], inside: str) -> None:
    """Hold anchors of the same place on all islands against each other, and the params of an island, bit for bit."""
    for place in range(RANKS):
        every = [told.anchors for (_, rank), told in found.items() if rank == place]
        for number in {n for anchors in every for n in anchors}:
            assert len({anchors[number] for anchors in every if number in anchors}) == 1, f"round {number}"
        assert len({max(anchors) for anchors in every}) == 1
    for island in {island for island, _ in found}:
        first, other = (found[island, rank] for rank in range(RANKS))
        assert first.params.keys() == other.params.keys()
        assert first.exchanges == other.exchanges
        alike = [first.params[step] == other.params[step] for step in first.params]
        assert alike == [inside != "fsdp"] * len(alike)  # of FSDP2 each has its own half


@pytest.mark.parametrize("inside", ["ddp", "fsdp", "hsdp", "owned"])
@pytest.mark.parametrize("init_sync", [True, False], ids=["torchft syncs", "torchft does not"])
def test_the_ranks_of_an_island_stay_alike(inside, init_sync):
    """torchft heals the second rank of each island from another island than the first."""
    with Islands(join_ms=10_000) as sea:
        sea.start(range(2), full=2, inside=inside, init_sync=init_sync)
        found = sea.end()
    check_alike(found, inside)


POINTS = [*range(H), "quorum", "counted", "staged", "commit", "written"]
"""Before each local step of a round, and through its exchange."""


@pytest.mark.parametrize("point", POINTS)
def test_an_island_one_of_whose_ranks_is_killed_returns_whole(point):
    victim = POINTS.index(point) % 2, POINTS.index(point) // 2 % 2
    inside = ("ddp", "owned", "fsdp")[POINTS.index(point) % 3]
    with Islands(least=1, join_ms=10_000) as sea:
        sea.start(range(2), victim, full=2, inside=inside, at=point, least=LOST_IN + 4)
        sea.lost(victim)
        sea.kill((victim[0], 1 - victim[1]))  # as torchrun does
        sea.start([victim[0]], full=2, inside=inside, least=LOST_IN + 4)
        found = sea.end()
    check_alike(found, inside)
    survivor, returned = found[1 - victim[0], 0], found[victim[0], 0]
    assert [count for _, count, written in survivor.exchanges if written][:2] == [2, 2]
    assert min(returned.anchors) > LOST_IN - 1  # it began where the other was
    assert [told.exchanges[-1][1] for told in found.values()] == [2] * len(found)


SCHEDULES = {"warm-up": {"start": 8 * H}, "short warm-up": {"start": H}, "late": {"delay": 1}}


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_islands_warm_up_and_take_over_late_means(schedule, inside):
    """One is killed, and returns."""
    job = {"full": 2, "inside": inside, "least": 9 * H if schedule == "warm-up" else LOST_IN + 4, **SCHEDULES[schedule]}
    with Islands(least=1, join_ms=10_000) as sea:
        sea.start(range(2), (1, 0), at="commit", **job)
        sea.lost((1, 0))
        sea.kill((1, 1))
        sea.start([1], **job)
        found = sea.end()
    check_alike(found, inside)
    assert min(found[1, 0].anchors) > LOST_IN - 1


REFUSED = {
    "settings": ({"outer_lr": 0.5}, "make: expected .*outer_lr to be 0.7, as on the other islands, but got 0.5"),
    "rate": ({"lr": 0.5}, "make: expected lr of param group 0 to be 0.02, .* got 0.5; python -m fn island --allow lr"),
    "ranks": ({"ranks": 1}, "island: expected 2 ranks, as the others have, but got 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_island_that_is_made_otherwise_is_refused_and_the_other_goes_on(what):
    job, message = REFUSED[what]
    with Islands(least=1, join_ms=10_000) as sea:
        sea.start({0: {}, 1: job}, full=1, patience=10)
        found = sea.end()
    for (island, _), told in found.items():
        assert (island == 1) == isinstance(told, str)
        assert island == 0 or re.search(message, told)
    assert found[0, 0].exchanges[-1] == found[0, 1].exchanges[-1]


def test_an_island_may_have_a_rate_of_its_own_where_that_is_allowed():
    with Islands(least=2, join_ms=10_000) as sea:
        sea.start({0: {"lr": 0.02}, 1: {"lr": 0.01}}, full=2, ranks=1, allow="lr")
        found = sea.end()
    assert [found[island, 0].rate for island in range(2)] == pytest.approx([0.02, 0.01])
    assert len({told.anchors[max(told.anchors)] for told in found.values()}) == 1
