"""Who looks on: ledgers and observers. They follow the work into the threads that do it.

They belong to the thread that opened them, to the threads of autograd that run a backward pass for it, as torch carries
its own thread-local state there, and to the threads of ours that it gives jobs: `watched_by`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_KEY = "fn: watchers"


class Watchers(NamedTuple):
    """What is open: ledgers, and observers."""

    ledgers: tuple[Any, ...] = ()
    observers: tuple[Any, ...] = ()


_NOBODY = Watchers()

writing = threading.RLock()  # a handler of signals may send, too
"""Held while one is written: several threads may work for whoever opened it."""


def watchers() -> Watchers:
    """Return who watches what is done here."""
    found: Watchers = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else _NOBODY
    return found


def watch(by: Watchers) -> None:
    """Let these, and nobody else, watch from now on."""
    torch._C._stash_obj_in_tls(_KEY, by)


@contextmanager
def watched_by(those: Watchers) -> Iterator[None]:
    """Let these, such as those of the thread that a job is for, and nobody else, watch in this context."""
    before = watchers()
    watch(those)
    try:
        yield
    finally:
        watch(before)
