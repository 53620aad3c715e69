"""A lighthouse of torchft, and processes around it that are killed and begun again."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import wait
from typing import Any

import ranks


class Sea:
    """A lighthouse, and the processes of islands around it, each under a name.

    A process is called with a job and an end of a pipe. It sends b"" when it is ready and waits for an answer; then it
    sends what it has to tell, pickled, and waits. One that is about to be killed sends None.
    """

    def __init__(self, least: int = 2, join_ms: int = 1000):
        from torchft.coordination import LighthouseServer

        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=least, join_timeout_ms=join_ms, quorum_tick_ms=50,
            heartbeat_timeout_ms=3000,
        )  # fmt: skip
        self.processes: dict[Hashable, tuple[Any, Any]] = {}

    def __enter__(self) -> Sea:
        return self

    def __exit__(self, *args: object) -> None:
        for name in [*self.processes]:
            self.kill(name)
        self.lighthouse.shutdown()

    def begin(self, target: Callable[[Any, Any], None], jobs: Mapping[Any, Any]) -> None:
        """Let processes begin together, name -> job."""
        context = ranks.server()
        for name, job in jobs.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes[name] = process, ours
        ends = [self.processes[name][1] for name in jobs]
        assert all(end.poll(ranks.LIMIT) and end.recv_bytes() == b"" for end in ends)
        for end in ends:
            end.send_bytes(b"")

    def kill(self, name: Hashable) -> None:
        """End a process that has not ended itself."""
        process, end = self.processes.pop(name)
        process.kill()
        process.join()
        end.close()

    def lost(self, name: Hashable) -> None:
        """Wait until a process has been killed."""
        process, end = self.processes.pop(name)
        assert end.poll(ranks.LIMIT), "the process was not killed"
        assert pickle.loads(end.recv_bytes()) is None
        process.join(10)
        assert process.exitcode == -signal.SIGKILL

    def end(self) -> dict[Any, Any]:
        """Return what the processes tell."""
        found: dict[Any, Any] = {}
        until = time.monotonic() + ranks.LIMIT
        while len(found) < len(self.processes):
            waiting = {end: name for name, (_, end) in self.processes.items() if name not in found}
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            assert ready, f"no answer from {sorted(waiting.values())}"
            found.update({waiting[end]: pickle.loads(end.recv_bytes()) for end in ready})
        return found
