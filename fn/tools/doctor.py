"""`python -m fn doctor`: whether this machine, and another one, are fit for ranks that meet over a network.

A line for each check, with the cure where one fails. With `--peer` both machines call each other, as ranks would:
on the port where torchrun lets them meet, and on a free port of the address that gloo announces. There each also sends
the other longer and longer messages, and both say how fast they came.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from fn.adapters.torchft.connect import address_towards
from fn.collectives.transports.tcp import interface_of, listen
from fn.version import __version__

PORT = 29500
"""Where torchrun lets ranks meet, by default."""

SHARED = 1 << 30
"""Bytes of shared memory that should be free: what NCCL's documentation asks containers for."""

FILES = 1024
"""Open files that should be allowed: each rank opens a connection to each other rank, for each axis."""

GREETING = b"fn doctor\n"
CALL = 2.0
"""Seconds that a call may take before it is tried again."""

LONG = 1.0
"""Seconds of a message that is long enough to be timed: TCP takes some round trips to find its speed."""

MOST = 1 << 26
"""Bytes of the longest message, which a fast network takes in less."""


class Finding(NamedTuple):
    """What one check found. ok: whether training can go on like this. text: with the cure, where it cannot."""

    ok: bool
    check: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = (
        "Check what ranks need of this machine; with --peer, of the way to another one and back, and its MB/s."
    )
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="another machine, on which doctor runs at the same time")
    parser.add_argument("--port", type=int, default=PORT, help=f"where this one is called (default: {PORT})")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS",
        help="how long to wait for the other machine (default: 60)")  # fmt: skip


def run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> bool:
    """Print a line for each check; return whether all is well."""
    peer = None
    if flags.peer is not None:
        host, _, port = flags.peer.rpartition(":") if flags.peer.count(":") == 1 else (flags.peer, "", "")
        if not host or (port and not port.isdigit()):
            parser.error(f"--peer: expected host or host:port, but got {flags.peer!r}")
        peer = host, int(port or PORT)
    well = True
    for ok, check, text in findings(peer, flags.port, flags.timeout):
        print(f"{'ok' if ok else 'WRONG':6}{check:16}{text}", flush=True)
        well = well and ok
    return well


def findings(peer: tuple[str, int] | None, port: int = PORT, timeout: float = 60.0) -> Iterator[Finding]:
    """Check this machine, then the way to a peer and back. Args: as the flags; peer: host and port."""
    yield Finding(True, "versions", ", ".join(f"{name} {text}" for name, text in _versions().items()))
    yield _files()
    yield _shared_memory()
    try:
        listener = listen(8)
    except OSError as error:
        cure = f"unset it, or name one of {', '.join(name for _, name in socket.if_nameindex())}"
        yield Finding(False, "address", f"{error}; {cure}")
        return
    with listener:
        own = str(listener.getsockname()[0])
        yield _address(own, peer)
        if peer is not None:
            yield from _meeting(peer, port, listener, timeout)


def _versions() -> dict[str, str]:
    return {"fn": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return Finding(True, "open files", "no limit")
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < 0 or allowed >= FILES:
        return Finding(True, "open files", f"{allowed if allowed >= 0 else 'any number'} allowed")
    cure = "ulimit -n 65536" + (", by root: it is the hard limit" if most == allowed else "")
    return Finding(False, "open files", f"{allowed} allowed; each rank opens one to each other rank: {cure}")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:  # not Linux
        return Finding(True, "shared memory", "no /dev/shm on this system")
    cure = "; NCCL and the workers of a DataLoader need more: docker run --shm-size=8g, or --ipc=host"
    return Finding(free >= SHARED, "shared memory", f"{free >> 20} MiB free{'' if free >= SHARED else cure}")


def _address(own: str, peer: tuple[str, int] | None) -> Finding:
    """Check the address that gloo, and the connections of `fn`, announce to other ranks."""
    name = interface_of(own)
    text = f"{own}{f' ({name})' if name else ''}, which gloo announces to other ranks"
    if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return Finding(True, "address", text)
    if peer is None:
        return Finding(True, "address", f"{text}: ranks of this machine only")
    try:
        towards = address_towards(*peer)
    except ConnectionError:  # said where the peer is called
        return Finding(False, "address", f"{text}: no other machine reaches it")
    if ipaddress.ip_address(towards.partition("%")[0]).is_loopback:
        return Finding(True, "address", text)
    cure = f"export GLOO_SOCKET_IFNAME={interface_of(towards) or 'the interface of ' + towards}"
    return Finding(False, "address", f"{text}: no other machine reaches it; {cure}")


class _Doorbell:
    """A listener that answers calls in a thread, and knows whether the peer's doctor has called.

    speed: bytes a second of the longest message that it sent; 0: none came. measured: whether it has sent all.
    """

    def __init__(self, listener: socket.socket, answer: bytes):
        self.listener, self.answer, self.speed = listener, answer, 0.0
        self.rung, self.measured = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:  # closed
                return
            with caller, suppress(OSError, ValueError):  # whoever calls and says nothing is no doctor
                caller.settimeout(CALL)
                if caller.recv(len(GREETING)) == GREETING:
                    caller.sendall(self.answer + b"\n")
                    self.rung.set()
                    self._take(caller)

    def _take(self, caller: socket.socket) -> None:
        """Answer each message, which comes behind its length, with the seconds that it took."""
        with caller.makefile("rb") as messages:
            while length := messages.readline(32):
                began, left = time.perf_counter(), int(length)
                while left > 0:
                    left -= len(messages.read1(min(left, 1 << 16))) or _hung_up()
                seconds = max(time.perf_counter() - began, 1e-9)  # a coarse clock may stand still
                self.speed = int(length) / seconds
                caller.sendall(b"%.9f\n" % seconds)
        if self.speed:
            self.measured.set()


def _called(place: tuple[str, int]) -> bytes:
    """Call a doorbell and return its answer. Raises: OSError."""
    with socket.create_connection(place, CALL) as call:
        call.sendall(GREETING)
        with call.makefile("rb") as answer:
            line = answer.readline(4096)
    if not line:
        raise ConnectionError("something else listens there")
    return line


def _hung_up() -> int:
    raise ConnectionError("it hung up")


def _speed_to(place: tuple[str, int], end: float) -> float:
    """Send a doorbell messages, each twice as long as the one before; return the bytes a second of the last.

    Raises: OSError, also where one takes until `end`; ValueError for an answer that is none.
    """
    with socket.create_connection(place, CALL) as call, call.makefile("rb") as answers:
        call.settimeout(max(CALL, end - time.monotonic()))
        call.sendall(GREETING)
        answers.readline(4096)
        seconds, length = 0.0, 1 << 16
        while seconds < LONG and length < MOST:
            length *= 2
            call.sendall(b"%d\n" % length)
            call.sendall(bytes(length))
            seconds = float(answers.readline(32) or _hung_up())
    return length / seconds


def _meeting(peer: tuple[str, int], port: int, announced: socket.socket, timeout: float) -> Iterator[Finding]:
    """Call the peer's two doorbells, and wait until it has called ours."""
    end = time.monotonic() + timeout
    place = f"{peer[0]}:{peer[1]}"
    try:
        both = socket.has_dualstack_ipv6()
        door = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except OSError as error:
        yield Finding(False, "port", f"{port} cannot be listened on ({error.strerror}); end what uses it, or --port")
        return
    with door:
        address = announced.getsockname()
        facts = json.dumps({**_versions(), "address": [str(address[0]), address[1]]}).encode()
        bells = _Doorbell(door, facts), _Doorbell(announced, b"{}")
        answer, fault = _until(end, lambda: _called(peer))
        if answer is None:
            cure = "run doctor there at the same time, and open the port in its firewall"
            yield Finding(False, "to the peer", f"{place} does not answer ({fault}); {cure}")
        else:
            yield Finding(True, "to the peer", f"{place} answers")
            yield from _compared(answer, end)
        for bell, name, where in zip(bells, ("from the peer", "from its ranks"), (port, address[1]), strict=True):
            rung = bell.rung.wait(max(0.0, end - time.monotonic()))
            which = f"port {where}" if bell is bells[0] else f"{address[0]}:{where}, a free port"
            cure = f"open {'the port' if bell is bells[0] else 'all ports to ranks'} in the firewall of this machine"
            yield Finding(rung, name, f"reached {which}" if rung else f"nobody called {which}; {cure}")
        if bells[1].rung.is_set():
            came = bells[1].measured.wait(max(0.0, end - time.monotonic()))
            yield _speed("speed from it", bells[1].speed if came else None, "the peer sent nothing, or not all")


def _speed(check: str, speed: float | None, fault: str) -> Finding:
    cure = "long messages are lost where a tunnel has a larger MTU than the way below it: ip link set dev wg0 mtu 1280"
    text = f"not measured ({fault}); {cure}" if speed is None else f"{speed / 1e6:.2f} MB/s"
    return Finding(speed is not None, check, text)


def _until(end: float, call: Callable[[], Any]) -> tuple[Any, str]:
    """Try a call until it succeeds or the time is over; return its answer, or None and why there is none."""
    while True:
        try:
            return call(), ""
        except (OSError, ValueError) as error:  # the second also of what can be no name
            fault = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if time.monotonic() + 0.2 >= end:
            return None, fault
        time.sleep(0.2)


def _compared(answer: bytes, end: float) -> Iterator[Finding]:
    """Compare versions with the peer's, and call the address that its gloo announces."""
    try:
        theirs = json.loads(answer)
        host, port = str(theirs["address"][0]), int(theirs["address"][1])
        there = {name: str(theirs[name]) for name in _versions()}
    except (ValueError, KeyError, TypeError, IndexError):
        yield Finding(False, "peer's versions", "the answer is not that of this version of doctor; install one fn")
        return
    # Ranks of other versions of fn are refused when they meet; other builds of one torch (cpu, cu130) work together.
    plain = {name: text.partition("+")[0] for name, text in there.items() if name != "python"}
    differ = [name for name, text in plain.items() if _versions()[name].partition("+")[0] != text]
    text = ", ".join(f"{name} {version}" for name, version in there.items())
    cure = f"; install the same {' and '.join(differ)} on both" if differ else ""
    yield Finding(not differ, "peer's versions", text + cure)
    reached, fault = _until(end, lambda: _called((host, port)))
    cure = "set GLOO_SOCKET_IFNAME there to the interface that this machine reaches, and open its firewall for ranks"
    text = "answers" if reached is not None else f"does not answer ({fault}); {cure}"
    yield Finding(reached is not None, "to its ranks", f"{host}:{port}, which its gloo announces, {text}")
    if reached is not None:
        yield _speed("speed to it", *_until(end, lambda: _speed_to((host, port), end)))
