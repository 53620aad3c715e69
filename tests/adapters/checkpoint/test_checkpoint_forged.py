"""Checkpoints that somebody else has made: sealed as they should be, and refused all the same."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_save_load import alone, train
from test_transactions import bits, same
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, metadata, state_dict_saver

from fn.adapters import checkpoint
from fn.adapters.checkpoint import storage as files
from fn.errors import CheckpointDamaged


@pytest.fixture
def saved(tmp_path):
    """Return a folder, its one checkpoint, and an optimizer that has gone on."""
    folder = tmp_path / "run"
    params, opt = alone(1)
    found = checkpoint.save(folder, opt, {"m": torch.ones(2)})
    train(params, opt, 1)
    return folder, found, opt


def refused(folder: Path, opt: Any, text: str, file: str) -> None:
    """Load what must be refused; nothing may be loaded."""
    before = bits((opt.states, [group["params"] for group in opt.param_groups]))
    with pytest.raises(CheckpointDamaged, match=text) as caught:
        checkpoint.load(folder, opt, {"m": torch.ones(2)})
    assert caught.value.file == file
    assert same(bits((opt.states, [group["params"] for group in opt.param_groups])), before)


@pytest.mark.parametrize("name", ["../other/step-000000000001-0", "", "..", "/"])
def test_a_latest_that_points_out_of_the_folder_is_refused(name, saved, tmp_path):
    folder, _, opt = saved
    if name.startswith("../other"):
        checkpoint.save(tmp_path / "other", alone(1)[1], {"m": torch.ones(2)})
    files.write_sealed(folder / "latest", name)
    refused(folder, opt, f"latest names {name!r}, which is no checkpoint in this folder", "latest")
    with pytest.raises(ValueError, match=rf"name: expected the name of a checkpoint in .*, but got {name!r}"):
        checkpoint.load(folder, opt, {"m": torch.ones(2)}, name=name)


def digests(found: Path, change: Any) -> None:
    """Write down other digests, sealed as ours are."""
    path = found / "digests-0"
    listed = json.loads(files.read_sealed(path))
    files.write_sealed(path, json.dumps(change(listed)))


def with_file(name: str) -> Any:
    return lambda listed: {**listed, "files": {**listed["files"], name: "0" * 32}}


def with_world(world: Any, listed: Any) -> Any:
    return {**listed, "world": world}


@pytest.mark.parametrize("file", ["digests-0", "latest"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(file, saved):
    folder, found, opt = saved
    path = (folder if file == "latest" else found) / file
    path.unlink()
    os.mkfifo(path)
    refused(folder, opt, f"{file} is no regular file", file)


@pytest.mark.parametrize(
    "change",
    [
        lambda listed: {"files": listed["files"]},
        lambda listed: {"world": 1},
        lambda listed: [],
        lambda listed: None,
        lambda listed: {**listed, "files": ["a"]},
        lambda listed: {**listed, "files": {".metadata": 3}},
        lambda listed: {**listed, "sequence": "last"},
        *(partial(with_world, w) for w in (-1, 0, "1", 1.0, True, None)),
        with_file("../../etc/passwd"),
    ],
)
def test_digests_that_are_sealed_but_malformed_are_refused(change, saved):
    folder, found, opt = saved
    digests(found, change)
    refused(folder, opt, "digests-0 has the digest that it should, but is no list of digests", "digests-0")


def test_digests_without_the_metadata_and_parts_of_another_checkpoint_are_refused(saved):
    folder, found, opt = saved
    digests(found, lambda listed: {**listed, "files": {}})
    refused(folder, opt, r"digests-0 has no digest of \.metadata", "digests-0")
    folder, found, opt = saved
    digests(found, lambda listed: {**listed, "world": 2, "files": {".metadata": files.digest_of(found / ".metadata")}})
    text = files.read_sealed(found / "digests-0")
    files.write_sealed(found / "digests-1", json.dumps({**json.loads(text), "world": 3}))
    refused(folder, opt, "digests-1 is not of the checkpoint that digests-0 is of", "digests-1")


class Executes:
    """What unpickling runs."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def forge(found: Path, change: Any) -> None:
    """Change the metadata of a checkpoint, and seal them."""
    path = found / ".metadata"
    read = FileSystemReader(found).read_metadata()
    change(read)
    path.write_bytes(pickle.dumps(read))
    digests(found, lambda listed: {**listed, "files": {**listed["files"], ".metadata": files.digest_of(path)}})


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "state_dict_metadata"])
def test_metadata_that_execute_something_are_refused_and_do_not(where, saved, tmp_path):
    folder, found, opt = saved
    forge(found, lambda read: setattr(read, where, {"a": Executes(tmp_path / "executed")}))
    refused(folder, opt, "is not the metadata of tensors: UnpicklingError: names posix.mkdir", ".metadata")
    assert not (tmp_path / "executed").exists()


def test_a_leaf_of_bytes_which_torch_would_unpickle_is_refused_and_not_executed(saved, tmp_path):
    folder, found, opt = saved
    forged = folder / "forged"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process is alone
        state_dict_saver.save({"extra.m": Executes(tmp_path / "executed")}, storage_writer=FileSystemWriter(forged))
    (forged / "__0_0.distcp").rename(found / "bytes")
    theirs = FileSystemReader(forged).read_metadata()

    def change(read: Any) -> None:
        read.state_dict_metadata["extra.m"] = metadata.BytesStorageMetadata()
        (place,) = theirs.storage_data.values()
        place.relative_path = "bytes"
        read.storage_data = {**read.storage_data, metadata.MetadataIndex("extra.m"): place}

    forge(found, change)
    name = files.digest_of(found / "bytes")
    digests(found, lambda listed: {**listed, "files": {**listed["files"], "bytes": name}})
    refused(folder, opt, "'extra.m': expected a tensor, but got BytesStorageMetadata", ".metadata")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("dtype", ["float32", None, 3, torch.qint8, torch.float32])
def test_what_is_no_dtype_of_tensors_is_refused_where_it_is_read(dtype, saved):
    folder, found, opt = saved

    def change(read: Any) -> None:
        of_leaf = read.state_dict_metadata["extra.m"]
        if dtype is torch.float32:  # a real one, of a tensor that cannot be
            of_leaf.size = torch.Size((-2,))
        else:
            object.__setattr__(of_leaf.properties, "dtype", dtype)

    forge(found, change)
    refused(folder, opt, "is not the metadata of tensors", ".metadata")


def test_metadata_that_name_a_file_without_a_digest_are_refused(saved):
    folder, found, opt = saved

    def change(read: Any) -> None:
        for place in read.storage_data.values():
            place.relative_path = "../elsewhere"

    forge(found, change)
    refused(folder, opt, r"names '\.\./elsewhere', a file without a digest", ".metadata")
