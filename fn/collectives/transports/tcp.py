"""Rows of codes over TCP connections of our own, beside gloo's, for tensors in host memory.

Codes are small and cross slow networks, behind a backward pass that wants the processor. Gloo reads every segment as it
comes, on a thread that spins while another one holds its lock. A rank that is late sends before it receives, so that a
link carries one direction after the other. Here the thread that exchanges does all of it, both directions at once, and
sleeps until `WAKE` bytes are there. `tcp_setup` opens the connections.

On the wire, from each rank to each other one and in each exchange:

    offset 0    8 bytes, little-endian: the number of the exchange over this group, from 0
    offset 8    8 bytes, little-endian: how many bytes follow
    offset 16   the rows, one behind the other, without anything between them

Rows alone would do where all goes well. The header is for a rank whose schedule runs a step ahead, or whose phase is
another one: its bytes would fill tensors that they are not meant for, and be taken for a mean.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

WAKE = 1 << 19
"""Bytes that must have come before a waiting rank is woken, unless fewer are missing: whole messages of codes."""

Rows = Mapping[int, Sequence[Tensor]]
"""Rank -> contiguous tensors on the host, which go to it or come from it."""

Parts = Sequence[memoryview]

LOOK = 1.0
"""Seconds after which a waiting rank looks for fewer bytes than `WAKE`.

On a slow link these may take longer than the timeout. That some have come shows that the peer is there.
"""

HEADER = "<QQ"
"""In front of the rows: the number of the exchange, and the bytes that follow."""

HEADER_BYTES = struct.calcsize(HEADER)


def check_system() -> None:
    """Check that this system's sockets can do what connections need. Raises: OSError if not, as on Windows."""
    needed = (select, "poll"), (socket.socket, "sendmsg"), (socket, "MSG_WAITALL")
    missing = [f"{owner.__name__}.{name}" for owner, name in needed if not hasattr(owner, name)]
    if missing:
        raise OSError(f"this system has no {', '.join(missing)}")


class Connections:
    """The connections of one rank with the others of a group; one exchange at a time.

    Args: peers: rank -> connected socket, all of them. timeout: seconds without any progress after which a peer counts
        as lost.
    """

    def __init__(self, peers: Mapping[int, socket.socket], timeout: float):
        self._peers, self._ranks, self._timeout = dict(peers), sorted(peers), timeout
        self._lock = threading.Lock()
        self._count = 0
        weakref.finalize(self, _close, self._peers)
        _of_this_process.add(self)
        for connection in self._peers.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the last bytes wait for an answer

    def pass_rows(self, send: Sequence[Tensor] | Tensor, receive: Sequence[Tensor] | Tensor) -> None:
        """Send row r of `send` to rank r, and fill row r of `receive`; this rank's own rows are left alone.

        Raises: as `exchange`.
        """
        self.exchange({p: [send[p]] for p in self._ranks}, {p: [receive[p]] for p in self._ranks})

    def exchange(self, sends: Rows, receives: Rows) -> None:
        """Send tensors to each peer and fill tensors from each: contiguous, and one message whatever their number.

        Raises: RuntimeError if a peer ends, or does not answer in time, or sends another number of bytes. Then all
            connections are closed, so that the other ranks hear of it.
        """
        with self._lock:
            try:
                self._exchange(_bytes_of_rows(sends), _bytes_of_rows(receives))
            except BaseException:
                self.close()
                raise
            self._count += 1

    def _exchange(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> None:
        if not self._peers:
            raise RuntimeError("Connection closed after an earlier failure")
        outgoing, incoming, headers = {}, {}, {}
        for p, connection in self._peers.items():
            own_header = struct.pack(HEADER, self._count, sum(map(len, sends[p])))
            outgoing[p] = _Flow(connection, p, [memoryview(own_header), *sends[p]])
            headers[p] = bytearray(HEADER_BYTES)
            incoming[p] = _Flow(connection, p, [memoryview(headers[p]), *receives[p]])
        for flow in outgoing.values():
            flow.send()
        self._wait_for(outgoing, incoming)
        for p, header in headers.items():
            expected, sent = (self._count, sum(map(len, receives[p]))), struct.unpack(HEADER, header)
            if sent != expected:
                text = f"rank {p} sent (exchange, bytes) {sent}, but this rank expects {expected}"
                raise RuntimeError(f"{text}; is it in another phase? schedules and steps must be alike on all ranks")

    def _wait_for(self, outgoing: Mapping[int, _Flow], incoming: Mapping[int, _Flow]) -> None:
        """Move bytes in both directions until all are there.

        Both at once, or two ranks that send more than their sockets hold would wait for each other for ever.
        """
        poll, ranks = select.poll(), {c.fileno(): p for p, c in self._peers.items()}
        waiting, flows = dict.fromkeys(self._peers, -1), [*outgoing.values(), *incoming.values()]
        milliseconds, left, moved = 1e3 * min(LOOK, self._timeout / 4), -1, time.monotonic()
        while waiting:
            for p in list(waiting):
                events = (select.POLLOUT if outgoing[p].left else 0) | (select.POLLIN if incoming[p].left else 0)
                if incoming[p].left:
                    incoming[p].wake_me()
                if not events:
                    poll.unregister(self._peers[p])
                    del waiting[p]
                elif events != waiting[p]:
                    poll.register(self._peers[p], events)
                    waiting[p] = events
            before, left = left, sum(flow.left for flow in flows)
            if left != before:
                moved = time.monotonic()
            elif time.monotonic() - moved >= self._timeout:
                raise RuntimeError(f"Timed out: no byte from or to rank {sorted(waiting)} in {self._timeout:g} s")
            ready = poll.poll(milliseconds) if waiting else []
            # Nobody is ready where fewer bytes have come than wake this rank: then it reads what is there.
            for file, event in ready or [(self._peers[p].fileno(), select.POLLIN) for p in waiting]:
                p = ranks[file]
                if event & ~select.POLLOUT and incoming[p].left:
                    incoming[p].receive()
                if event & select.POLLOUT:
                    outgoing[p].send()

    def shut_down(self) -> None:
        """End all connections, from any thread: an exchange on another one fails, and so do the peers'."""
        for connection in list(self._peers.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; the peers hear of it at once."""
        _close(self._peers)

    def leave_to_parent(self) -> None:
        """Forget all connections in a process that was forked: they are its parent's, who goes on and may die."""
        while self._peers:
            self._peers.popitem()[1].close()  # without a shutdown, which would end the parent's, too


_of_this_process: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_all() -> None:
    for connections in list(_of_this_process):
        connections.leave_to_parent()


# A data loader's workers are forks. One that ends would end the connections of its parent with a shutdown, and one that
# outlives it would keep them open, so that nobody hears of a dead rank.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def _close(peers: dict[int, socket.socket]) -> None:
    while peers:
        _, connection = peers.popitem()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # a fork may hold the socket, too: close alone would not end it
        connection.close()


class _Flow:
    """What is left of a header and a row on their way over one connection, in one direction."""

    def __init__(self, connection: socket.socket, peer: int, parts: Sequence[memoryview]):
        self._connection, self._peer = connection, peer
        self._parts = [part for part in parts if len(part)]
        self.left = sum(map(len, self._parts))
        self._wake = 0

    def send(self) -> None:
        if self.left:
            self._go(self._connection.sendmsg)

    def receive(self) -> None:
        self._go(lambda parts: self._connection.recvmsg_into(parts)[0])

    def wake_me(self) -> None:
        """Let the connection count as readable once `WAKE` bytes are there, or all that is left.

        A wake-up for every segment would take the processor from the backward pass, thousands of times a message.
        """
        wake = min(self.left, WAKE)
        if wake != self._wake:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
            self._wake = wake

    def _go(self, move: Callable[[Sequence[memoryview]], int]) -> None:
        """Let a system call move what is left, as far as it goes now."""
        try:
            count = move(self._parts)
        except BlockingIOError:
            return
        except OSError as error:
            raise RuntimeError(f"Connection closed by rank {self._peer}: {error}") from error
        if count == 0:
            raise RuntimeError(f"Connection closed by rank {self._peer}")
        self.left -= count
        if self.left == 0:
            self._parts = []
        while count and self._parts:
            taken = min(count, len(self._parts[0]))
            count -= taken
            rest = self._parts[0][taken:]
            self._parts = [rest, *self._parts[1:]] if len(rest) else self._parts[1:]


def _bytes_of_rows(rows: Rows) -> dict[int, list[memoryview]]:
    return {p: [*map(bytes_of, parts)] for p, parts in rows.items()}


def bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    if x.dtype in _OF_PYTHON and x.numel() and not x.requires_grad:  # the quick way: two views less for each leaf
        array: Any = x.numpy()
        return memoryview(array).cast("B")
    array = x.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


_OF_PYTHON = {torch.uint8, torch.int8, torch.float32, torch.float64}
"""Dtypes that a memoryview knows."""
