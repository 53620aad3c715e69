"""Real ranks: W processes in a gloo group, each running a function of this test suite.

    run(2, f, x)       -> [f(x) on rank 0, f(x) on rank 1]; f is a module-level function and calls `bound()`
    outcomes(2, f, x)  -> the same, but with `Raised` and `Died` for ranks that did not return
    case = Cases(2)    -> a decorator for functions that run in the same two processes, once; case.answer("name")
    python("-m", "fn") -> what `python -m fn` printed, without the seconds that an interpreter takes to import torch

Processes are forked from a server that has done what all of them begin with (`warm`). They meet through a file, on
the loopback interface, so no port is chosen and nothing leaves the machine.
"""

from __future__ import annotations

import builtins
import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
import warnings
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


class Ended(NamedTuple):
    """What became of `python`, as of `subprocess.run`."""

    returncode: int | None
    stdout: str
    stderr: str


def python(*arguments: str, cwd: Path | None = None, **env: str) -> Ended:
    """Run `python [-W filter] (-c code | -m module | script) [args]` in a fork of the server, in a folder.

    `fn` is imported there already: what asks for more of a new interpreter starts one.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = server().Process(target=_python, args=(arguments, cwd, env, out, err))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
        return Ended(process.exitcode, out.read_text(), err.read_text())


def _python(arguments: tuple[str, ...], cwd: Path | None, env: dict[str, str], out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False, buffering=1) for stream in (1, 2))  # noqa: SIM115
    os.environ.update(env)
    os.chdir(cwd or os.getcwd())
    code: Any = 0
    try:
        while arguments[0] == "-W":
            action, _, kind = arguments[1].partition("::")
            warnings.filterwarnings(action, category=getattr(builtins, kind or "Warning"))
            arguments = arguments[2:]
        flag, sys.argv = arguments[0], [*arguments] if arguments[0][0] != "-" else [*arguments[1:]]
        sys.path[:0] = [str(Path(flag).parent) if flag[0] != "-" else os.getcwd()]
        if flag == "-c":
            sys.argv[0] = flag
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif flag == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            # What the script leaves is kept till the process ends: where DDP's reducer goes, torch (2.13) waits for the
            # threads of gloo with the interpreter's lock held, and one may need that to let its last message go.
            left = runpy.run_path(flag, run_name="__main__")  # noqa: F841
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


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


def without(*providers: str) -> None:
    """In a fork: empty the table of kernels, as after an import, where some rows of the CPU are not installed."""
    table = sys.modules["fn.kernels.table"]
    rows = {provider: row for provider, row in table.BUILT_IN["cpu"].items() if provider not in providers}
    table.BUILT_IN = {**table.BUILT_IN, "cpu": rows}
    table._loaded.clear()
    table._accepted.clear()


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
