"""Time that is simulated: a seed chooses the one thread that runs, and the clock jumps to what is next.

A thread runs until it waits for something. Then the clock goes on to the first moment at which any of them can, and a
seeded draw says which of these does. So a seed gives the same run, message for message, and nobody sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from fn.adapters.torchft import pace
from fn.collectives.axis import Binding, current_binding
from fn.kernels.table import agreed_row, is_agreed


class Killed(BaseException):
    """The process of this thread has ended: no `except Exception` may keep it alive."""


@dataclass(eq=False)
class Process:
    """A rank of an island, from its start to its end.

    born, ended: when it was and did. rests: until when it does nothing, as behind SIGSTOP. ahead: seconds of its clock.
    """

    island: int
    rank: int
    born: float
    ended: float = inf
    rests: float = 0.0
    ahead: float = 0.0

    def __str__(self) -> str:
        return f"island {self.island} rank {self.rank}"


@dataclass(eq=False)
class Task:
    """A thread of a process. until: the first time at which it can go on, as far as is known. limit: the last one."""

    process: Process
    until: Callable[[], float] = lambda: 0.0
    limit: float = inf
    what: str = "its start"
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def time(self) -> float:
        """Return when it goes on; one whose process has ended does so at once, to end as well."""
        return 0.0 if self.process.ended < inf else max(self.process.rests, min(self.until(), self.limit))


class Scheduler:
    """Threads and time. here: what runs. now: seconds. story: (time, who, what). failure: what was found wrong."""

    here: Task

    def __init__(self, seed: int):
        self.draw, self.order, self.left = random.Random(seed), itertools.count(), threading.Semaphore(0)
        self.now, self.failure, self.is_over = 0.0, "", False
        self.story, self.tasks = list[tuple[float, str, str]](), list[Task]()
        self.events = list[tuple[float, int, Callable[[], None]]]()

    def ended(self, process: Process, error: BaseException) -> None:
        """Hear that a thread has raised an error, with which its process ends."""
        raise NotImplementedError

    def tell(self, who: object, what: str) -> None:
        """Add a line to the story."""
        self.story.append((self.now, str(who), what))

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time; it may not wait."""
        heapq.heappush(self.events, (time, next(self.order), event))

    def start(self, process: Process, run: Callable[[], None]) -> None:
        """Let a thread of a process begin."""
        task = Task(process)

        def body() -> None:
            task.turn.acquire()
            pace.host.seconds = lambda: self.now + process.ahead
            torch.set_grad_enabled(False)  # of this thread
            try:
                with suppress(Killed):
                    run() if process.ended == inf else None
            except BaseException as error:
                self.ended(process, error)
            self.tasks.remove(task)
            self.pass_on()

        self.tasks.append(task)
        threading.Thread(target=body, daemon=True).start()

    def pause(self, until: Callable[[], float], what: str, limit: float = inf) -> bool:
        """Let others run until a time, which may not be known yet, at most for some seconds; return whether it came."""
        me = self.here
        if me.process.ended == inf:
            me.until, me.limit, me.what = until, self.now + limit, what
            self.pass_on(me)
        if me.process.ended < inf:
            raise Killed
        return until() <= self.now

    def wait_for(self, there: Callable[[], Any], what: str, limit: float = inf) -> bool:
        """Let others run until something is there; return whether it is."""
        return self.pause(lambda: 0.0 if there() else inf, what, limit)

    def sleep(self, seconds: float) -> None:
        """Let some seconds pass."""
        end = self.now + seconds
        self.pause(lambda: end, "time to pass")

    def pass_on(self, me: Task | None = None) -> None:
        """Let the next thread run; come back when it is the turn of `me`."""
        while True:
            times = [task.time() for task in self.tasks]
            first = min(times, default=inf)
            if self.events and not self.is_over and self.events[0][0] <= first:
                time, _, event = heapq.heappop(self.events)
                self.now = max(self.now, time)
                event()
            elif first < inf:
                break
            elif self.tasks:
                self.end("nobody can go on: " + "; ".join(f"{t.process} waits for {t.what}" for t in self.tasks))
            else:
                self.left.release()
                return
        self.now = max(self.now, first)
        ready = [task for task, time in zip(self.tasks, times, strict=True) if time <= self.now]
        self.here = ready[0] if len(ready) == 1 else self.draw.choice(ready)
        if self.here is not me:
            self.here.turn.release()
            if me is not None:
                me.turn.acquire()

    def end(self, failure: str = "") -> None:
        """End the run. Args: failure: what is wrong; the first one counts."""
        self.failure, self.is_over = self.failure or failure, True
        for task in self.tasks:
            task.process.ended = min(task.process.ended, self.now)


class Background:
    """`fn.collectives.background.Background` on a thread of the scheduler's: what a mean travels on."""

    def __init__(self, world: Scheduler, process: Process):
        self.world, self.jobs = world, deque[Any]()
        world.start(process, self.work)

    def begin(self, binding: Binding, device: torch.device, job: Callable[[], Any]) -> Callable[[], Any]:
        """Begin a job; return what waits for it and returns its result."""
        done: Future[Any] = Future()
        self.jobs.append((current_binding(), is_agreed(), job, done))
        return lambda: self.world.wait_for(done.done, "a mean on its way") and done.result()

    def work(self) -> None:
        """Do one job after the other."""
        while self.world.wait_for(lambda: self.jobs, "a mean to send"):
            bound, agreed, job, done = self.jobs.popleft()
            try:
                with bound, agreed_row(agreed):
                    done.set_result(job())
            except Exception as error:
                done.set_exception(error)
