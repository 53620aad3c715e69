"""Checkpoints on disk: whole ones only, the newest found by one small file that is replaced in one stroke.

    folder/latest                     the name of a checkpoint below, and a digest of it
    folder/step-000000001200-0/       what torch.distributed.checkpoint wrote, and a file of digests per rank
    folder/.writing-.../              a checkpoint that was never finished

A process that is killed at any moment leaves the old checkpoint or the new one. A file that was cut short or changed
is refused before anything is read from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from fn.errors import CheckpointDamaged

LATEST = "latest"
DIGESTS = "digests"


def digest_of(path: Path) -> str:
    """Return the blake2b digest of a file."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def begin(folder: Path, steps: int) -> Path:
    """Return a new folder to write into, named for what it is to become; clear away what was left unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left)
    number = sum(1 for _ in folder.glob(f"step-{steps:012d}-*"))
    while (folder / f"step-{steps:012d}-{number}").exists():
        number += 1
    writing = folder / f".writing-step-{steps:012d}-{number}"
    writing.mkdir()
    return writing


def seal(writing: Path, rank: int, world: int, first: bool) -> None:
    """Write down the digests of the files that this rank wrote; the first rank also those that belong to nobody."""
    names = sorted(p.name for p in writing.iterdir() if DIGESTS not in p.name)
    mine = [n for n in names if n.startswith(f"__{rank}_") or (first and not n.startswith("__"))]
    text = json.dumps({"world": world, "files": {name: digest_of(writing / name) for name in mine}})
    write_sealed(writing / f"{DIGESTS}-{rank}", text)


def finish(folder: Path, writing: Path, keep: int) -> Path:
    """Make a written checkpoint the newest one, in one stroke, and remove all but the `keep` newest."""
    done = folder / writing.name.removeprefix(".writing-")
    _sync(writing)
    writing.rename(done)
    _sync(folder)
    write_sealed(folder / LATEST, done.name)
    _sync(folder)
    for old in sorted(p for p in folder.glob("step-*") if p != done)[: -(keep - 1) or None]:
        shutil.rmtree(old)
    return done


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a folder.

    Raises: FileNotFoundError if there is none; CheckpointDamaged if the file that names it was changed.
    """
    pointer = folder / LATEST
    if not pointer.exists():
        raise FileNotFoundError(f"folder: {folder} holds no finished checkpoint")
    return folder / read_sealed(pointer)


def verify(found: Path, rank: int, size: int) -> int:
    """Compare the files of a checkpoint with their digests, one of `size` parts of them; return its world size.

    Raises: CheckpointDamaged that names the first file that is missing or not what was saved.
    """
    world = json.loads(read_sealed(found / f"{DIGESTS}-0"))["world"]
    for writer in range(rank, world, size):
        for name, digest in json.loads(read_sealed(found / f"{DIGESTS}-{writer}"))["files"].items():
            if not (found / name).exists():
                raise _damaged(found / name, "is missing")
            if digest_of(found / name) != digest:
                raise _damaged(found / name, "is not what was saved: its digest differs")
    return int(world)


def write_sealed(path: Path, text: str) -> None:
    """Replace a small file in one stroke by a text and its digest."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        file.write(f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}\n{text}")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_sealed(path: Path) -> str:
    """Return the text of a file that `write_sealed` wrote. Raises: CheckpointDamaged if it is not that."""
    if not path.exists():
        raise _damaged(path, "is missing")
    data = path.read_bytes()
    digest, _, text = data.partition(b"\n")
    if hashlib.blake2b(text, digest_size=16).hexdigest().encode() != digest:
        raise _damaged(path, "is not what was saved: its digest differs")
    return text.decode()


def _damaged(path: Path, what: str) -> CheckpointDamaged:
    others = sorted(p.name for p in path.parent.parent.glob("step-*") if p != path.parent)
    instead = f"; others in this folder are {', '.join(others)}" if others else ""
    return CheckpointDamaged(f"checkpoint: {path} {what}; nothing was loaded{instead}", file=path.name)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
