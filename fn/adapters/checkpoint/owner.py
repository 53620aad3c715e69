"""Who saves into a folder: one job at a time, which a file there names for as long as it saves.

Two that save at once would clear away each other's unfinished files. A process that was killed leaves its file behind.
On the same machine its number and its start tell that it is gone, and the file is taken over at once. Of another
machine nothing is known but that an owner touches its file every `BEAT` seconds: a file that nobody touches for
`PATIENCE` seconds is taken over, too. An owner that was only stopped for so long hears of it before its checkpoint
becomes the newest one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fn.collectives.transports.failure_detection import this_machine

OWNER = ".owner"
BEAT = 5.0
PATIENCE = 30.0
"""Seconds."""

JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "TORCHELASTIC_RUN_ID")

logger = logging.getLogger("fn")


class Claim:
    """The right to save into a folder, from `take` to the end of this context."""

    def __init__(self, folder: Path):
        self._path = folder / OWNER
        self._text = ""
        self._over = threading.Event()

    def __enter__(self) -> Claim:
        return self

    def take(self) -> None:
        """Become the owner. Raises: OSError that names who is."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = _describe_this_process()
        # Only one of several processes can create the file. One that finds it there tries again when it is gone.
        while not _create(self._path, text):
            _remove_stale(self._path)
        self._text = text
        threading.Thread(target=self._beat, daemon=True, name="fn-checkpoint-owner").start()

    def check(self) -> None:
        """Raise an OSError if another process has become the owner since `take`."""
        seen = _look(self._path)
        if seen is None or seen[0] != self._text:
            raise OSError(
                f"checkpoint: {self._path.parent} was taken over by {_named(_parsed(seen))}, because this process did "
                f"not touch {OWNER} there for {PATIENCE} s; this checkpoint was not finished"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if not self._text:
            return
        with suppress(OSError):  # of a disk that is gone; what is to be said about it the save has said
            seen = _look(self._path)
            if seen is not None and seen[0] == self._text:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):
                os.utime(self._path)


def _describe_this_process() -> str:
    job = next((f"{name}={os.environ[name]}" for name in JOBS if os.environ.get(name)), "")
    process = {
        "job": job,
        "host": socket.gethostname(),
        "where": this_machine(),
        "pid": os.getpid(),
        "started": _start(os.getpid()),
    }
    return json.dumps({**process, "token": secrets.token_hex(8)})


def _create(path: Path, text: str) -> bool:
    """Write a file that is not there; return whether it was not."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)  # asks and makes at once, over NFS, too
    except FileExistsError:
        return False
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
    except OSError:  # the disk is full
        path.unlink(missing_ok=True)
        raise
    return True


def _remove_stale(path: Path) -> None:
    """Remove the file of a process that is gone. Raises: OSError that names it if it is not."""
    seen = _look(path)
    if seen is None:  # released meanwhile
        return
    owner = _parsed(seen)
    if _runs(owner) or (_runs(owner) is None and _is_touched(path, seen)):
        raise OSError(
            f"checkpoint: {path.parent} is in use: {_named(owner)} is saving into it; give each job a folder of its "
            f"own, or save again when that one has ended"
        )
    logger.warning("checkpoint: %s is taken over from %s, which is gone", path.parent, _named(owner))
    path.unlink(missing_ok=True)


def _is_touched(path: Path, seen: tuple[str, int]) -> bool:
    """Return whether a file changes, or is touched, within `PATIENCE` seconds; wait as long as that."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        time.sleep(PATIENCE / 30)
        if _look(path) != seen:
            return True
    return False


def _look(path: Path) -> tuple[str, int] | None:
    """Return a file's text and when it was touched last; None if it is not there."""
    if not path.is_file() and os.path.lexists(path):  # a pipe would be waited for
        raise OSError(f"checkpoint: {path} is no regular file; remove it")
    try:
        with path.open(errors="replace") as file:  # opened each time: over NFS that brings its times up to date
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _parsed(seen: tuple[str, int] | None) -> dict[str, Any]:
    with suppress(ValueError):
        owner = json.loads(seen[0] if seen else "")
        if isinstance(owner, dict):
            return owner
    return {}  # its process has not written it yet, or was killed before


def _named(owner: dict[str, Any]) -> str:
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"{job}process {owner['pid']} on {owner.get('host')}" if "pid" in owner else "another process"


def _runs(owner: dict[str, Any]) -> bool | None:
    """Return whether a process runs; None if it is not known, as that of another machine."""
    if owner.get("where") != this_machine():
        return None
    return bool(_start(owner.get("pid")) == owner.get("started"))


def _start(process: object) -> str | None:
    """Return when a process was started, in the system's ticks; None if it is gone.

    Its number alone says little: the system gives that of a process that ended to a new one.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()  # its name may hold ")" itself
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie or dead process saves nothing any more
