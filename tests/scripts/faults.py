"""What a process does to itself, for tests of what happens then."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

STILL = 8
"""Seconds for which a process does nothing."""


def fail(*_: object) -> None:
    raise RuntimeError("a fault")


def from_a_signal() -> None:
    signal.signal(signal.SIGUSR1, fail)
    signal.raise_signal(signal.SIGUSR1)


def stop() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {STILL}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk() -> None:
    """Let no file grow any more: the next save fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))


def cut() -> None:
    """Cut all connections of this process."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(path.name)).st_mode):
                socket.socket(fileno=os.dup(int(path.name))).shutdown(socket.SHUT_RDWR)


def signalled(number: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": fail,
    "exception in a thread": lambda: threading.Thread(target=fail).start(),
    "exception from a signal": from_a_signal,
    "abort": os.abort,
    "segmentation fault": lambda: ctypes.string_at(0),
    "SIGINT": signalled(signal.SIGINT),
    "SIGKILL": signalled(signal.SIGKILL),
    "SIGTERM": signalled(signal.SIGTERM),
    "SIGSTOP for a while": stop,
    "held GIL": lambda: ctypes.PyDLL(None).sleep(STILL),
    "long sleep": lambda: time.sleep(STILL),
    "cut connections": cut,
    "full disk": fill_disk,
}

GOES_ON = {"exception in a thread", "SIGSTOP for a while", "held GIL", "long sleep"}
"""Faults that a process survives."""
