"""How the ranks of a process group come to connections of their own, beside gloo's.

They open them in their first exchange, which all ranks must call, on the network interface that gloo uses. If one pair
of ranks cannot connect, all of them go over gloo, and the log says why.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fn.collectives.sockets import Connections, check_system

logger = logging.getLogger(__name__)

OPENING = 20.0
"""Seconds that opening the connections may take."""

Address = tuple[str, int]

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
        check_system()
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
        return _listen_on(*_address_of(name), backlog)
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
