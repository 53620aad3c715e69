"""Rows of codes over TCP connections of our own, beside gloo's, for tensors in host memory.

Codes are small and cross slow networks, behind a backward pass that wants the processor. Gloo reads every segment as it
comes, on a thread that spins while another one holds its lock, and a rank that is late sends before it receives, so
that a link carries one direction after the other. Here the thread that exchanges does all of it, both directions at
once, and sleeps until `WAKE` bytes are there.

A process group opens its connections in its first exchange, which all ranks must call, on the interface that gloo
uses.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

logger = logging.getLogger(__name__)

WAKE = 1 << 16
"""Bytes that must have come before a waiting rank is woken, unless fewer are missing."""

OPENING = 20.0
"""Seconds that opening the connections may take."""

Address = tuple[str, int]


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
        for connection in self._peers.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pass_rows(self, send: Sequence[Tensor] | Tensor, receive: Sequence[Tensor] | Tensor) -> None:
        """Send row r of `send` to rank r, and fill row r of `receive`; this rank's own rows are left alone.

        Raises: as `exchange`.
        """
        others = self._ranks
        self.exchange({p: send[p] for p in others}, {p: receive[p] for p in others})

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send a tensor to each peer and fill one from each. All are contiguous, in host memory.

        Raises: RuntimeError if a peer ends, or does not answer in time, or sends another number of bytes. Then all
            connections are closed, so that the other ranks hear of it.
        """
        with self._lock:
            try:
                self._exchange({p: _bytes(x) for p, x in sends.items()}, {p: _bytes(x) for p, x in receives.items()})
            except BaseException:
                self.close()
                raise
            self._count += 1

    def _exchange(self, sends: Mapping[int, memoryview], receives: Mapping[int, memoryview]) -> None:
        if not self._peers:
            raise RuntimeError("Connection closed after an earlier failure")
        out = {
            p: _Flow(c, p, struct.pack(HEADER, self._count, len(sends[p])), sends[p]) for p, c in self._peers.items()
        }
        heads = {p: bytearray(HEADER_BYTES) for p in self._peers}
        into = {p: _Flow(c, p, heads[p], receives[p]) for p, c in self._peers.items()}
        for flow in out.values():
            flow.send()
        self._wait_for(out, into)
        for p, head in heads.items():
            expected = self._count, len(receives[p])
            if struct.unpack(HEADER, head) != expected:
                found = struct.unpack(HEADER, head)
                raise RuntimeError(f"rank {p} sent (exchange, bytes) {found}, but this rank expects {expected}")

    def _wait_for(self, out: Mapping[int, _Flow], into: Mapping[int, _Flow]) -> None:
        poll, ranks = select.poll(), {c.fileno(): p for p, c in self._peers.items()}
        waiting = dict.fromkeys(self._peers, -1)
        while waiting:
            for p in list(waiting):
                events = (select.POLLOUT if out[p].left else 0) | (select.POLLIN if into[p].left else 0)
                if into[p].left:
                    into[p].wake_me()
                if not events:
                    poll.unregister(self._peers[p])
                    del waiting[p]
                elif events != waiting[p]:
                    poll.register(self._peers[p], events)
                    waiting[p] = events
            ready = poll.poll(1e3 * self._timeout) if waiting else []
            if waiting and not ready:
                text = f"Timed out: no byte from or to rank {sorted(waiting)} in {self._timeout:g} s"
                raise RuntimeError(text)
            for file, event in ready:
                p = ranks[file]
                if event & ~select.POLLOUT and into[p].left:
                    into[p].receive()
                if event & select.POLLOUT:
                    out[p].send()

    def shut_down(self) -> None:
        """End all connections, from any thread: an exchange on another one fails, and so do the peers'."""
        for connection in list(self._peers.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; the peers hear of it at once."""
        _close(self._peers)


def _close(peers: dict[int, socket.socket]) -> None:
    while peers:
        _, connection = peers.popitem()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


HEADER = "<QQ"
"""In front of each row: the number of the exchange, and the bytes that follow."""

HEADER_BYTES = struct.calcsize(HEADER)


class _Flow:
    """What is left of a header and a row on their way over one connection, in one direction."""

    def __init__(self, connection: socket.socket, peer: int, head: Any, body: memoryview):
        self._connection, self._peer = connection, peer
        self._parts = [part for part in (memoryview(head), body) if len(part)]
        self.left = sum(map(len, self._parts))
        self._wake = 0

    def send(self) -> None:
        if self.left:
            self._go(lambda: self._connection.sendmsg(self._parts))

    def receive(self) -> None:
        self._go(lambda: self._connection.recvmsg_into(self._parts)[0])

    def wake_me(self) -> None:
        """Let the connection count as readable once `WAKE` bytes are there, or all that is left."""
        wake = min(self.left, WAKE)
        if wake != self._wake:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
            self._wake = wake

    def _go(self, move: Any) -> None:
        try:
            count = move()
        except BlockingIOError:
            return
        except OSError as error:
            raise RuntimeError(f"Connection closed by rank {self._peer}: {error}") from error
        if count == 0:
            raise RuntimeError(f"Connection closed by rank {self._peer}")
        self.left -= count
        while count and self._parts:
            taken = min(count, len(self._parts[0]))
            count -= taken
            rest = self._parts[0][taken:]
            self._parts = [rest, *self._parts[1:]] if len(rest) else self._parts[1:]


def _bytes(x: Tensor) -> memoryview:
    array: Any = x.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections | None] = weakref.WeakKeyDictionary()


def connections(group: dist.ProcessGroup) -> Connections | None:
    """Return a group's connections, opened in the first call, which is a collective.

    None if the group's backend for the CPU is not gloo, or not all ranks could be reached; the log then says why.
    """
    if group not in _opened:
        is_gloo = group._get_backend(torch.device("cpu")).name() == "gloo"
        _opened[group] = _open(group) if is_gloo else None
    return _opened[group]


def hang_up(group: dist.ProcessGroup) -> None:
    """Close a group's connections, if it has any: whoever waits for this rank hears of it at once."""
    found = _opened.get(group)
    if found is not None:
        found.shut_down()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return after which time a group's collectives fail; torch's default where its backend does not tell."""
    kinds = [torch.device(kind.type) for kind in getattr(group, "_device_types", [])]
    options = getattr(group._get_backend(kinds[0]), "options", None) if kinds else None
    found: timedelta = getattr(options, "_timeout", None) or default_pg_timeout
    return found


def _open(group: dist.ProcessGroup) -> Connections | None:
    """Connect all pairs of ranks; None on all ranks if one pair cannot be."""
    peers: dict[int, socket.socket] = {}
    problem, listener, address = "", None, None
    token = secrets.token_bytes(16)
    try:
        listener = _listen(group.size())
        address = listener.getsockname()[:2]
    except OSError as error:
        problem = f"rank {group.rank()} cannot listen: {error}"
    told = _tell_all((address, token, problem), group)
    if not any(text for _, _, text in told):
        try:
            peers = _meet(group, listener, [address for address, _, _ in told], told[0][1])
        except OSError as error:
            problem = f"rank {group.rank()} cannot reach all others: {error}"
    if listener is not None:
        listener.close()
    found = Connections(peers, timeout_of(group).total_seconds())
    reasons = [text for text in [*(text for *_, text in told), *_tell_all(problem, group)] if text]
    if not reasons:
        return found
    found.close()
    if group.rank() == 0:
        logger.warning("codes go over gloo instead of connections of their own: %s", reasons[0])
    return None


def _tell_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _meet(
    group: dist.ProcessGroup, listener: Any, addresses: Sequence[Address], token: bytes
) -> dict[int, socket.socket]:
    """Call all lower ranks, and take the calls of all higher ones, which give the token."""
    me, until = group.rank(), time.monotonic() + OPENING
    found = {}
    for peer in range(me):
        found[peer] = socket.create_connection(addresses[peer], timeout=OPENING)
        found[peer].sendall(token + struct.pack("<Q", me))
    while len(found) < group.size() - 1:
        listener.settimeout(max(until - time.monotonic(), 0.01))
        caller, _ = listener.accept()
        caller.settimeout(max(until - time.monotonic(), 0.01))
        said = caller.recv(len(token) + 8, socket.MSG_WAITALL)
        if said[: len(token)] == token:
            found[struct.unpack("<Q", said[len(token) :])[0]] = caller
        else:
            caller.close()
    return found


def _listen(backlog: int) -> socket.socket:
    """Listen on the address that gloo would use: of the interface it is told, of the host's name, or loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return _listen_on(_address_of(name), socket.AF_INET, backlog)
    with suppress(OSError):  # the name may stand for an address of another machine, or for none
        for family, _, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return _listen_on(str(place[0]), family, backlog)
    return _listen_on("127.0.0.1", socket.AF_INET, backlog)


def _listen_on(host: str, family: int, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises: OSError if it has none, or this system cannot tell."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(f"the address of {interface!r} cannot be asked for on this system") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        get_address = 0x8915  # SIOCGIFADDR of Linux
        reply = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(reply[20:24])
