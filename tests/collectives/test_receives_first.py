"""Large rows over gloo: the same rows as by the collective, whoever is late, and an error if a peer is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Died, Raised, outcomes, run

import fn
from fn.collectives.receives_first import LARGE, exchange_rows, wants_receives_first
from fn.collectives.rows import fill_rows, swap_rows


def rows(rank: int, size: int, n: int) -> torch.Tensor:
    return torch.randn(size, n, generator=torch.Generator().manual_seed(rank))


def exchanged(n: int) -> list[bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group, found = dist.group.WORLD, []
    x, expected = rows(rank, size, n), torch.stack([rows(r, size, n)[rank] for r in range(size)])
    for late in range(size):
        if rank == late:
            time.sleep(0.02)
        out = torch.empty_like(x)
        exchange_rows(out, x, group)
        with fn.bind({"data": group}):
            both = torch.equal(out, expected) and torch.equal(fn.all_to_all(x, "data"), expected)
            gathered = fn.all_gather(x[0], "data")
        found.append(both and torch.equal(gathered, torch.stack([rows(r, size, n)[0] for r in range(size)])))
        with fn.bind({"data": group}), fn.ledger() as sent:
            swapped = torch.stack(swap_rows(x.unbind(0), "data"))
            out = torch.full_like(x, float("nan"))
            out[rank] = x[0]
            fill_rows(out, "data")
        with fn.bind({"data": group}), fn.ledger() as sent_too:
            fn.all_to_all(x, "data")
            fn.all_gather(x[0], "data")
        found.append(torch.equal(swapped, expected) and torch.equal(out, gathered) and sent.sent == sent_too.sent)
    return [*found, wants_receives_first(x[0], group)]


@pytest.mark.parametrize("n", [3, LARGE // 4 + 5])
def test_every_rank_gets_its_rows_whoever_is_late(n):
    for *equal, large in run(3, exchanged, n):
        assert all(equal)
        assert large == (4 * n >= LARGE)


def in_a_collective(x: torch.Tensor) -> None:
    fn.all_to_all(x, "data")


def in_place(x: torch.Tensor) -> None:
    swap_rows(x.unbind(0), "data")


def filling(x: torch.Tensor) -> None:
    fill_rows(x, "data")


def killed(exchange: Callable[[torch.Tensor], None]) -> Any:
    x = torch.zeros(3, 1 << 22, dtype=torch.uint8)
    with fn.bind({"data": dist.group.WORLD}):
        exchange(x)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(x)


@pytest.mark.parametrize("exchange", [in_a_collective, in_place, filling], ids=lambda f: f.__name__)
def test_a_peer_that_is_gone_is_an_error_long_before_the_timeout(exchange):
    start = time.monotonic()
    first, second, gone = outcomes(3, killed, exchange)
    assert isinstance(gone, Died)
    for found in (first, second):
        assert isinstance(found, Raised)
        assert found.kind == "PeerLost"
    assert time.monotonic() - start < 25
