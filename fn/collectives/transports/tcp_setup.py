"""How the ranks of a process group come to connections of their own, beside gloo's.

They open them in their first exchange, which all ranks must call, on the network interface that gloo uses. If one pair
of ranks cannot connect, all of them go over gloo, and the log says why. Whoever else calls meanwhile is turned away.

A caller proves that it is a rank by rank 0's token, 16 random bytes, and says its number. On a cluster others call too:
port scanners, health checks, a job whose ports were given anew. Taken for a rank, one would feed numbers into the mean,
and one that says nothing would keep the ranks waiting.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fn.collectives.transports.tcp import Connections, check_system

logger = logging.getLogger("fn")

OPENING = 20.0
"""Seconds that opening the connections may take."""

CALLERS = 64
"""Callers that may be about to say who they are, while the connections are opened."""

RANK = "<Q"
"""What a rank that calls says after the token."""

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
    token = secrets.token_bytes(16)
    try:
        if stays_on_gloo(group):
            raise OSError("its axis was bound with tcp=False")
        check_system()
        listener = _listen(group.size() + CALLERS)
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
    opened = Connections(peers, timeout_of(group).total_seconds())
    # A second round, or ranks that reached all others would send over connections that the rest does not read.
    reasons = [text for text in [*(text for *_, text in told), *_tell_all(problem, group)] if text]
    if not reasons:
        return opened
    opened.close()
    if group.rank() == 0 and not stays_on_gloo(group):
        logger.warning("codes go over gloo instead of connections of their own: %s", reasons[0])
    return None


def _tell_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _meet(
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
                for caller, said in ((key.fileobj, key.data) for key in ready if key.fileobj is not listener):
                    if _is_speaking(caller, said, len(token) + struct.calcsize(RANK)):
                        continue
                    open_calls.unregister(caller)
                    peer = _rank_in(said, token)
                    if peer in missing:
                        missing.remove(peer)
                        yield peer, caller
                    else:
                        caller.close()
                if any(key.fileobj is listener for key in ready):
                    _answer(listener, open_calls)
        finally:
            _hang_up_on(open_calls, 0)


def _is_speaking(caller: socket.socket, said: bytearray, length: int) -> bool:
    """Add to what a caller has said; return whether it has neither said all that it may nor hung up."""
    part = b""
    with suppress(OSError):
        part = caller.recv(length - len(said))
    said += part
    return bool(part) and len(said) < length


def _rank_in(said: bytearray, token: bytes) -> int | None:
    """Return the rank that says so; None for a stranger."""
    knows = secrets.compare_digest(said[: len(token)], token) and len(said) == len(token) + struct.calcsize(RANK)
    return int(struct.unpack(RANK, said[len(token) :])[0]) if knows else None


def _answer(listener: Any, open_calls: Any) -> None:
    """Take the next call, at the price of the oldest one that nothing has been said in if there are too many."""
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


def _listen(backlog: int) -> socket.socket:
    """Listen on the address that gloo would use: of the interface it is told, of the host's name, or loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return _listen_on(*_address_of(name), backlog)
    with suppress(OSError):  # the name may stand for an address of another machine, or for none
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return _listen_on(str(address[0]), family, backlog)
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


def _address_of(interface: str) -> tuple[str, int]:
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


LINK_LOCAL = "20"
"""Scope of addresses that are of no use without the number of an interface, which differs between hosts."""


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or without IPv6
        return []
