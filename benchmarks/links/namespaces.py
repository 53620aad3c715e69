"""A real, slow link on one machine: network namespaces, veth pairs, and token buckets at their ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

DEVICE = "fn-link"
QUEUE = 32 << 20
"""Bytes that may wait for the bucket: more than TCP sends ahead, so that nothing is dropped."""

SLOW = 5e8
"""Bit/s below which a bucket holds little."""

LARGEST = 1 << 16
"""Bytes of the largest packet that Linux hands to a card by default."""

PACKET = 10 * 1460
"""Bytes of the largest packet on a slow link, which fits into its bucket as a whole."""

HEADER = 14 + 20 + 32
"""Bytes of Ethernet, IP and TCP, with its time stamps, in front of a packet."""


def run(*command: str) -> None:
    """Run a command. Raises: OSError with what it said, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def missing() -> str | None:
    """Return why there can be no throttled link here, or None."""
    if os.geteuid() != 0:
        return "not root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found (iproute2)"
    try:
        with pair(f"fn-probe-{os.getpid()}") as names:
            run("ip", "netns", "exec", names[0], "tc", "qdisc", "add", "dev", DEVICE, "root", *_bucket(10**8))
    except OSError as error:
        return str(error)
    return None


@contextmanager
def pair(name: str) -> Iterator[tuple[str, str]]:
    """Make two namespaces joined by a veth pair, 10.77.0.1 and 10.77.0.2, and remove them afterwards.

    Yields: the names of the namespaces. Raises: OSError if the kernel or the permissions do not allow it.
    """
    names = (f"{name}-0", f"{name}-1")
    made = []
    try:
        for space in names:
            run("ip", "netns", "add", space)
            made.append(space)
        run("ip", "-n", names[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for rank, space in enumerate(names):
            plug(space, rank)
        yield names
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@contextmanager
def star(name: str, ranks: int) -> Iterator[tuple[str, ...]]:
    """Make a namespace for each rank, 10.77.0.1 and up, all plugged into a switch of their own; remove them afterwards.

    Yields: the names of the namespaces. Raises: OSError if the kernel or the permissions do not allow it.
    """
    switch, names = f"{name}-switch", tuple(f"{name}-{rank}" for rank in range(ranks))
    made = []
    try:
        for space in (switch, *names):
            run("ip", "netns", "add", space)
            made.append(space)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, space in enumerate(names):
            port = f"port-{rank}"
            run("ip", "-n", space, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            plug(space, rank)
        yield names
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def start(
    module: str, rank: int, settings: Mapping[str, Any], space: str | None, log: IO[str]
) -> subprocess.Popen[bytes]:
    """Start a module as a rank, with its number and its settings as JSON; in a namespace, or over loopback."""
    prefix = ["ip", "netns", "exec", space] if space else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE if space else "lo"}
    command = [*prefix, sys.executable, "-m", module, str(rank), json.dumps(settings)]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def plug(space: str, rank: int) -> None:
    """Give a namespace its address, and Linux's default congestion control, whatever this machine prefers."""
    run("ip", "-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", DEVICE)
    for device in (DEVICE, "lo"):
        run("ip", "-n", space, "link", "set", device, "up")
    run("ip", "-n", space, "route", "replace", "10.77.0.0/24", "dev", DEVICE, "congctl", "cubic")


def throttle_port(name: str, rank: int, rate: float) -> None:
    """Limit what a switch made by `star` sends to a rank, as the rank's own card would if several sent to it."""
    run("tc", "-n", f"{name}-switch", "qdisc", "replace", "dev", f"port-{rank}", "root", *_bucket(rate))


def throttle(rate: float | None) -> None:
    """Limit what leaves the namespace of this process to a rate in bit/s, None for no limit.

    The bucket cuts packets that are larger than itself into frames, in software and on the core of whoever sends or
    receives; a card that segments does it for nothing. So on slow links the packets are no larger than the bucket. The
    headers of the frames count for the rate either way.
    """
    size = PACKET if rate is not None and rate < SLOW else LARGEST
    run("ip", "link", "set", DEVICE, "gso_max_size", str(size))
    run("ip", "route", "flush", "cache")  # open connections read the size with the route
    if rate is None:
        subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], capture_output=True, check=False)
    else:
        run("tc", "qdisc", "replace", "dev", DEVICE, "root", *_bucket(rate))


class Sent(NamedTuple):
    """What has left a namespace. payload: bytes without headers. headers: those of Ethernet, IP and TCP."""

    payload: int
    headers: int


def sent() -> Sent:
    """Return what has left this namespace, by the counters of its interface; zeros without one.

    A packet of the counters may be segmented further on, as by a card that does it, so its headers are counted once.
    """
    counters = Path("/sys/class/net") / DEVICE / "statistics"
    if not counters.exists():
        return Sent(0, 0)
    size, packets = (int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return Sent(size - HEADER * packets, HEADER * packets)


def _bucket(rate: float) -> list[str]:
    """Let through a packet of the largest size at once, or a quarter of a millisecond's worth."""
    burst = 16 << 10 if rate < SLOW else max(72 << 10, int(rate / 8 * 250e-6))
    return ["tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(QUEUE)]
