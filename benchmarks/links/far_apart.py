"""Namespaces that are far apart: a switch of taps that holds every frame for a while, where Linux has no `netem`.

a rank's namespace: tap device --fd--> a thread holds frames for `seconds` --fd--> the other namespaces' taps
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.links import namespaces

SET_INTERFACE, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000
"""TUNSETIFF, IFF_TAP and IFF_NO_PI of linux/if_tun.h."""

NETWORK = 0x40000000
"""CLONE_NEWNET of linux/sched.h."""

FRAME = 1 << 16
BROADCAST = 1
"""The bit of a destination's first byte that says that all are to get the frame."""


def missing() -> str | None:
    """Return why there can be no such switch here, or None."""
    if (reason := namespaces.missing()) is not None:
        return reason
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun cannot be opened"


@contextmanager
def star(name: str, ranks: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """Make a namespace for each rank, as `namespaces.star` does; a frame takes `seconds` from one to another.

    Yields: the names of the namespaces. Raises: OSError if the kernel or the permissions do not allow it.
    """
    names = tuple(f"{name}-{rank}" for rank in range(ranks))
    made, taps, stop = list[str](), list[int](), threading.Event()
    try:
        for rank, space in enumerate(names):
            namespaces.run("ip", "netns", "add", space)
            made.append(space)
            taps.append(_tap(space))
            namespaces.plug(space, rank)
        thread = threading.Thread(target=_carry, args=(taps, seconds, stop), name="frames on their way", daemon=True)
        thread.start()
        yield names
    finally:
        stop.set()
        if made and len(taps) == ranks:
            thread.join()
        for tap in taps:
            os.close(tap)
        for space in made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _tap(space: str) -> int:
    """Return a file of the tap `namespaces.DEVICE` in a namespace. Only this thread is in the namespace meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            if libc.setns(file, NETWORK):
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(file)

    home = f"/proc/self/task/{threading.get_native_id()}/ns/net"
    back = os.open(home, os.O_RDONLY)
    try:
        enter(f"/run/netns/{space}")
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, SET_INTERFACE, struct.pack("16sH", namespaces.DEVICE.encode(), TAP | NO_HEADER))
    finally:
        failed = libc.setns(back, NETWORK)
        os.close(back)
    if failed:
        raise OSError(ctypes.get_errno(), "setns: this thread cannot return to its namespace")
    return tap


def _carry(taps: list[int], seconds: float, stop: threading.Event) -> None:
    """Pass frames on when they are due, to the rank whose address they bear, or to all others."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    places: dict[bytes, int] = {}
    while not stop.is_set():
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
        for tap in select.select(taps, [], [], min(rest, 0.05))[0]:
            try:
                frame = os.read(tap, FRAME)
            except BlockingIOError:
                continue
            places[frame[6:12]] = tap
            waiting.append((time.monotonic() + seconds, tap, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            known = None if frame[0] & BROADCAST else places.get(frame[:6])
            for tap in [t for t in taps if t != source] if known is None else [known]:
                os.write(tap, frame)
