"""A delayed mean on its way, when its process ends, forks, or drops its optimizer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

import fn

ENDING = Path(__file__).parents[2] / "scripts" / "ending.py"

EXIT_CODES = {
    "end of the script": (0, 0),
    "sys.exit": (3, 3),
    "exception": (1, 1),
    "exception on rank 1": (0, 1),
    "destroy_process_group": (0, 0),
}
"""Way of ending -> the exit codes of a script without `fn`."""


@pytest.mark.reliability
@pytest.mark.parametrize("way", EXIT_CODES)
def test_a_process_that_ends_while_a_mean_travels_has_the_exit_code_of_its_script(way, tmp_path):
    start = partial(subprocess.Popen, stderr=subprocess.PIPE, text=True)
    processes = [start([sys.executable, ENDING, way, str(rank), tmp_path / "store"]) for rank in range(2)]
    try:
        said = [process.communicate(timeout=ranks.LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert tuple(process.returncode for process in processes) == EXIT_CODES[way], "\n".join(said)


def sending(elements: int = 100) -> fn.Optimizer:
    """Return an optimizer whose mean is on its way."""
    p = torch.nn.Parameter(torch.ones(elements))
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([p], partial(fn.diloco, axis="data"), schedule=fn.every(4, delay=3), lr=0.01)
    for _ in range(5):  # the first is the warm-up, the last begins the mean
        p.grad = torch.full_like(p, 1.0 + dist.get_rank())
        opt.step()
    return opt


def dropped() -> list[tuple[int, int, int]]:
    """Return the numbers of process groups, descriptors and threads after 2 optimizers and after 6."""
    found = []
    for count in range(6):
        opt = sending()
        if dist.get_rank() or count % 2:  # collected before its mean has come, at other times on the other rank
            opt.state_dict()
        del opt
        gc.collect()
        if count in (1, 5):
            sending().state_dict()  # the thread is done with all that came before
            found.append((len(_world.pg_map), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_optimizers_with_a_delay_that_are_made_and_dropped_leave_nothing():
    for early, late in ranks.run(2, dropped):
        assert late == early


def of_both() -> list[bool]:
    """Two optimizers whose means travel at a time; return whether each has the mean that it has alone."""
    wanted = [sending(elements).state_dict() for elements in (100, 300)]
    first, second = sending(100), sending(300)
    pairs: list[tuple[Any, Any]] = list(zip((second.state_dict(), first.state_dict()), reversed(wanted), strict=True))
    return [all(torch.equal(found[path], leaf) for path, leaf in alone.items()) for found, alone in pairs]


def test_means_of_two_optimizers_travel_one_after_the_other():
    assert ranks.run(2, of_both) == [[True, True]] * 2


def forked() -> tuple[str, bool]:
    """Return what a forked child is told, and whether its parent still has the mean."""
    opt, wanted = sending(), sending().state_dict()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            opt.state_dict()
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    text = text.replace(str(child), "CHILD").replace(str(os.getpid()), "PARENT")
    return text, all(torch.equal(opt.state_dict()[path], leaf) for path, leaf in wanted.items())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_a_mean_travels_in_its_parent():
    text = (
        "states: expected to be read in the process that sends the mean on its way, but got a child of it; "
        "call opt.state_dict() before the fork"
    )
    assert ranks.run(2, forked) == [(text, True)] * 2
