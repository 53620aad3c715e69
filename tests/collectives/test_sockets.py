"""Rows over connections of our own: whoever is late, whatever their size, and what happens if one cannot go on."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Died, Raised, outcomes, run

import fn
from fn.collectives import rendezvous
from fn.collectives.rendezvous import connections
from fn.collectives.rows import fill_rows, swap_rows
from fn.collectives.sockets import HEADER, WAKE, Connections, bytes_of


def rows(rank: int, size: int, n: int) -> torch.Tensor:
    return torch.randn(size, n, generator=torch.Generator().manual_seed(rank))


def exchanged(n: int) -> list[bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group, found = dist.group.WORLD, []
    x, expected = rows(rank, size, n), torch.stack([rows(r, size, n)[rank] for r in range(size)])
    for late in range(size):
        if rank == late:
            time.sleep(0.02)
        with fn.bind({"data": group}):
            both = torch.equal(fn.all_to_all(x, "data"), expected)
            gathered = fn.all_gather(x[0].bfloat16(), "data")
        firsts = torch.stack([rows(r, size, n)[0] for r in range(size)])
        found.append(both and torch.equal(gathered, firsts.bfloat16()))
        with fn.bind({"data": group}), fn.ledger() as sent:
            swapped = torch.stack(swap_rows(x.unbind(0), "data"))
            out = torch.full_like(x, float("nan"))
            out[rank] = x[0]
            fill_rows(out, "data")
        with fn.bind({"data": group}), fn.ledger() as sent_too:
            fn.all_to_all(x, "data")
            fn.all_gather(x[0], "data")
        found.append(torch.equal(swapped, expected) and torch.equal(out, firsts) and sent.sent == sent_too.sent)
    return [*found, connections(group) is not None]


@pytest.mark.parametrize("n", [1, 3, WAKE // 4 + 5, WAKE * 3])
def test_every_rank_gets_its_rows_whoever_is_late(n):
    for found in run(3, exchanged, n):
        assert all(found)


def a_pair(timeout: float = 5.0) -> tuple[Connections, Connections]:
    """Return two ranks' connections with each other, in one process."""
    with rendezvous._listen_on("127.0.0.1", socket.AF_INET, 1) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    return Connections({1: first}, timeout), Connections({0: second}, timeout)


def on_both(*calls: Any) -> list[Any]:
    """Run a call per rank at the same time; return what each raised, or None."""
    found: list[Any] = [None] * len(calls)

    def run_one(i: int) -> None:
        try:
            calls[i]()
        except RuntimeError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=run_one, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_a_shut_down_ends_an_exchange_of_another_thread_and_that_of_the_peer():
    first, second = a_pair()
    x, out = torch.ones(2, 5), torch.empty(2, 5)
    began = time.monotonic()

    def end() -> None:
        time.sleep(0.2)
        first.shut_down()

    found = on_both(lambda: first.pass_rows(x, out), end)  # the peer has not come yet
    assert "Connection closed by rank 1" in found[0]
    twice = lambda: [second.pass_rows(x, out) for _ in range(2)]  # noqa: E731  # the first row was on its way
    found = on_both(twice, lambda: first.pass_rows(x, out))
    assert "Connection closed by rank 0" in found[0]
    assert "Connection closed after an earlier failure" in found[1]
    assert time.monotonic() - began < 2.0


def swap(connections: Connections, peer: int, send: torch.Tensor, receive: torch.Tensor) -> None:
    """Exchange tensors with one peer, each in two pieces."""
    cuts = [[bytes_of(x)[:3], bytes_of(x)[3:]] for x in (send, receive)]
    connections.exchange({peer: cuts[0]}, {peer: cuts[1]})


@settings(max_examples=20, deadline=None)
@given(
    there=st.integers(0, 1 << 20), back=st.integers(0, 1 << 20), dtype=st.sampled_from([torch.uint8, torch.bfloat16])
)
def test_any_number_of_bytes_goes_both_ways_at_once(there, back, dtype):
    first, second = a_pair()
    a, b = torch.arange(there).to(dtype), torch.arange(back).to(dtype)
    to_a, to_b = torch.empty_like(b), torch.empty_like(a)
    for _ in range(2):
        raised = on_both(lambda: swap(first, 1, a, to_a), lambda: swap(second, 0, b, to_b))
        assert raised == [None, None]
        assert torch.equal(to_a, b)
        assert torch.equal(to_b, a)
    first.close()
    second.close()


def test_a_rank_that_sends_another_number_of_bytes_is_named_on_both():
    first, second = a_pair()
    x = torch.zeros(10)
    raised = on_both(lambda: swap(first, 1, x, torch.empty(10)), lambda: swap(second, 0, x, torch.empty(4)))
    assert "rank 0 sent (exchange, bytes) (0, 40), but this rank expects (0, 16)" in raised[1]
    with pytest.raises(RuntimeError, match="Connection closed"):
        swap(second, 0, x, torch.empty(10))


def test_a_silent_peer_is_lost_after_the_timeout_and_a_closed_one_at_once():
    first, second = a_pair(timeout=0.2)
    with pytest.raises(RuntimeError, match=r"Timed out: no byte from or to rank \[1\] in 0.2 s"):
        swap(first, 1, torch.zeros(4), torch.empty(4))
    with pytest.raises(RuntimeError, match="Connection closed by rank 0"):  # it closed its end when it gave up
        swap(second, 0, torch.zeros(4), torch.empty(5))


def test_a_peer_whose_bytes_trickle_in_is_not_lost():
    """They stay below the mark at which a waiting rank is woken for longer than the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    connections, x = Connections({1: ours}, timeout=0.4), torch.arange(400.0)
    message = struct.pack(HEADER, 0, 1600) + x.numpy().tobytes()

    def trickle() -> None:
        for i in range(0, len(message), 101):
            theirs.sendall(message[i : i + 101])
            time.sleep(0.1)

    sender = threading.Thread(target=trickle, daemon=True)
    sender.start()
    found = torch.empty(400)
    swap(connections, 1, torch.zeros(4), found)
    sender.join()
    assert torch.equal(found, x)
    theirs.sendall(message[:50])  # and no more: the timeout counts from what came last
    with pytest.raises(RuntimeError, match=r"Timed out: no byte from or to rank \[1\] in 0.4 s"):
        swap(connections, 1, torch.zeros(4), found)
    theirs.close()


FORKED = """
import os, socket, sys, threading, time, torch
from fn.collectives.sockets import Connections, bytes_of

def a_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return Connections({1: first}, 20.0), Connections({0: listener.accept()[0]}, 20.0)

def swap(connections, peer, send, receive):
    connections.exchange({peer: [bytes_of(send)]}, {peer: [bytes_of(receive)]})

first, second = a_pair()
child = os.fork()
if not child:
    sys.exit()  # through Python's exit handlers
os.waitpid(child, 0)
out = torch.zeros(4)
other = threading.Thread(target=lambda: swap(second, 0, torch.ones(4), out))
other.start()
swap(first, 1, torch.full((4,), 7.0), torch.empty(4))
other.join()
print("goes on", out.tolist())

child = os.fork()
if not child:
    time.sleep(60)
for connection in first._peers.values():
    connection.close()  # as when this process is killed
began = time.monotonic()
try:
    swap(second, 0, out, out)
except RuntimeError as error:
    print("is lost", time.monotonic() - began < 5.0, error)
os.kill(child, 9)
"""


def test_a_forked_process_neither_ends_the_connections_nor_keeps_them_alive():
    """As the workers of a data loader are forked, and outlive a rank that is killed by seconds."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert "goes on [7.0, 7.0, 7.0, 7.0]" in done.stdout, done.stderr
    assert "is lost True Connection closed by rank 0" in done.stdout, done.stdout + done.stderr


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
        try:
            exchange(x)
        except fn.PeerLost as error:
            time.sleep(2)  # a survivor that stays
            raise error


@pytest.mark.parametrize("exchange", [in_a_collective, in_place, filling], ids=lambda f: f.__name__)
def test_a_peer_that_is_gone_is_an_error_long_before_the_timeout(exchange):
    start = time.monotonic()
    first, second, gone = outcomes(3, killed, exchange)
    assert isinstance(gone, Died)
    for found in (first, second):
        assert isinstance(found, Raised)
        assert found.kind == "PeerLost"
    assert time.monotonic() - start < 25


def no_port(backlog: int) -> None:
    raise OSError("no port")


BREAKS = {
    "no port": lambda: setattr(rendezvous, "_listen", no_port),
    "this system has no select.poll": lambda: delattr(select, "poll"),
}


def unreachable(why: str) -> list[Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    rendezvous.logger.addHandler(handler)
    if dist.get_rank() == 1:
        BREAKS[why]()
    x = rows(dist.get_rank(), 2, 5)
    everybody = [rows(r, 2, 5) for r in range(2)]
    with fn.bind({"data": dist.group.WORLD}):
        found = fn.all_to_all(x, "data"), fn.all_gather(x, "data")
    expected = torch.stack([y[dist.get_rank()] for y in everybody]), torch.stack(everybody)
    return [all(map(torch.equal, found, expected)), connections(dist.group.WORLD) is None, said]


@pytest.mark.parametrize("why", sorted(BREAKS))
def test_ranks_that_cannot_connect_go_over_gloo_together_and_say_why(why):
    first, second = run(2, unreachable, why)
    text = f"codes go over gloo instead of connections of their own: rank 1 cannot listen: {why}"
    assert first == [True, True, [text]]
    assert second == [True, True, []]


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="needs Linux with IPv6")
def test_an_interface_without_ipv4_is_listened_on_by_its_ipv6_address_and_one_without_any_is_named(monkeypatch):
    """Hosts whose data network is IPv6 only went over gloo."""

    def no_address(*args: Any) -> bytes:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(fcntl, "ioctl", no_address)
    monkeypatch.setattr(rendezvous, "_lines_of", lambda path: [
        "fe800000000000000000000000000001 02 40 20 80     lo",
        "00000000000000000000000000000001 01 80 10 80     lo",
    ])  # fmt: skip
    assert rendezvous._address_of("lo") == ("::1", socket.AF_INET6)
    with pytest.raises(OSError, match=r"no address of the interface 'rv0', which GLOO_SOCKET_IFNAME names: .* 99"):
        rendezvous._address_of("rv0")


def test_strangers_are_turned_away():
    """A caller that does not know the token is no rank."""
    listener = rendezvous._listen_on("127.0.0.1", socket.AF_INET, 4)
    stranger = socket.create_connection(listener.getsockname())
    stranger.sendall(b"x" * 24)
    friend = socket.create_connection(listener.getsockname())
    friend.sendall(b"t" * 16 + (1).to_bytes(8, "little"))

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    found = rendezvous._meet(Group(), listener, [], b"t" * 16)
    assert list(found) == [1]
    assert found[1].getpeername() == friend.getsockname()
    for connection in (listener, stranger, friend, *found.values()):
        connection.close()
