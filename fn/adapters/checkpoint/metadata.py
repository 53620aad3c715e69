"""The metadata of a checkpoint, which `torch.distributed.checkpoint` pickles, read without executing what it says.

torch's reader unpickles whatever is there, and what is marked as bytes again. This one makes the classes that metadata
consist of, refuses every other name, and takes tensors only, out of files whose digests were compared.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from fn.adapters.checkpoint.storage import METADATA, damaged
from fn.errors import expected

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
_PATHS = {"PosixPath", "WindowsPath"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return pathlib.PurePath  # where it was saved, which nobody asks for
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"names {module}.{name}, which metadata do not consist of")
        return _CLASSES[module, name]


class Reader(filesystem.FileSystemReader):
    """A reader of a checkpoint's tensors that executes nothing of it.

    Args: found: the checkpoint's folder. verified: the names of its files whose digests were compared.
    Raises: CheckpointDamaged if its metadata are not those of tensors in such files.
    """

    def __init__(self, found: Path, verified: Collection[str]):
        super().__init__(found)
        path = found / METADATA
        try:
            with path.open("rb") as file:
                read = _Unpickler(file).load()
            self.forms: Mapping[str, Form] = _forms(read, {name: (found / name).stat().st_size for name in verified})
        except Exception as error:  # whatever somebody wrote may raise anything, in pickle or in these classes
            raise damaged(path, f"is not the metadata of tensors: {type(error).__name__}: {error}") from error
        self._metadata: Metadata = read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that were read; torch calls this."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _forms(found: Any, files: Mapping[str, int]) -> dict[str, Form]:
    """Return the shape and dtype of every tensor.

    Args: found: what was unpickled. files: the sizes in bytes of the files whose digests were compared.
    Raises: if it is anything but whole tensors in such files.
    """
    forms, total = {}, 0
    for key, saved in found.state_dict_metadata.items():
        if type(saved) is not TensorStorageMetadata:
            raise TypeError(expected(f"{key!r}", "a tensor", type(saved).__name__))
        form = saved.size, saved.properties.dtype
        if (type(key), *map(type, form)) != (str, torch.Size, torch.dtype):
            raise TypeError(f"{key!r} has shape {form[0]!r} and dtype {form[1]!r}")
        total += torch.empty(form[0], dtype=form[1], device="meta").nbytes  # raises for sizes that no tensor has
        if not _is_covered(saved.size, saved.chunks):  # what no chunk covers would stay as it was allocated: zero
            raise ValueError(f"{key!r} has chunks that are not the rows of a tensor of shape {tuple(saved.size)}")
        forms[key] = form
    for place in found.storage_data.values():
        if place.relative_path not in files:
            raise ValueError(f"names {place.relative_path!r}, a file without a digest")
    if total > sum(files.values()):  # allocated before anything is read
        raise ValueError(f"describes tensors of {total} bytes, but its files have {sum(files.values())}")
    return forms


def _is_covered(size: torch.Size, chunks: Iterable[ChunkStorageMetadata]) -> bool:
    """Tell whether chunks are a whole tensor, or rows of it that follow each other: what `save` writes."""
    row = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        if chunk.offsets != (row, *[0] * (len(size) - 1))[: len(size)] or chunk.sizes[1:] != size[1:]:
            return False
        row += chunk.sizes[0] if size else 1
    return row == (size[0] if size else 1)
