"""Rows over connections of our own: whoever is late, whatever their size, and what happens if one cannot go on."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import LIMIT, Died, Raised, outcomes, python, run

import fn
from fn.collectives.carriers import group_of
from fn.collectives.comm_thread import bind_twin
from fn.collectives.messages import exchange, fill_rows, gather, swap_rows
from fn.collectives.transports import tcp
from fn.collectives.transports.tcp import HEADER, WAKE, Connections, connections


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


def with_leaves_of_any_shape() -> list[bool]:
    rank = dist.get_rank()
    parts = torch.tensor([[1.0], [2.0]]) + 10 * rank, torch.empty(2, 0, dtype=torch.uint8), torch.ones(()).expand(2, 3)
    with fn.bind({"data": dist.group.WORLD}):
        swapped, gathered = exchange(parts, "data"), gather(tuple(part[:1] for part in parts), "data")
    expected = torch.tensor([[1.0], [11.0]])
    rest = [torch.equal(part, parts[i]) for part_of in (swapped, gathered) for i, part in enumerate(part_of) if i]
    return [torch.equal(swapped[0], expected + rank), torch.equal(gathered[0], expected), *rest]


def test_messages_have_leaves_without_elements_and_without_memory_of_their_own():
    assert run(2, with_leaves_of_any_shape) == [[True] * 6] * 2


def a_pair(timeout: float = 2 * LIMIT) -> tuple[Connections, Connections]:
    """Return two ranks' connections with each other, in one process."""
    with tcp.listen_on("127.0.0.1", socket.AF_INET, 1) as listener:
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

    threads = [threading.Thread(target=run_one, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return found


def test_a_shut_down_ends_an_exchange_of_another_thread_and_that_of_the_peer():
    first, second = a_pair()
    x, out = torch.ones(2, 5), torch.empty(2, 5)

    def end() -> None:
        time.sleep(0.2)
        first.shut_down()

    found = on_both(lambda: first.pass_rows(x, out), end)  # the peer has not come yet
    assert "Connection closed by rank 1" in found[0]
    twice = lambda: [second.pass_rows(x, out) for _ in range(2)]  # noqa: E731  # the first row was on its way
    found = on_both(twice, lambda: first.pass_rows(x, out))
    assert "Connection closed by rank 0" in found[0]
    assert "Connection closed after an earlier failure" in found[1]


def swap(connections: Connections, peer: int, send: torch.Tensor, receive: torch.Tensor) -> None:
    """Exchange tensors with one peer, each in two pieces."""
    cuts = [[x.view(torch.uint8)[:3], x.view(torch.uint8)[3:]] for x in (send, receive)]
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


def test_a_peer_whose_bytes_trickle_in_is_not_lost(monkeypatch):
    """They stay below the mark at which a waiting rank is woken for longer than the timeout, by a clock of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    connections, x = Connections({1: ours}, timeout=0.4), torch.arange(400.0)
    message = struct.pack(HEADER, 0, 1600) + x.numpy().tobytes()
    pieces, ticks = [message[i : i + 101] for i in range(0, len(message), 101)], itertools.count()

    def clock() -> float:
        if pieces:
            theirs.sendall(pieces.pop(0))
        return 0.1 * next(ticks)

    monkeypatch.setattr("fn.collectives.transports.tcp.time", SimpleNamespace(monotonic=clock))
    found = torch.empty(400)
    swap(connections, 1, torch.zeros(4), found)
    assert torch.equal(found, x)
    assert next(ticks) > 10
    theirs.sendall(message[:50])  # and no more: the timeout counts from what came last
    with pytest.raises(RuntimeError, match=r"Timed out: no byte from or to rank \[1\] in 0.4 s"):
        swap(connections, 1, torch.zeros(4), found)
    theirs.close()


FORKED = """
import os, socket, sys, threading, time, torch
from fn.collectives.transports.tcp import Connections

def a_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return Connections({1: first}, 1200.0), Connections({0: listener.accept()[0]}, 1200.0)

def swap(connections, peer, send, receive):
    connections.exchange({peer: [send]}, {peer: [receive]})

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
    time.sleep(600)
for connection in first._peers.values():
    connection.close()  # as when this process is killed
try:
    swap(second, 0, out, out)
except RuntimeError as error:
    print("is lost", error)
os.kill(child, 9)
"""


def test_a_forked_process_neither_ends_the_connections_nor_keeps_them_alive():
    """As the workers of a data loader are forked, and outlive a rank that is killed by seconds."""
    done = python("-c", FORKED)
    assert "goes on [7.0, 7.0, 7.0, 7.0]" in done.stdout, done.stderr
    assert "is lost Connection closed by rank 0" in done.stdout, done.stdout + done.stderr


def killed() -> Any:
    x = torch.zeros(3, 1 << 22, dtype=torch.uint8)
    with fn.bind({"data": dist.group.WORLD}):
        swap_rows(x.unbind(0), "data")
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            swap_rows(x.unbind(0), "data")
        except fn.PeerLost as error:
            time.sleep(2)  # a survivor that stays
            raise error


def test_a_peer_that_is_gone_is_an_error_without_waiting_for_the_timeout():
    first, second, gone = outcomes(3, killed)
    assert isinstance(gone, Died)
    for found in (first, second):
        assert isinstance(found, Raised)
        assert found.kind == "PeerLost"


def no_port(listener: socket.socket, backlog: int) -> None:
    raise OSError("no port")


BREAKS = {
    "its axis was bound with tcp=False": lambda: fn.bind({"data": dist.group.WORLD}, tcp=False),
    "no port": lambda: setattr(socket.socket, "listen", no_port),
    "this system has no select.poll": lambda: delattr(select, "poll"),
}


def unreachable(why: str) -> list[Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    tcp.logger.addHandler(handler)
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


def bound_without_connections() -> list[Any]:
    x = rows(dist.get_rank(), 2, 5)
    with fn.bind({"data": dist.group.WORLD}, tcp=False):
        found = fn.all_to_all(x, "data")
    expected = torch.stack([rows(r, 2, 5)[dist.get_rank()] for r in range(2)])
    twin = bind_twin("data", dist.group.WORLD).axes["data"].transport
    groups = dist.group.WORLD, group_of(twin)
    return [torch.equal(found, expected), [connections(group) for group in groups]]


def test_one_argument_of_bind_leaves_codes_to_gloo_and_to_that_of_the_thread_that_communicates():
    assert run(2, bound_without_connections) == [[True, [None, None]]] * 2


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="needs Linux with IPv6")
def test_an_interface_without_ipv4_is_listened_on_by_its_ipv6_address_and_one_without_any_is_named(monkeypatch):
    """Hosts whose data network is IPv6 only went over gloo."""

    def no_address(*args: Any) -> bytes:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(fcntl, "ioctl", no_address)
    interfaces = (
        "fe800000000000000000000000000001 02 40 20 80     lo\n00000000000000000000000000000001 01 80 10 80     lo\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/net/if_inet6": interfaces}[str(path)])
    assert tcp.address_of("lo") == ("::1", socket.AF_INET6)
    with pytest.raises(OSError, match=r"no address of the interface 'rv0', which GLOO_SOCKET_IFNAME names: .* 99"):
        tcp.address_of("rv0")


# Strangers who call while the connections are opened: nobody waits for them, and they break nothing.

TOKEN = b"t" * 16


class Group:
    """As much of rank 0's group of three as the opening asks for."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3


def call(listener: socket.socket, text: bytes = b"") -> socket.socket:
    caller = socket.create_connection(listener.getsockname())
    caller.settimeout(60)
    caller.sendall(text)
    return caller


def reset(listener: socket.socket, text: bytes = b"") -> socket.socket:
    caller = call(listener, text)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    return caller


def hang_up(listener: socket.socket, text: bytes = b"") -> socket.socket:
    caller = call(listener, text)
    caller.close()
    return caller


def rank_calls(listener: socket.socket, rank: int) -> socket.socket:
    return call(listener, TOKEN + rank.to_bytes(8, "little"))


STRANGERS: dict[str, list[Callable[[socket.socket], socket.socket]]] = {
    "silent": [call],
    "resets": [reset],
    "resets after a part of the token": [lambda listener: reset(listener, TOKEN[:5])],
    "hangs up": [hang_up],
    "hangs up after the token": [lambda listener: hang_up(listener, TOKEN)],
    "speaks": [lambda listener: call(listener, b"x" * 24)],
    "speaks at length": [lambda listener: call(listener, b"GET / HTTP/1.1\r\n" * 50)],
    "says too little": [lambda listener: call(listener, b"x")],
    "knows the token, is no rank": [lambda listener: rank_calls(listener, 7)],
}
STRANGERS["all of them"] = [one for kind in STRANGERS.values() for one in kind]
STRANGERS["a flood"] = STRANGERS["all of them"] * 30


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_turned_away_and_keep_nobody_waiting(kind):
    with tcp.listen_on("127.0.0.1", socket.AF_INET, 1000) as listener:
        strangers = [one(listener) for one in STRANGERS[kind]]
        ranks = {2: rank_calls(listener, 2)}
        strangers += [one(listener) for one in STRANGERS[kind]]
        ranks[1] = rank_calls(listener, 1)
        found = tcp.meet(Group(), listener, [], TOKEN)
    assert {rank: c.getpeername() for rank, c in found.items()} == {r: c.getsockname() for r, c in ranks.items()}
    for connection in (*strangers, *ranks.values(), *found.values()):
        connection.close()


def test_the_opening_hangs_up_on_the_oldest_silent_caller_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(tcp, "CALLERS", 3)
    with tcp.listen_on("127.0.0.1", socket.AF_INET, 100) as listener:
        late = rank_calls(listener, 1), call(listener, TOKEN)
        strangers = [call(listener), call(listener)]
        found: list[Any] = []
        meeting = threading.Thread(target=lambda: found.append(tcp.meet(Group(), listener, [], TOKEN)))
        meeting.start()
        strangers += [call(listener), call(listener)]
        assert late[1].recv(1) == b""  # waits until it is hung up on
        assert strangers[0].recv(1) == b""
        strangers[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[1].recv(1)
        strangers[1].sendall(TOKEN + (2).to_bytes(8, "little"))
        meeting.join(60)
    assert {rank: c.getpeername() for rank, c in found[0].items()} == {
        1: late[0].getsockname(), 2: strangers[1].getsockname()
    }  # fmt: skip
    assert strangers[2].recv(1) == b""
    for connection in (*late, *strangers, *found[0].values()):
        connection.close()


def test_the_opening_ends_in_time_and_names_who_did_not_call(monkeypatch):
    monkeypatch.setattr(tcp, "OPENING", 1.0)
    is_over = threading.Event()
    with tcp.listen_on("127.0.0.1", socket.AF_INET, 100) as listener:
        rank = rank_calls(listener, 2)

        def flood() -> None:
            while not is_over.is_set():
                hang_up(listener)

        flooding = threading.Thread(target=flood)
        flooding.start()
        with pytest.raises(OSError, match=r"^rank 1 did not call in 1 s$"):
            tcp.meet(Group(), listener, [], TOKEN)
        is_over.set()
        flooding.join()
        assert rank.recv(1) == b""  # hung up on
        rank.close()
