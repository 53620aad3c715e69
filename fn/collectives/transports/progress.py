"""How far each rank had come, for the log of the run that torchrun starts when one is lost.

Over NCCL nobody learns whom an exchange waits for: torch ends the processes that wait, and torchrun reports the first
of them. So each rank counts the exchanges that it begins and ends in a file of its machine, which outlives it: in
memory that is mapped, without a call of the system. After a restart the first process of each machine reads what its
ranks wrote, and rank 0 says who was behind. That is the rank that was lost, or that did something else meanwhile.

Under torchrun with `--max-restarts` only. The files are in the folder for temporary files, for this user alone.
"""

from __future__ import annotations

import atexit
import json
import logging
import mmap
import os
import struct
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("fn")

RECORD = struct.Struct("<4q")
"""A rank, how many there were, and how many exchanges it began and ended."""

Record = tuple[int, ...]


def folder_of(run: str) -> Path:
    """Return the folder of a run, which this user alone can read."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in run)
    folder = Path(tempfile.gettempdir()) / f"fn-progress-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def records_of(folder: Path, attempt: int) -> list[Record]:
    """Return what the ranks of an attempt wrote on this machine, and remove what they and those before wrote."""
    found = []
    for path in folder.iterdir():
        number = path.name.partition("-")[0]
        if number.isdigit() and int(number) <= attempt:
            text = path.read_bytes()
            if int(number) == attempt and len(text) == RECORD.size:
                found.append(RECORD.unpack(text))
            path.unlink(missing_ok=True)
    return sorted(found)


def who_was_behind(records: list[Record]) -> str:
    """Return what the ranks of the attempt before had come to, as a sentence; "" if nobody wrote."""
    if not records:
        return ""
    world = max(record[1] for record in records)
    missing = sorted({*range(world)} - {record[0] for record in records})
    ahead = max(record[2:] for record in records)
    behind = [record for record in records if record[2:] < ahead]
    parts = [f"rank {rank} had begun {begun} exchanges and ended {ended}" for rank, _, begun, ended in behind]
    if missing:
        who = f"rank {', '.join(map(str, missing))}, which ended by itself, or whose machine is gone"
        parts.append(f"nothing is known of {who}")
    rest = f"{'the others' if behind else 'all ranks'} had begun {ahead[0]} and ended {ahead[1]}"
    cause = "so whoever was lost was inside of one; torchrun names the first process that ended as the root cause"
    return "; ".join([*parts, rest] if parts else [rest, cause])


class Progress:
    """The exchanges that this process began and ended."""

    def __init__(self) -> None:
        self._numbers = [0, 0]
        self._lock = threading.Lock()
        self._file: mmap.mmap | None = None

    def begin(self) -> None:
        """Count an exchange that begins. The first one opens the file, and says what was before a restart."""
        with self._lock:
            self._numbers[0] += 1
            if self._numbers[0] <= 2:
                self._start(self._numbers[0])
            self._write()

    def end(self) -> None:
        """Count an exchange that has ended."""
        with self._lock:
            self._numbers[1] += 1
            self._write()

    def _write(self) -> None:
        if self._file is not None:
            self._file[16 : RECORD.size] = struct.pack("<2q", *self._numbers)

    def _start(self, number: int) -> None:
        attempt, run = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), os.environ.get("TORCHELASTIC_RUN_ID")
        if run is None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or not dist.is_initialized():
            return
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # it is for a message only
            rank, store = dist.get_rank(), _store()
            if number == 1:
                self._open(folder_of(run), attempt, rank)
                if attempt and os.environ.get("LOCAL_RANK") == "0":
                    found = json.dumps(records_of(folder_of(run), attempt - 1))
                    store.set(_key(attempt, os.environ.get("GROUP_RANK", "0")), found)
            machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
            if attempt and rank == 0 and number == (1 if machines == 1 else 2):  # by then the others have written
                _say(store, [_key(attempt, str(machine)) for machine in range(machines)])

    def _open(self, folder: Path, attempt: int, rank: int) -> None:
        path = folder / f"{attempt}-{rank}"
        path.write_bytes(RECORD.pack(rank, dist.get_world_size(), 0, 0))
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), RECORD.size)
        atexit.register(_forget, path)


def _forget(path: Path) -> None:
    """Remove a file when its process ends as it should, and the folder when the last one does."""
    if not hasattr(sys, "last_value"):
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()


def _store() -> Any:
    everyone: Any = dist.group.WORLD
    return everyone.get_group_store()


def _key(attempt: int, machine: str) -> str:
    return f"fn/progress before restart {attempt}/{machine}"


def _say(store: Any, keys: list[str]) -> None:
    records = [tuple(record) for key in keys if store.check([key]) for record in json.loads(store.get(key))]
    if text := who_was_behind(sorted(records)):
        logger.warning("before torchrun's restart: %s", text)


PROGRESS = Progress() if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else None
"""Of this process, if torchrun may start it again."""
