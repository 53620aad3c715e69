"""Folders of checkpoints: what is not ours is not touched, and what was saved last is what stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_save_load import alone, train
from test_transactions import bits, same

from fn.adapters import checkpoint
from fn.adapters.checkpoint import storage as files


def foreign(folder: Path) -> Path:
    """Make a folder as another trainer does; return it."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("hours of work")
    return folder


def steps_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step-*"))


@pytest.mark.parametrize("name", ["step-0", "step-000000000000-0", "step-best", ".writing-notes", ".writing-step-1"])
def test_a_folder_of_another_program_is_neither_removed_nor_counted(name, tmp_path):
    theirs = foreign(tmp_path / name)
    params, opt = alone(0)
    saved = []
    for _ in range(3):
        saved.append(checkpoint.save(tmp_path, opt, keep=2))
        train(params, opt, 1)
    assert (theirs / "model.safetensors").read_text() == "hours of work"
    assert sorted({*steps_in(tmp_path), name}) == sorted({name, *(p.name for p in saved[1:])})


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
@pytest.mark.parametrize("name", ["step-000000000000-0", "step-latest", ".writing-x"])
def test_a_stray_symlink_or_file_disturbs_no_save_and_stays(name, target, tmp_path):
    elsewhere = foreign(tmp_path / "elsewhere")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / target)
    (folder / "step-notes").write_text("a file")
    params, opt = alone(0)
    for _ in range(3):
        last = checkpoint.save(folder, opt, keep=1)
        train(params, opt, 1)
    assert (folder / name).is_symlink()
    assert (folder / "step-notes").read_text() == "a file"
    assert (elsewhere / "model.safetensors").exists()
    assert [n for n in steps_in(folder) if n not in (name, "step-notes")] == [last.name]
    checkpoint.load(folder, opt)
    assert opt.steps == 2


def test_a_symlink_to_a_checkpoint_of_ours_elsewhere_is_not_followed_when_old_ones_go(tmp_path):
    params, opt = alone(0)
    other = checkpoint.save(tmp_path / "other", opt)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000000000000-0").symlink_to(other)
    for _ in range(3):
        train(params, opt, 1)
        checkpoint.save(tmp_path / "run", opt, keep=1)
    assert steps_in(tmp_path / "run") == ["step-000000000000-0", "step-000000000003-0"]
    checkpoint.load(tmp_path / "other", opt)


def test_a_latest_of_another_program_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "latest").write_text("global_step100")
    _, opt = alone(0)
    with pytest.raises(FileExistsError, match=r"folder: .* has a file 'latest' of another program; give checkpoints"):
        checkpoint.save(tmp_path, opt)
    assert (tmp_path / "latest").read_text() == "global_step100"
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_a_latest_of_ours_that_was_damaged_is_replaced(tmp_path):
    params, opt = alone(0)
    checkpoint.save(tmp_path, opt)
    (tmp_path / "latest").write_text("")
    train(params, opt, 1)
    checkpoint.save(tmp_path, opt)
    assert files.newest(tmp_path).name == "step-000000000001-0"


def test_after_a_return_to_an_older_step_the_new_checkpoints_stay_and_the_abandoned_ones_go(tmp_path):
    params, opt = alone(0)
    for _ in range(4):
        train(params, opt, 1)
        checkpoint.save(tmp_path, opt, keep=4)
    checkpoint.load(tmp_path, opt, name="step-000000000001-0")
    train(params, opt, 1)
    again = checkpoint.save(tmp_path, opt, keep=2)
    assert steps_in(tmp_path) == [again.name, "step-000000000004-0"]
    assert again.name == "step-000000000002-1"
    train(params, opt, 1)
    checkpoint.save(tmp_path, opt, keep=2)
    assert steps_in(tmp_path) == [again.name, "step-000000000003-0"]
    before = bits((params, opt.states))
    train(params, opt, 1)
    checkpoint.load(tmp_path, opt)
    assert same(bits((params, opt.states)), before)


@pytest.mark.parametrize(("owner", "broken", "newest"), [(files, "seal", 0), (files.shutil, "rmtree", 1)])
def test_what_a_save_or_a_removal_left_unfinished_goes_with_the_next_save(owner, broken, newest, tmp_path, monkeypatch):
    def fails(*args: object) -> None:
        raise OSError("no more")

    params, opt = alone(0)
    checkpoint.save(tmp_path, opt, keep=1)
    train(params, opt, 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, fails)
        with pytest.raises(OSError, match="no more"):
            checkpoint.save(tmp_path, opt, keep=1)
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".writing-")]
    assert files.newest(tmp_path).name == f"step-{newest:012d}-0"
    train(params, opt, 1)
    last = checkpoint.save(tmp_path, opt, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", last.name]


def test_a_checkpoint_of_an_older_version_is_refused_with_what_to_do_and_stays_where_it_is(tmp_path):
    params, opt = alone(1)
    old = checkpoint.save(tmp_path, opt)
    digests = old / "digests-0"
    listed = json.loads(files.read_sealed(digests))
    files.write_sealed(digests, json.dumps({name: x for name, x in listed.items() if name != "format"}))
    text = "checkpoint: expected the format 5, but got none, as fn 0.3 and before saved it; go on with the version that"
    with pytest.raises(ValueError, match=text):
        checkpoint.load(tmp_path, opt)
    for _ in range(2):
        train(params, opt, 1)
        checkpoint.save(tmp_path, opt, keep=1)
    assert steps_in(tmp_path) == [old.name, "step-000000000003-0"]
