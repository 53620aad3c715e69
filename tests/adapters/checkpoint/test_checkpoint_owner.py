"""Jobs that save into one folder: one at a time, the other is refused by name, and whoever is gone is no obstacle."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks
from test_save_load import alone, train
from test_transactions import bits, build, same

import fn
from fn.adapters import checkpoint
from fn.adapters.checkpoint import storage as files
from fn.adapters.checkpoint.owner import Claim
from fn.collectives.transports import failure_detection as peers


def saving(folder: str, signals: str, then: str = "") -> list[Any]:
    """Save, and stop in the middle until there is a file `go`; return what was saved."""
    there, seal = Path(signals), files.seal

    def stopping(*args: Any, **more: Any) -> None:
        (there / "here").write_text(str(os.getpid()))
        while not (there / "go").exists():
            time.sleep(0.01)
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        seal(*args, **more)

    files.seal = stopping
    os.environ["SLURM_JOB_ID"] = "4711"
    params, opt = alone(2)
    checkpoint.save(folder, opt, keep=1)
    return bits((params, opt.states))


def until(path: Path) -> str:
    for _ in range(12000):  # two minutes
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not come")


def test_a_second_job_is_refused_by_name_and_the_first_ones_checkpoint_is_whole(tmp_path):
    folder = tmp_path / "run"
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(ranks.run, 1, saving, str(folder), str(tmp_path))
        try:
            process = until(tmp_path / "here")
            params, opt = alone(0)
            name = f"job SLURM_JOB_ID=4711, process {process} on {socket.gethostname()} is saving into it"
            with pytest.raises(OSError, match=f"^checkpoint: {folder} .*{name}; .*a folder"):
                checkpoint.save(folder, opt, keep=1)
            with pytest.raises(OSError, match=name):
                checkpoint.save_async(folder, opt, keep=1).result(60)
        finally:
            (tmp_path / "go").touch()
        (saved,) = first.result()
    checkpoint.load(folder, opt)
    assert same(bits((params, opt.states)), saved)
    train(params, opt, 1)
    last = checkpoint.save(folder, opt, keep=1)  # the other one has ended
    assert sorted(os.listdir(folder)) == ["latest", last.name]


def test_a_job_that_was_killed_in_a_save_is_no_obstacle(tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "go").touch()
    (found,) = ranks.outcomes(1, saving, str(folder), str(tmp_path), "die")
    assert found == ranks.Died(-signal.SIGKILL)
    assert (folder / ".owner").exists()
    _, opt = alone(0)
    last = checkpoint.save(folder, opt)
    assert sorted(os.listdir(folder)) == ["latest", last.name]


def owner(folder: Path, **changed: Any) -> Path:
    """Write the file of an owner: this process, but for what is changed."""
    (folder / ".owner").unlink(missing_ok=True)
    with Claim(folder) as claim:
        claim.take()
        text = (folder / ".owner").read_text()
    (folder / ".owner").write_text(json.dumps({**json.loads(text), **changed}))
    return folder / ".owner"


def test_a_process_of_the_same_number_that_was_started_later_is_another_one(tmp_path):
    _, opt = alone(0)
    owner(tmp_path)
    with pytest.raises(OSError, match=f"process {os.getpid()} on"):
        checkpoint.save(tmp_path, opt)
    owner(tmp_path, started="1")
    checkpoint.save(tmp_path, opt)
    assert not (tmp_path / ".owner").exists()


@pytest.mark.parametrize("text", ["of another machine", "", "[]", "{cut"])
def test_an_owner_of_whom_nothing_is_known_is_believed_as_long_as_it_touches_its_file(text, tmp_path, monkeypatch):
    monkeypatch.setattr("fn.adapters.checkpoint.owner.PATIENCE", 3.0)
    _, opt = alone(0)
    path = owner(tmp_path, where="elsewhere", host="node7", pid=3)
    if text != "of another machine":
        path.write_text(text)
    over = threading.Event()

    def touching() -> None:
        while not over.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=touching)
    thread.start()
    try:
        with pytest.raises(OSError, match="process 3 on node7 is" if "machine" in text else "another process is"):
            checkpoint.save(tmp_path, opt)
    finally:
        over.set()
        thread.join()
    monkeypatch.setattr("fn.adapters.checkpoint.owner.PATIENCE", 0.3)
    last = checkpoint.save(tmp_path, opt)
    assert sorted(os.listdir(tmp_path)) == ["latest", last.name]


def test_an_owner_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fn.adapters.checkpoint.owner.BEAT", 0.01)
    with Claim(tmp_path) as claim:
        claim.take()
        os.utime(tmp_path / ".owner", (0, 0))
        for _ in range(6000):
            if (tmp_path / ".owner").stat().st_mtime > 0:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("it was not touched")
        claim.check()


def test_an_owner_that_lost_its_place_does_not_finish_and_leaves_the_new_ones_file(tmp_path, monkeypatch):
    params, opt = alone(0)
    checkpoint.save(tmp_path, opt)
    train(params, opt, 1)
    seal = files.seal

    def taken_over(*args: Any, **more: Any) -> None:
        seal(*args, **more)
        owner_file = tmp_path / ".owner"
        owner_file.write_text(json.dumps({**json.loads(owner_file.read_text()), "pid": 3, "token": "another"}))

    monkeypatch.setattr(files, "seal", taken_over)
    with pytest.raises(OSError, match=f"checkpoint: {tmp_path} was taken over by process 3 on"):
        checkpoint.save(tmp_path, opt)
    assert (tmp_path / ".owner").exists()
    assert files.newest(tmp_path).name == "step-000000000000-0"


def test_a_save_that_fails_owns_the_folder_no_longer(tmp_path, monkeypatch):
    _, opt = alone(0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "seal", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoint.save(tmp_path, opt)
    assert not (tmp_path / ".owner").exists()
    checkpoint.save(tmp_path, opt)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_an_owner_that_is_no_file_is_refused_and_not_waited_for(make, tmp_path):
    make(tmp_path / ".owner")
    with pytest.raises(OSError, match=r"\.owner is no regular file; remove it"):
        checkpoint.save(tmp_path, alone(0)[1])
    assert [p.name for p in tmp_path.iterdir()] == [".owner"]


def test_a_save_waits_for_what_save_async_still_writes(tmp_path, monkeypatch):
    params, opt = alone(1)
    seal, begun = files.seal, threading.Event()

    def slow(*args: Any, **more: Any) -> None:
        begun.set()
        time.sleep(0.5)
        seal(*args, **more)

    monkeypatch.setattr(files, "seal", slow)
    future = checkpoint.save_async(tmp_path, opt)
    begun.wait(60)
    train(params, opt, 1)
    last = checkpoint.save(tmp_path, opt)
    assert future.done()
    assert future.result().name == "step-000000000001-0"
    assert files.newest(tmp_path) == last


def refused(folder: str) -> tuple[str, str]:
    _, opt = build("onebit_adam", 1, fn.freeze_after(2))
    try:
        checkpoint.save(folder, opt)
    except OSError as error:
        return str(error), peers.this_machine()
    return "saved", ""


def test_what_another_job_owns_all_ranks_refuse_together(tmp_path):
    owner(tmp_path)  # which this process is, and runs
    found = ranks.run(2, refused, str(tmp_path))
    assert found[0] == found[1]
    assert f"process {os.getpid()} on {socket.gethostname()} is saving into it" in found[0][0]
    assert [p.name for p in tmp_path.iterdir()] == [".owner"]
