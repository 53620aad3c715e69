"""Checkpoints on disk: whole ones only, the newest found by one small file that is replaced in one stroke.

    folder/latest                     the name of a checkpoint below, and a digest of it
    folder/step-000000001200-0/       what torch.distributed.checkpoint wrote, and a file of digests per rank
    folder/.writing-.../              a checkpoint that was never finished, or is being removed

A folder is one job's: two that save at once would clear away each other's unfinished files. A process that is killed at
any moment leaves the old checkpoint or the new one. A file that was cut short or changed is refused before anything is
read from it. Folders without digests of ours are never touched.

torch pickles the metadata of a checkpoint, and its own reader unpickles whatever is there, and what is marked as bytes
again. `Reader` makes only the classes that metadata consist of, refuses every other name, and takes tensors only, out
of files whose digests were compared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import pickle
import secrets
import shutil
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from fn.adapters.optim.state_dict import FORMAT, VERSION, check_format
from fn.errors import CheckpointDamaged, expected

LATEST = "latest"
DIGESTS = "digests"
METADATA = ".metadata"
FIRST = f"{DIGESTS}-0"
"""Written before anything else and removed after everything else: whatever folder holds it is ours."""


class Digests(NamedTuple):
    """The digests of the files that a rank wrote.

    world: how many ranks wrote. sequence: of this checkpoint among those of the folder, as they were saved. files:
    name -> digest. format: of what is in them; None in those of fn 0.3 and before.
    """

    world: int
    sequence: int
    files: dict[str, str]
    format: int | None = VERSION


class Names(NamedTuple):
    """The folder that a checkpoint is written into, the one that this becomes, and its place in the order of saving."""

    writing: str
    done: str
    sequence: int


def digest_of(path: Path) -> str:
    """Return the blake2b digest of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def begin(folder: Path, steps: int, world: int) -> Names:
    """Make a folder to write into, and return its names; clear away what was left unfinished.

    Raises: FileExistsError if the folder is another program's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = _ours(folder, "step-*")
    sequence = 1 + max(ours.values(), default=0)
    if os.path.lexists(folder / LATEST) and not ours and _unsealed(folder / LATEST) is None:
        text = f"folder: {folder} has a file {LATEST!r} of another program; give checkpoints a folder of their own"
        raise FileExistsError(text)
    for unfinished in _ours(folder, ".writing-*"):
        _remove(unfinished)
    candidates = (f"step-{steps:012d}-{number}" for number in itertools.count())
    done = next(name for name in candidates if not os.path.lexists(folder / name))
    writing = folder / f".writing-{done}-{secrets.token_hex(4)}"
    writing.mkdir()
    try:
        _write(writing, 0, Digests(world, sequence, {}))
    except OSError:
        shutil.rmtree(writing, ignore_errors=True)  # nobody would know whose it is
        raise
    return Names(writing.name, done, sequence)


def check_seen(folder: Path, names: Names, rank: int) -> None:
    """Raise an OSError where a rank does not see the folder that the first rank has made."""
    if not (folder / names.writing / FIRST).is_file():
        raise OSError(
            f"folder: {folder} on rank {rank} of {socket.gethostname()} is not the folder of rank 0, which made "
            f"{names.writing} there; give all ranks one folder, on a file system that all their machines see; nothing "
            f"was saved"
        )


def seal(folder: Path, names: Names, rank: int, world: int) -> None:
    """Write the digests of the files that this rank wrote; the first rank also those of files that name no rank."""
    writing = folder / names.writing
    there = sorted(p.name for p in writing.iterdir() if DIGESTS not in p.name)
    mine = [n for n in there if n.startswith(f"__{rank}_") or (rank == 0 and not n.startswith("__"))]
    _write(writing, rank, Digests(world, names.sequence, {name: digest_of(writing / name) for name in mine}))


def finish(folder: Path, names: Names, keep: int) -> None:
    """Make a written checkpoint the newest one, in one stroke, and remove all but those that were saved last."""
    writing, done = folder / names.writing, folder / names.done
    # The order is what a machine that loses power leaves: names of files are on disk before the folder has its last
    # name, and that is on disk before `latest` says it. Else `latest` could name a folder that is not there.
    _sync(writing)
    writing.rename(done)
    _sync(folder)
    write_sealed(folder / LATEST, done.name)
    _sync(folder)
    # By the order of saving, not by steps: a run that goes on from an older checkpoint has fewer steps than those that
    # it abandons, which else would stay in place of its own.
    ours = _ours(folder, "step-*")
    for old in sorted(ours, key=lambda path: (ours[path], path.name))[:-keep]:
        leaving = folder / f".writing-{old.name}-{secrets.token_hex(4)}"
        old.rename(leaving)  # so that nobody finds half of it
        _remove(leaving)


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a folder.

    Raises: FileNotFoundError if there is none; CheckpointDamaged if the file that names it was changed.
    """
    pointer = folder / LATEST
    if not os.path.lexists(pointer):
        raise FileNotFoundError(f"folder: {folder} holds no finished checkpoint")
    name = read_sealed(pointer)
    if not is_name(name):
        raise damaged(pointer, f"names {name!r}, which is no checkpoint in this folder")
    return folder / name


def is_name(name: str) -> bool:
    """Return whether a name is that of something in a folder, and not a path to something else."""
    return name not in ("", "..") and Path(name).name == name


def verify(checkpoint: Path, rank: int, size: int) -> tuple[int, set[str]]:
    """Compare the files of a checkpoint with their digests, one of `size` parts of them.

    Returns: how many ranks saved it, and the names of the files in this part.
    Raises: CheckpointDamaged that names the first file that is missing or not what was saved; ValueError for the format
        of another version.
    """
    # The first rank's list is the one that says how many lists there are.
    first, names = read_digests(checkpoint / FIRST), set[str]()
    check_format({FORMAT: first.format}, "checkpoint")
    if METADATA not in first.files:
        raise damaged(checkpoint / FIRST, f"has no digest of {METADATA}")
    for writer in range(rank, first.world, size):
        path = checkpoint / f"{DIGESTS}-{writer}"
        digests = read_digests(path)
        if digests[:2] != first[:2]:
            raise damaged(path, f"is not of the checkpoint that {FIRST} is of")
        for name, digest in digests.files.items():
            _check_is_file(checkpoint / name)
            if digest_of(checkpoint / name) != digest:
                raise damaged(checkpoint / name, "is not what was saved: its digest differs")
            names.add(name)
    return first.world, names


def write_sealed(path: Path, text: str) -> None:
    """Replace a small file in one stroke by a text and its digest."""
    new = path.with_name(f".{path.name}.new")  # a process that is killed while it writes leaves the old file whole
    with new.open("w") as file:
        file.write(f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}\n{text}")
        file.flush()
        # On disk before the name is: else a machine that loses power may leave the new name with an empty file.
        os.fsync(file.fileno())
    new.replace(path)


def read_sealed(path: Path) -> str:
    """Return the text of a file that `write_sealed` wrote. Raises: CheckpointDamaged if it is not that."""
    _check_is_file(path)
    text = _unsealed(path)
    if text is None:
        raise damaged(path, "is not what was saved: its digest differs")
    return text


def read_digests(path: Path) -> Digests:
    """Return the digests of a rank's files. Raises: CheckpointDamaged if that is not what `seal` writes."""
    digests = _digests(read_sealed(path))
    if digests is None:
        raise damaged(path, "has the digest that it should, but is no list of digests")
    return digests


def _digests(text: str) -> Digests | None:
    """Return the digests in a text; None if it has none."""
    try:
        fields = json.loads(text)
        digests = Digests(fields["world"], fields.get("sequence", 0), fields["files"], fields.get("format"))
        numbers = type(digests.world) is int and digests.world > 0 and type(digests.sequence) is int
        files = all(is_name(name) and isinstance(digest, str) for name, digest in digests.files.items())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # what JSON else may hold
        return None
    return digests if numbers and files else None


def _write(writing: Path, rank: int, digests: Digests) -> None:
    write_sealed(writing / f"{DIGESTS}-{rank}", json.dumps(digests._asdict()))


def _unsealed(path: Path) -> str | None:
    """Return the text of a file that `write_sealed` wrote; None if it is not that."""
    if not path.is_file():  # a pipe would be waited for
        return None
    digest, _, text = path.read_bytes().partition(b"\n")
    same = hashlib.blake2b(text, digest_size=16).hexdigest().encode() == digest
    return text.decode(errors="replace") if same else None


def _ours(folder: Path, pattern: str) -> dict[Path, int]:
    """Return the checkpoints in a folder that carry digests of this format, and their places in the order of saving."""
    sequences = {}
    for path in folder.glob(pattern):
        digests = _digests(_unsealed(path / FIRST) or "") if path.is_dir() and not path.is_symlink() else None
        if digests is not None and digests.format == VERSION:
            sequences[path] = digests.sequence
    return sequences


def _remove(ours: Path) -> None:
    """Remove a checkpoint. Its first digests go last, so that the next save still knows the rest of it for ours."""
    for path in ours.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != FIRST:
            path.unlink()
    shutil.rmtree(ours)


def _check_is_file(path: Path) -> None:
    if not path.is_file():  # a pipe would be waited for
        raise damaged(path, "is no regular file" if os.path.lexists(path) else "is missing")


def damaged(path: Path, what: str) -> CheckpointDamaged:
    """Return the error for a file of a checkpoint; it names the other checkpoints in the folder."""
    checkpoint = path if path.name == LATEST else path.parent
    others = sorted(p.name for p in _ours(checkpoint.parent, "step-*") if p != checkpoint)
    instead = f"; others in this folder are {', '.join(others)}" if others else ""
    return CheckpointDamaged(f"checkpoint: {path} {what}; nothing was loaded{instead}", file=path.name)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Form = tuple[torch.Size, torch.dtype]

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, k): v
        for k, v in vars(metadata).items()
        if getattr(v, "__module__", "") == metadata.__name__
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{("torch", k): v for k, v in vars(torch).items() if isinstance(v, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return pathlib.PurePath  # where it was saved, which nobody asks for
        # By name and before it is imported: to import a module runs it.
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"names {module}.{name}, which metadata do not consist of")
        return _CLASSES[module, name]


class Reader(filesystem.FileSystemReader):
    """A reader of a checkpoint's tensors that executes nothing of it. forms: the shape and dtype of each.

    Args: checkpoint: its folder. verified: the names of its files whose digests were compared.
    Raises: CheckpointDamaged if its metadata are not those of tensors in such files.
    """

    def __init__(self, checkpoint: Path, verified: Collection[str]):
        super().__init__(checkpoint)
        path = checkpoint / METADATA
        try:
            with path.open("rb") as file:
                self._metadata: Metadata = _Unpickler(file).load()
            self.forms = dict[str, Form]()
            for key, saved in self._metadata.state_dict_metadata.items():
                if type(saved) is not TensorStorageMetadata or type(saved.size) is not torch.Size:
                    raise TypeError(expected(f"{key!r}", "a tensor", type(saved).__name__))
                # What is no dtype, or one of which there are no zeros to read into, is refused here, by its key.
                if type(dtype := saved.properties.dtype) is not torch.dtype:
                    raise TypeError(expected(f"{key!r}", "a dtype", f"{dtype!r}"))
                torch.zeros(0, dtype=dtype, device="cpu")
                torch.empty(saved.size, dtype=dtype, device="meta")
                self.forms[key] = saved.size, dtype
            for entry in self._metadata.storage_data.values():
                if entry.relative_path not in verified:
                    raise ValueError(f"names {entry.relative_path!r}, a file without a digest")
        except Exception as error:  # whatever somebody wrote may raise anything, in pickle or in these classes
            raise damaged(path, f"is not the metadata of tensors: {type(error).__name__}: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that were read; torch calls this."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata
