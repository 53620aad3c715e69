"""Real ranks: W processes in a gloo group, each running a function of this test suite.

    run(2, f, x)       -> [f(x) on rank 0, f(x) on rank 1]; f is a module-level function and calls `bound()`
    outcomes(2, f, x)  -> the same, but with `Raised` and `Died` for ranks that did not return
    case = Cases(2)    -> a decorator for functions that run in the same two processes, once; case.answer("name")

Processes are forked from a server that has done what all of them begin with (`warm`). They meet through a file, on
the loopback interface, so no port is chosen and nothing leaves the machine.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

LIMIT = 300.0
"""Seconds after which a test counts as hanging: ten times what the slowest one needs on two quiet cores."""

PATIENCE = 30.0
"""Seconds that `run` waits for the other ranks once one has raised: they may wait for it until the group's timeout."""

GROUP_TIMEOUT = 2 * LIMIT
"""Seconds after which a collective that a peer never joins fails: a test in which a rank waits for that hangs."""


class Raised(NamedTuple):
    """A rank raised. kind: the exception's class name; text: its message; trace: where."""

    kind: str
    text: str
    trace: str


class Died(NamedTuple):
    """A rank ended without an answer. code: its exit code, negative for a signal; None if it hung."""

    code: int | None


def run(world: int, f: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
    """Return f(*args) of every rank; an exception on any rank fails the test with that rank's trace."""
    found = outcomes(world, f, *args, timeout=timeout, patience=PATIENCE)
    for rank, outcome in enumerate(found):
        if isinstance(outcome, Raised):
            raise AssertionError(f"rank {rank} raised:\n{outcome.trace}")
        if isinstance(outcome, Died):
            raise AssertionError(f"rank {rank} of {world} gave no answer: exit code {outcome.code}")
    return found


class Cases:
    """Functions of a test module that share their processes: starting those takes longer than most of them."""

    def __init__(self, world: int):
        self._world = world
        self._functions: dict[str, Callable[[], Any]] = {}
        self._found: list[dict[str, Any]] | None = None
        self._failed: AssertionError | None = None

    def __call__(self, f: Callable[[], Any]) -> Callable[[], Any]:
        """Add a function, under its name."""
        self._functions[f.__name__] = f
        return f

    def answer(self, name: str) -> list[Any]:
        """Return what a function returned on each rank."""
        if self._failed is not None:
            raise self._failed  # a hang costs its limit once, not in every test that asks
        if self._found is None:
            try:
                self._found = run(self._world, _answer_all, self._functions)
            except AssertionError as error:
                self._failed = error
                raise
        return [answers[name] for answers in self._found]


def _answer_all(functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: f() for name, f in functions.items()}


def outcomes(
    world: int,
    f: Callable[..., Any],
    *args: Any,
    timeout: float = LIMIT,
    group_timeout: float = GROUP_TIMEOUT,
    enough: int | None = None,
    patience: float = LIMIT,
) -> list[Any]:
    """Return what became of every rank: a value, `Raised`, or `Died`; of `enough` of them, if the rest hangs.

    Args: patience: seconds that the others are waited for once a rank has raised.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            job = pickle.dumps((f, args))
            arguments = (rank, world, f"{folder}/store", job, theirs, group_timeout, timeout)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        return _collect(ends, processes, time.monotonic() + timeout, enough or world, patience)


@functools.cache
def server() -> Any:
    """Return the context whose processes are forked from the server, which is started if this is the first time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    folders = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, folders))):  # it is not told our sys.path
        forkserver.ensure_running()
    return context


def _collect(ends: list[Any], processes: list[Any], until: float, enough: int, patience: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < enough:
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = wait(waiting, max(0.0, until - time.monotonic()))
        if not ready:
            break
        for end in ready:
            rank = ends.index(end)
            try:
                found[rank] = pickle.loads(end.recv_bytes())
                if isinstance(found[rank], Raised):
                    until = min(until, time.monotonic() + patience)
            except EOFError:
                processes[rank].join(10)
                found[rank] = Died(processes[rank].exitcode)
    outcomes = [found.get(rank, Died(None)) for rank in range(len(ends))]
    for process in processes:
        process.join(0.1 if any(isinstance(x, Died) for x in outcomes) else 10)
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes


def stay(count: int | None = None) -> None:
    """On a rank: return when so many ranks are here, by default all but one."""
    store, here = dist.group.WORLD.get_group_store(), 0
    store.set(f"stays {dist.get_rank()}", "")
    while here < (count or dist.get_world_size() - 1):
        time.sleep(0.01)
        here = sum(store.check([f"stays {rank}"]) for rank in range(dist.get_world_size()))


def _main(rank: int, world: int, store: str, job: bytes, end: Any, group_timeout: float, timeout: float) -> None:
    faulthandler.dump_traceback_later(0.9 * timeout)  # where a rank hangs is known before it is killed
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # else torch remembers the last 2000 collectives, a kilobyte each
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        assert "warm" in sys.modules, "the server could not import tests/warm.py"
        f, args = pickle.loads(job)
        early, limit = (datetime.timedelta(seconds=seconds) for seconds in (GROUP_TIMEOUT, group_timeout))
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=early)
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(limit)  # not before: ranks may be forked seconds apart
        answer: Any = f(*args)
        end.send_bytes(pickle.dumps(answer))
        dist.barrier()  # nobody leaves while others still talk
    except BaseException as error:
        end.send_bytes(pickle.dumps(Raised(type(error).__name__, str(error), traceback.format_exc())))
    finally:
        end.close()
        os._exit(0)  # destroying a group whose peers have failed can hang
