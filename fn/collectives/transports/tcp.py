"""Rows of codes over TCP connections of our own, beside gloo's, for tensors in host memory.

Codes are small and cross slow networks, behind a backward pass that wants the processor. Gloo reads every segment as it
comes, on a thread that spins while another one holds its lock. A rank that is late sends before it receives, so that a
link carries one direction after the other. Here the thread that exchanges does all of it, both directions at once, and
sleeps until `WAKE` bytes are there.

On the wire, from each rank to each other one that it sends to, in each exchange:

    offset 0    8 bytes, little-endian: the number of the exchange over this group, from 0
    offset 8    8 bytes, little-endian: how many bytes follow
    offset 16   the rows, one behind the other, without anything between them

A permutation sends to one rank only; the others get nothing of that exchange, and count it.

Rows alone would do where all goes well. The header is for a rank whose schedule runs a step ahead, or whose phase is
another one: its bytes would fill tensors that they are not meant for, and be taken for a mean.

Ranks open their connections in their first exchange, which all of them must call, on the network interface that gloo
uses. If one pair of ranks cannot connect, all of them go over gloo, and the log says why.

A caller proves that it is a rank by rank 0's token, 16 random bytes, and says its number. On a cluster others call too:
port scanners, health checks, a job whose ports were given anew. Taken for a rank, one would feed numbers into the mean,
and one that says nothing would keep the ranks waiting. They are hung up on.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from fn.errors import SAME_CALL, RanksDisagree

logger = logging.getLogger("fn")

WAKE = 1 << 19
"""Bytes that must have come before a waiting rank is woken, unless fewer are missing: whole messages of codes."""

PARTS = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16
"""Tensors that a system call takes at most."""

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
        # With the sockets and not with self, which would never die then.
        weakref.finalize(self, _close, self._peers)
        _of_this_process.add(self)
        for connection in self._peers.values():
            # A system call then returns with what it has moved, so that one thread serves all directions.
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the last bytes wait for an answer

    def pass_rows(self, send: Sequence[Tensor] | Tensor, receive: Sequence[Tensor] | Tensor) -> None:
        """Send row r of `send` to rank r, and fill row r of `receive`; this rank's own rows are left alone.

        Raises: as `exchange`.
        """
        self.exchange({p: [send[p]] for p in self._ranks}, {p: [receive[p]] for p in self._ranks})

    def exchange(self, sends: Rows, receives: Rows) -> None:
        """Send tensors to peers and fill tensors from peers: contiguous, and one message whatever their number.

        A peer of whom neither speaks is not waited for. It counts the exchange, too, so all ranks have to call it.

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
        for p in sends.keys() | receives.keys():
            outgoing[p], incoming[p] = _Flow(self._peers[p], p, ()), _Flow(self._peers[p], p, ())
            if p in sends:
                own_header = struct.pack(HEADER, self._count, sum(map(len, sends[p])))
                outgoing[p] = _Flow(self._peers[p], p, [memoryview(own_header), *sends[p]])
            if p in receives:
                headers[p] = bytearray(HEADER_BYTES)
                incoming[p] = _Flow(self._peers[p], p, [memoryview(headers[p]), *receives[p]])
        # Most messages fit into the sockets' buffers: they are on their way before anybody is waited for.
        for flow in outgoing.values():
            flow.send()
        self._wait_for(outgoing, incoming)
        # Compared once all is here. Rows of another exchange raise before anybody uses them.
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
        waiting, flows = dict.fromkeys(outgoing, -1), [*outgoing.values(), *incoming.values()]
        milliseconds, left, moved = 1e3 * min(LOOK, self._timeout / 4), -1, time.monotonic()
        while waiting:
            for p in list(waiting):
                events = (select.POLLOUT if outgoing[p].left else 0) | (select.POLLIN if incoming[p].left else 0)
                if incoming[p].left:
                    incoming[p].wake_me()
                if not events:
                    if waiting.pop(p) >= 0:  # else all was sent at once, and nothing comes from this peer
                        poll.unregister(self._peers[p])
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
                # Errors and hang-ups, too: to read says what is the matter.
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
        # Without empty ones, of which a call moves 0 bytes: 0 means that the peer has closed.
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
            count = move(self._parts[:PARTS])
        except BlockingIOError:
            return
        except OSError as error:
            raise RuntimeError(f"Connection closed by rank {self._peer}: {error}") from error
        if count == 0:
            raise RuntimeError(f"Connection closed by rank {self._peer}")
        self.left -= count
        gone = 0
        while gone < len(self._parts) and count >= len(self._parts[gone]):
            count -= len(self._parts[gone])
            gone += 1
        self._parts = self._parts[gone:]
        if self._parts:
            self._parts[0] = self._parts[0][count:]


def _bytes_of_rows(rows: Rows) -> dict[int, list[memoryview]]:
    return {p: [*map(bytes_of, parts)] for p, parts in rows.items()}


def bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    if x.dtype in _OF_PYTHON and x.numel() and not x.requires_grad:  # the quick way: two views less for each leaf
        array: Any = x.numpy()
        return memoryview(array).cast("B")
    # (...) -> (n,) -> (bytes,)
    array = x.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


_OF_PYTHON = {torch.uint8, torch.int8, torch.float32, torch.float64}
"""Dtypes that a memoryview knows."""


OPENING = 20.0
"""Seconds that opening the connections may take."""

CALLERS = 64
"""Callers that may be about to say who they are, while the connections are opened."""

RANK = "<Q"
"""The number of the calling rank, which it sends after the token."""

Address = tuple[str, int]

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections | None] = weakref.WeakKeyDictionary()
_on_gloo: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def connections(group: dist.ProcessGroup) -> Connections | None:
    """Return a group's connections, opened in the first call, which is a collective.

    None if the group's backend for the CPU is not gloo, or not all ranks could be reached; the log then says why.
    """
    if group not in _opened:
        _opened[group] = _open(group) if is_gloo(group) else None
    return _opened[group]


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo carries a group's tensors in host memory."""
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError:  # it has no backend for the CPU
        return False


def stay_on_gloo(groups: Iterable[dist.ProcessGroup]) -> None:
    """Open no connections of these groups; the other ranks hear of it when they are about to open theirs."""
    _on_gloo.update(groups)


def stays_on_gloo(group: dist.ProcessGroup) -> bool:
    """Tell whether this rank opens no connections of a group."""
    return group in _on_gloo


def abort_connections(group: dist.ProcessGroup) -> None:
    """Close a group's connections, if it has any: whoever waits for this rank hears of it at once."""
    opened = _opened.get(group)
    if opened is not None:
        opened.shut_down()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return after which time a group's collectives fail; torch's default where its backend does not tell."""
    kinds = [torch.device(kind.type) for kind in getattr(group, "_device_types", [])]
    options = getattr(group._get_backend(kinds[0]), "options", None) if kinds else None
    timeout: timedelta = getattr(options, "_timeout", None) or default_pg_timeout
    return timeout


def _open(group: dist.ProcessGroup) -> Connections | None:
    """Connect all pairs of ranks; None on all ranks if one pair cannot be."""
    peers: dict[int, socket.socket] = {}
    problem, listener, address = "", None, None
    # Every rank makes one, so that all tell alike; rank 0's counts.
    token = secrets.token_bytes(16)
    try:
        if stays_on_gloo(group):
            raise OSError("its axis was bound with tcp=False")
        check_system()
        listener = listen(group.size() + CALLERS)
        address = listener.getsockname()[:2]
    except OSError as error:
        problem = f"rank {group.rank()} cannot listen: {error}"
    # A rank that has a problem comes here, too: the others would wait for it in this gather.
    told = tell_all((address, token, problem), group, OPENED)
    if not any(text for _, _, text in told):
        try:
            peers = meet(group, listener, [address for address, _, _ in told], told[0][1])
        except OSError as error:
            problem = f"rank {group.rank()} cannot reach all others: {error}"
    if listener is not None:
        listener.close()
    opened = Connections(peers, timeout_of(group).total_seconds())
    # A second round, or ranks that reached all others would send over connections that the rest does not read.
    reasons = [text for text in [*(text for *_, text in told), *tell_all(problem, group, OPENED)] if text]
    if not reasons:
        return opened
    opened.close()
    if group.rank() == 0 and not stays_on_gloo(group):
        logger.warning("codes go over gloo instead of connections of their own: %s", reasons[0])
    return None


OPENED = "the first exchange over a process group"


def tell_all(value: Any, group: dist.ProcessGroup | None, call: str) -> list[Any]:
    """Return the values of all ranks of a group, objects that can be pickled; None is the default group.

    Args: call: what this rank is in.
    Raises: `RanksDisagree`, on every rank, where another one is in another call, whose objects are of no use here.
    """
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, ("fn", call, value), group=group)
    calls = [x[1] if isinstance(x, tuple) and x[:1] == ("fn",) and len(x) == 3 else "something else" for x in heard]
    for rank, other in enumerate(calls):
        if other != calls[0]:
            text = f"rank {rank} of a process group is in {other}, and rank 0 in {calls[0]}"
            raise RanksDisagree(f"ranks disagree: {text}; {SAME_CALL}", rank=rank, field="call")
    return [value for *_, value in heard]


def meet(
    group: dist.ProcessGroup, listener: Any, addresses: Sequence[Address], token: bytes
) -> dict[int, socket.socket]:
    """Call all lower ranks, and take the calls of all higher ones, which give the token.

    A call succeeds as soon as the other rank listens, so the order in which ranks come to this does not matter.
    """
    rank, until = group.rank(), time.monotonic() + OPENING
    connected = dict[int, socket.socket]()
    try:
        for peer in range(rank):
            left = max(until - time.monotonic(), 0.01)
            connected[peer] = socket.create_connection(addresses[peer], timeout=left)
            # A socket that was accepted does not say which rank has called.
            connected[peer].sendall(token + struct.pack(RANK, rank))
        for peer, connection in _calls(listener, set(range(rank + 1, group.size())), token, until):
            connected[peer] = connection
    except BaseException:
        for connection in connected.values():
            connection.close()
        raise
    return connected


def _calls(listener: Any, missing: set[int], token: bytes, until: float) -> Iterator[tuple[int, socket.socket]]:
    """Yield a call of each rank that is missing. Nobody waits for strangers, who are hung up on.

    A caller who says nothing may be a rank that is about to: it stays until `CALLERS` others have called since.
    """
    listener.setblocking(False)
    with selectors.DefaultSelector() as open_calls:
        open_calls.register(listener, selectors.EVENT_READ)
        try:
            while missing:
                if time.monotonic() >= until:
                    raise TimeoutError(f"rank {', '.join(map(str, sorted(missing)))} did not call in {OPENING:g} s")
                ready: list[Any] = [key for key, _ in open_calls.select(until - time.monotonic())]
                for caller, heard in ((key.fileobj, key.data) for key in ready if key.fileobj is not listener):
                    if _is_speaking(caller, heard, len(token) + struct.calcsize(RANK)):
                        continue
                    open_calls.unregister(caller)
                    peer = _rank_in(heard, token)
                    if peer in missing:
                        missing.remove(peer)
                        yield peer, caller
                    else:
                        caller.close()
                if any(key.fileobj is listener for key in ready):
                    _answer(listener, open_calls)
        finally:
            _hang_up_on(open_calls, 0)


def _is_speaking(caller: socket.socket, heard: bytearray, length: int) -> bool:
    """Read more bytes of a caller; return whether it is still to send some, and has not hung up."""
    part = b""
    with suppress(OSError):
        part = caller.recv(length - len(heard))
    heard += part
    return bool(part) and len(heard) < length


def _rank_in(heard: bytearray, token: bytes) -> int | None:
    """Return the rank that has called, by the token and the number that it sent; None for a stranger."""
    knows = secrets.compare_digest(heard[: len(token)], token) and len(heard) == len(token) + struct.calcsize(RANK)
    return int(struct.unpack(RANK, heard[len(token) :])[0]) if knows else None


def _answer(listener: Any, open_calls: Any) -> None:
    """Take the next call. If there are too many open ones then, hang up on the oldest."""
    with suppress(BlockingIOError, ConnectionError):  # the caller has hung up before
        caller, _ = listener.accept()
        caller.setblocking(False)
        open_calls.register(caller, selectors.EVENT_READ, bytearray())
    _hang_up_on(open_calls, CALLERS)


def _hang_up_on(open_calls: Any, but: int) -> None:
    """Hang up on all callers but the last few; the listener, which comes first, stays."""
    keys = [*open_calls.get_map().values()][1:]
    for key in keys[: max(len(keys) - but, 0)]:
        open_calls.unregister(key.fileobj)
        key.fileobj.close()


def listen(backlog: int) -> socket.socket:
    """Listen on the address that gloo would use: of the interface it is told, of the host's name, or loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return listen_on(*address_of(name), backlog)
    with suppress(OSError):  # the name may stand for an address of another machine, or for none
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return listen_on(str(address[0]), family, backlog)
    return listen_on("127.0.0.1", socket.AF_INET, backlog)


def listen_on(host: str, family: int, backlog: int) -> socket.socket:
    """Listen on an address, at a port that the system chooses."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def address_of(interface: str) -> tuple[str, int]:
    """Return an address of a network interface and its family; IPv6 where it has none of IPv4.

    Raises: OSError if it has none, or this system cannot tell.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError(f"the address of {interface!r} cannot be asked for on this system") from error
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            get_address = 0x8915  # SIOCGIFADDR of Linux
            reply = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(reply[20:24]), socket.AF_INET
    except OSError as error:
        for line in _lines_of(Path("/proc/net/if_inet6")):
            number, _, _, scope, _, name = line.split()
            if name == interface and scope != LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)), socket.AF_INET6
        raise OSError(f"no address of the interface {interface!r}, which GLOO_SOCKET_IFNAME names: {error}") from error


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if that is not known."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # without an address
            if address_of(name)[0] == address:
                return name
    return None


LINK_LOCAL = "20"
"""Scope of addresses that are of no use without the number of an interface, which differs between hosts."""


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or without IPv6
        return []
