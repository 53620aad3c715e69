"""The roll call after a loss: who is named as gone."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from fn.collectives import peers


class Group:
    """As much of a process group as a roll call asks for."""

    group_name = "made up"

    def __init__(self, size: int):
        self._size, self._store = size, dist.HashStore()

    def get_group_store(self) -> dist.Store:
        return self._store

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.fixture
def group(monkeypatch):
    """Three ranks, of which rank 1 runs no longer and rank 2 is this process."""
    found = Group(3)
    monkeypatch.setattr(peers, "_calls", {})
    for rank, process in ((0, os.getpid()), (1, 2**22 + 1), (2, os.getpid())):
        found.get_group_store().set(f"fn/process of rank/{rank}", f"{peers._here()} {process}")
    return found


def answer(group: Group, rank: int) -> None:
    store = group.get_group_store()
    store.set(f"fn/roll call 1/{rank}", store.get(f"fn/process of rank/{rank}"))


def test_ranks_that_answer_or_run_on_this_machine_are_not_gone(group):
    assert peers.call_roll(group) == ((1,), (2,))


def test_ranks_that_run_but_do_not_answer_are_told_of(group, monkeypatch):
    monkeypatch.setattr(peers, "_groups", {"a wire": group})
    monkeypatch.setattr(peers, "hang_up", lambda transport: None)
    group.get_group_store().set("fn/process of rank/1", f"{peers._here()} {os.getpid()}")
    error = peers.peer_lost(RuntimeError("Timed out"), "all_gather", "data", "a wire")
    assert error.lost == ()
    assert "a rank of axis 'data' is lost, perhaps rank 1, 2, which runs but does something else" in str(error)


def test_a_rank_that_answers_and_ends_while_it_is_looked_for_is_not_gone(group, monkeypatch):
    """It raised what this rank is about to raise, and its process ended."""

    def ends(store: dist.Store, rank: int) -> bool:
        if rank == 2:
            answer(group, 2)
        return rank == 0

    monkeypatch.setattr(peers, "_is_alive_here", ends)
    assert peers.call_roll(group).lost == (1,)


def test_an_answer_of_an_earlier_process_does_not_count(group):
    group.get_group_store().set("fn/roll call 1/1", "another process")
    assert peers.call_roll(group).lost == (1,)
