"""A trainer that is killed at any moment leaves a log that is read and gone on with; what it forked does no harm."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from logs import HEADER
from ranks import LIMIT, server

from fn.adapters.follow.log_reader import LogReader
from fn.adapters.follow.log_writer import LogWriter

SIZE = 50_000


def heard(step, life):
    return [(("gather", 0), [step.to_bytes(4, "little") * SIZE, life.to_bytes(4, "little")])]


def train(folder, first, life, told):
    """Write steps until somebody kills this process; tell each one that was handed over."""
    log = LogWriter(folder, HEADER, first_step=first, steps_per_segment=5, buffer=1)  # one frame at a time
    for step in range(first, first + 1000):
        if step == first or step % 8 == 0:
            log.snapshot(step, {"life": torch.tensor([step, life])})
        log.frame(step, "compressed", {}, heard(step, life))
        told.send(step)


def check(reader, steps):
    lives = {step: life for life, counts in reader.steps().items() for step in counts}
    for step in steps:
        assert reader.frame(step).records == heard(step, lives[step])


def test_killed_at_random_moments_and_restarted(tmp_path):
    """A follower is never given a frame of a life that was not lived, and misses none that it can have."""
    moments, reader, at, first = random.Random(0), None, 0, 0
    for life in range(20):
        ours, theirs = server().Pipe(duplex=False)
        process = server().Process(target=train, args=(tmp_path, first, life, theirs), daemon=True)
        process.start()
        theirs.close()
        for _ in range(moments.randrange(1, 40)):
            assert ours.poll(LIMIT)
            told = ours.recv()
            reader = reader or LogReader(tmp_path)
            if moments.random() < 0.3:
                again = reader.refresh()
                at = at if again is None else min(at, again)
                check(reader, range(at, reader.last_step + 1))
                at = reader.last_step + 1
        process.kill()
        process.join()
        ours.close()
        again = reader.refresh()
        at = at if again is None else min(at, again)
        assert reader.incarnation == life
        # Of what was handed over, one frame may be on its way, and one may wait.
        assert reader.last_step >= told - 2
        check(reader, range(reader.last_step + 1))
        check(LogReader(tmp_path), range(reader.last_step + 1))
        for step in reader.snapshots():
            assert reader.snapshot(step)["life"].tolist() in [[step, life] for life in range(life + 1)]
        assert reader.snapshots()[0] == 0
        first = moments.randrange(max(reader.last_step - 9, 0), reader.last_step + 2)
    assert len(list(tmp_path.glob("*.log"))) > 40


def fork_and_be_killed(folder, stays, told):
    """Fork as workers that load data are forked, and wait for the end; the fork stays until `stays` is closed."""
    log = LogWriter(folder, HEADER)
    log.frame(0, "compressed", {}, heard(0, 0))
    while LogReader(folder).last_step < 0:
        pass
    child = os.fork()
    if child == 0:
        stays.poll(LIMIT)
        os._exit(0)
    told.send(child)
    signal.pause()


def test_a_process_that_a_killed_trainer_forked_does_not_keep_its_folder(tmp_path):
    ours, theirs = server().Pipe(duplex=False)
    stays, go = server().Pipe(duplex=False)
    process = server().Process(target=fork_and_be_killed, args=(tmp_path, stays, theirs), daemon=True)
    process.start()
    stays.close()
    theirs.close()
    assert ours.poll(LIMIT)
    grandchild = ours.recv()
    process.kill()
    process.join()
    os.kill(grandchild, 0)  # it is there
    log = LogWriter(tmp_path, HEADER, first_step=1)
    log.frame(1, "compressed", {}, heard(1, 1))
    log.close()
    check(LogReader(tmp_path), range(2))
    go.close()


@pytest.mark.parametrize("ending", ["", "; raise SystemExit(3)", "; os.fork() or exit(); os.wait()"])
def test_a_script_that_ends_without_closing_its_log_closes_it(tmp_path, ending):
    code = (
        "import os, sys; from fn.adapters.follow.log_writer import LogWriter; log = LogWriter(sys.argv[1], {}); "
        f"[log.frame(n, 'compressed', {{}}, [(('x',), [bytes(10**6)])]) for n in range(30)]{ending}"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (3 if "3" in ending else 0, "")
    reader = LogReader(tmp_path)
    assert reader.steps() == {0: range(30)}
    assert json.loads((tmp_path / "head.json").read_text())["head"]["open"] == 30
