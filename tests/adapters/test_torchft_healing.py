"""What an island is healed with, where islands have two ranks: one whole state of the nearest, the same for both.

Two islands train; a third comes and is healed by one of them. torchft's own way of healing is put in by hand, to see
that the test would notice: a state that a thread exports while a step runs, and a source for each rank. `make
torchft-test` runs these in an environment that has torchft.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pickle
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

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
from fn.adapters.optim.shards import pieces

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not installed: make torchft-test"),
]

H = 3
RANKS = 2
ISLANDS = 3
"""The last one comes late."""

SLOW = 4e6
"""Bytes a second of a link that is slow: loopback carries forty million and more where many processes wait."""


class Job(NamedTuple):
    """What a rank does. port: of its island's store. inside: ddp or fsdp. defect: what is put in. slow: its link is."""

    island: int
    rank: int
    lighthouse: str
    port: int
    inside: str
    defect: str = ""
    slow: bool = False


def exported_by_a_thread(adapter: Any, opt: Any, job: Job) -> None:
    """Hand over what a thread exports while a step runs, as the thread of an asynchronous quorum does."""
    if job.island == ISLANDS - 1:  # which hands nothing over
        return
    state_of, copied, stepped, threads = adapter.state_of, dict[str, Tensor](), threading.Event(), list[Any]()

    def export(state: dict[str, Tensor]) -> None:
        for place, path in enumerate(state):
            if place == len(state) // 2:
                stepped.wait()  # nothing keeps the scheduler from letting the step run here
            copied[path] = state[path].clone()

    def begin() -> None:
        stepped.clear()
        threads.append(threading.Thread(target=export, args=(state_of(opt),)))
        threads[-1].start()

    def end(*_: Any) -> dict[str, Tensor]:
        stepped.set()
        threads[-1].join()
        return copied

    begin()
    opt.register_step_post_hook(lambda *_: (end(), begin())[1])
    adapter.state_of = end


def a_source_for_each_rank(adapter: Any, opt: Any, job: Job) -> None:
    """Heal each rank of an island from another one, as torchft's quorum says."""
    # In the first quorum all are behind, and become copies of the first.
    adapter.nearest = lambda seconds, sources, takers: sources[0 if sources == takers else job.rank]


def a_message_is_lost(adapter: Any, opt: Any, job: Job) -> None:
    """Let the message of the quorum fail on one rank of the island that is to be healed."""
    meet, failed = opt.meet, list[int]()

    def failing(*numbers: float) -> Any:
        if (job.island, job.rank) == (ISLANDS - 1, 1) and len(numbers) > 3 and not failed:  # fewer are a greeting
            failed.append(1)
            raise RuntimeError("a cable was cut")
        return meet(*numbers)

    opt.meet = failing


DEFECTS = {
    "a thread exports": exported_by_a_thread,
    "a source for each rank": a_source_for_each_rank,
    "a message is lost": a_message_is_lost,
}


def rank_of_island(job: Job, end: Any) -> None:
    """Train until the exchange in which the third island is healed, and tell the states that ranks had in each."""
    import torchft

    import fn.adapters.torchft.islands as adapter

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=120)

    class Slow(torchft.ProcessGroupGloo):
        def alltoall_base(self, out: Tensor, x: Tensor, *args: Any) -> Any:
            time.sleep(x.numel() * x.element_size() / SLOW)
            return super().alltoall_base(out, x, *args)

    store = dist.TCPStore("localhost", job.port, is_master=False, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=dist.PrefixStore("inside", store), rank=job.rank, world_size=RANKS)
    manager = torchft.Manager(
        pg=(Slow if job.slow else torchft.ProcessGroupGloo)(timeout=timedelta(seconds=20)), load_state_dict=None,
        state_dict=None, min_replica_size=1, use_async_quorum=False, timeout=limit, quorum_timeout=limit, rank=job.rank,
        world_size=RANKS, store_addr="localhost", store_port=job.port, lighthouse_addr=job.lighthouse,
        hostname="localhost", replica_id=f"island_{job.island}", init_sync=False,
    )  # fmt: skip
    torch.manual_seed(job.island)
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    if job.inside == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    opt = adapter.optimizer(model.parameters(), fn.diloco, manager, schedule=fn.every(H), lr=0.02)
    if job.defect:
        DEFECTS[job.defect](adapter, opt, job)
    had: dict[int, str] = {}
    votes: list[bool] = []
    ask = manager.should_commit

    def should_commit() -> bool:
        """Note the states between healing and what the exchange writes: there both islands have the same."""
        moments = pieces(tree.leaves(opt.states))
        had[manager.current_step()] = hashlib.sha256(b"".join(x.numpy().tobytes() for x in moments)).hexdigest()
        votes.append(ask())
        return votes[-1]

    manager.should_commit = should_commit
    end.send_bytes(b"")
    end.recv_bytes()  # now all have their libraries
    while not votes or not votes[-1] or manager.num_participants() < ISLANDS:
        draw = torch.Generator().manual_seed(1000 * opt.steps + 10 * job.island + job.rank)
        x = torch.randn(8, 5, generator=draw)
        (model(x) - x[:, :4].sin()).square().mean().backward()
        opt.step()
        opt.zero_grad()
    end.send_bytes(pickle.dumps(had))
    end.recv_bytes()  # the others may still talk to this one
    os._exit(0)


def sources(inside: str, defect: str = "", slow: tuple[int, int] | None = None) -> list[list[int]]:
    """Return, for each rank of the third island, the islands whose rank in the same place had what it was given.

    Args: slow: the island and the rank whose link is.
    """
    with Sea(least=1, join_ms=10_000) as sea:
        stores: list[dist.TCPStore] = []
        for islands in ([0, 1], [2]):
            jobs = {}
            for island in islands:
                stores.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
                for rank in range(RANKS):
                    where = sea.lighthouse.address(), stores[-1].port
                    jobs[island, rank] = Job(island, rank, *where, inside, defect, (island, rank) == slow)
            sea.begin(rank_of_island, jobs)
        found = sea.end()
    met = max(found[2, 0])  # the exchange that was written
    assert len({found[island, 0][met] for island in range(2)}) == 2  # they can be told apart
    return [[i for i in range(2) if found[i, rank][met] == found[2, rank][met]] for rank in range(RANKS)]


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_an_island_is_healed_with_one_whole_state(inside):
    assert sources(inside) in ([[0], [0]], [[1], [1]])


def test_a_state_that_a_thread_exports_while_a_step_runs_is_that_of_no_moment():
    assert sources("ddp", "a thread exports") == [[], []]


def test_with_a_source_for_each_rank_the_ranks_of_an_island_have_different_states():
    assert sources("ddp", "a source for each rank") == [[0], [1]]


def test_where_one_rank_loses_the_quorum_its_island_is_healed_in_the_next_one():
    """The other rank asks whether both have the state, and neither may wait for the other in another place."""
    assert sources("ddp", "a message is lost") in ([[0], [0]], [[1], [1]])


@pytest.mark.parametrize(("slow", "near"), [((0, 1), 1), ((1, 0), 0)])
def test_all_ranks_are_healed_from_the_island_none_of_whose_links_is_slow(slow, near):
    assert sources("ddp", slow=slow) == [[near], [near]]
