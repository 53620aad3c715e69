"""The roll call after a loss: who is named as gone."""

from __future__ import annotations

import datetime
import os
import signal
import socket
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn.collectives.transports import failure_detection as peers


class Group:
    """As much of a process group as a roll call asks for."""

    def __init__(self, name: str, size: int, store: dist.Store):
        self.group_name, self.ranks, self.store = name, size, store

    def get_group_store(self) -> dist.Store:
        return self.store

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


ENDED = 2**22 + 1
"""A number that no process has."""


@pytest.fixture
def group(request):
    """Three ranks, of which rank 1 runs no longer and rank 2 is this process."""
    found = Group(request.node.name, 3, dist.HashStore())
    for rank, process in ((0, os.getpid()), (1, ENDED), (2, os.getpid())):
        found.get_group_store().set(f"fn/process of rank/{rank}", f"{peers.this_machine()} {process}")
    return found


def answer(group: Group, rank: int) -> None:
    store = group.get_group_store()
    store.set(f"fn/roll call 1/{rank}", store.get(f"fn/process of rank/{rank}"))


def test_ranks_that_answer_or_run_on_this_machine_are_not_gone(group):
    assert peers.find_lost_ranks(group) == ((1,), (2,), True)


def test_ranks_that_run_but_do_not_answer_are_told_of(group, monkeypatch):
    wire = peers.remember(group)
    monkeypatch.setattr(peers, "abort_connections", lambda transport: None)
    group.get_group_store().set("fn/process of rank/1", f"{peers.this_machine()} {os.getpid()}")
    error = peers.peer_lost(RuntimeError("Timed out"), "all_gather", "data", wire)
    assert error.lost == ()
    assert "a rank of axis 'data' is lost, perhaps rank 1, 2, which runs but does something else" in str(error)


def test_a_rank_that_answers_and_ends_while_it_is_looked_for_is_not_gone(group):
    """It raised what this rank is about to raise, and its process ended."""
    store = group.get_group_store()
    store.set("fn/process of rank/2", f"{peers.this_machine()} {ENDED}")

    class Answered:
        set, check = staticmethod(store.set), staticmethod(store.check)

        def get(self, key: str) -> bytes:
            if key == "fn/process of rank/2":
                store.set("fn/roll call 1/2", store.get(key))
            return store.get(key)

    group.store = Answered()
    assert peers.find_lost_ranks(group).lost == (1,)


def test_an_answer_of_an_earlier_process_does_not_count(group):
    group.get_group_store().set("fn/roll call 1/1", "another process")
    assert peers.find_lost_ranks(group).lost == (1,)


def test_an_answer_in_an_earlier_group_of_the_same_name_does_not_count(group, monkeypatch):
    """Process and store may be the same: rank 1 has answered there, and ends in silence in the group of today."""

    class OfRank1(Group):
        def rank(self) -> int:
            return 1

    earlier, today = (OfRank1(group.group_name, 3, group.store) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: ENDED)
        peers.remember(earlier)
        answer(group, 1)
        peers.remember(today)
    assert peers.find_lost_ranks(group).lost == (1,)


@pytest.mark.parametrize(("has_answered", "lost"), [(True, (3,)), (False, (2, 3))])
def test_the_host_of_a_store_that_goes_during_a_roll_call_is_gone_unless_it_has_answered(
    monkeypatch, has_answered, lost
):
    """Rank 2 hosts it. If it has answered, it raised what this rank is about to raise, and ended. Rank 3 is gone."""

    class Going(dist.TCPStore):
        looks = 0

        def check(self, keys: list[str]) -> bool:
            self.looks += keys == ["fn/roll call 1/1"]
            if self.looks == 2:
                raise dist.DistNetworkError("made up")
            return super().check(keys)

    store = Going("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = Group(f"store {has_answered}", 4, store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [3, 1, 0, 2])  # rank 2 is the first of the world
    for rank in range(4):
        store.set(f"fn/process of rank/{rank}", f"{peers.this_machine()} {os.getpid() if rank < 3 else ENDED}")
    if has_answered:
        answer(group, 2)
    assert peers.find_lost_ranks(group) == (lost, (), False)


def without_host(how: int) -> Any:
    """Send a signal to rank 0, which hosts the store, before it speaks; return what the others find."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), [0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]), RANK=str(rank), WORLD_SIZE=str(size))
    seconds = 5.0 if how == signal.SIGSTOP else ranks.GROUP_TIMEOUT  # which is waited for, or not
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    with fn.bind({"data": dist.group.WORLD}):
        fn.all_to_all(torch.ones(3, 5), "data")
        if rank == 0:
            os.kill(os.getpid(), how)
        try:
            fn.all_to_all(torch.ones(3, 5), "data")
        except fn.PeerLost as error:
            return error.lost, str(error)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_rank_that_hosts_the_store_is_named_too(how):
    gone, *others = ranks.outcomes(3, without_host, how, enough=3 if how == signal.SIGKILL else 2)
    assert gone == ranks.Died(-how if how == signal.SIGKILL else None)
    for lost, text in others:
        assert lost == (0,)
        assert text.startswith("rank 0 of axis 'data' is gone or stopped, noticed in all_to_all by rank ")
        assert "the key-value store, which rank 0 or its launcher hosts, does not answer either" in text
