"""Time that is simulated: threads of which exactly one runs, chosen by a seed, and a clock that jumps to what is next.

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
    life: int
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
    run: Callable[[], None]
    until: Callable[[], float] = lambda: 0.0
    limit: float = inf
    what: str = "its start"
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def time(self) -> float:
        """Return when it goes on; one whose process has ended does so at once, to end as well."""
        return 0.0 if self.process.ended < inf else max(self.process.rests, min(self.until(), self.limit))


class Scheduler:
    """Threads and time. now: seconds. story: (time, who, what). failure: what was found wrong."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.now, self.story, self.failure = 0.0, list[tuple[float, str, str]](), ""
        self.tasks, self.events, self.order = (
            list[Task](),
            list[tuple[float, int, Callable[[], None]]](),
            itertools.count(),
        )
        self.here: Task | None = None
        self.is_over, self.left = False, threading.Semaphore(0)

    @property
    def process(self) -> Process:
        """Return the process of the thread that runs."""
        assert self.here is not None
        return self.here.process

    def tell(self, who: object, what: str) -> None:
        """Add a line to the story."""
        self.story.append((self.now, str(who), what))

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time; it may not wait."""
        heapq.heappush(self.events, (time, next(self.order), event))

    def start(self, process: Process, run: Callable[[], None], ends: Callable[[Process, BaseException], None]) -> None:
        """Let a thread of a process begin. Args: ends: what is told of an exception, behind which the process ends."""
        task = Task(process, run)

        def body() -> None:
            task.turn.acquire()
            pace.host.seconds = lambda: self.now + process.ahead
            torch.set_grad_enabled(False)  # of this thread
            try:
                if process.ended == inf:
                    run()
            except Killed:
                pass
            except BaseException as error:
                ends(process, error)
            self.tasks.remove(task)
            self.pass_on()

        self.tasks.append(task)
        threading.Thread(target=body, daemon=True).start()

    def pause(self, until: Callable[[], float], limit: float = inf, what: str = "") -> bool:
        """Let others run until a time, which may not be known yet, at most for some seconds; return whether it came."""
        me = self.here
        assert me is not None
        if me.process.ended == inf:
            me.until, me.limit, me.what = until, self.now + limit, what
            self.pass_on(me)
        if me.process.ended < inf:
            raise Killed
        return until() <= self.now

    def sleep(self, seconds: float) -> None:
        """Let some seconds pass."""
        end = self.now + seconds
        self.pause(lambda: end, what="time to pass")

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
            elif not self.tasks:
                self.left.release()
                return
            else:
                self.end(
                    "nothing can happen any more: " + "; ".join(f"{t.process} waits for {t.what}" for t in self.tasks)
                )
        self.now = max(self.now, first)
        ready = [task for task, time in zip(self.tasks, times, strict=True) if time <= self.now]
        self.here = ready[0] if len(ready) == 1 else self.draw.choice(ready)
        if self.here is not me:
            self.here.turn.release()
            if me is not None:
                me.turn.acquire()

    def end(self, failure: str = "") -> None:
        """End the run. Args: failure: what is wrong; the first one counts."""
        self.failure = self.failure or failure
        self.is_over = True
        for task in self.tasks:
            task.process.ended = min(task.process.ended, self.now)

    def go(self) -> None:
        """Run until all threads have ended."""
        self.pass_on()
        self.left.acquire()


class Background:
    """`fn.collectives.background.Background` on a thread of the scheduler's: what a mean travels on."""

    def __init__(self, world: Scheduler, process: Process, ends: Callable[[Process, BaseException], None]):
        self.world, self.jobs = world, deque[Callable[[], None]]()
        self.begun = False
        self.process, self.ends = process, ends

    def begin(self, binding: Binding, device: torch.device, job: Callable[[], Any]) -> Callable[[], Any]:
        """Begin a job; return what waits for it and returns its result."""
        bound, agreed, found = current_binding(), is_agreed(), list[tuple[float, Any, Exception | None]]()

        def run() -> None:
            try:
                with bound, agreed_row(agreed):
                    result, error = job(), None
            except Exception as raised:
                result, error = None, raised
            found.append((self.world.now, result, error))

        def wait() -> Any:
            self.world.pause(lambda: found[0][0] if found else inf, what="a mean on its way")
            _, result, error = found[0]
            if error is not None:
                raise error
            return result

        self.jobs.append(run)
        if not self.begun:
            self.begun = True
            self.world.start(self.process, self.work, self.ends)
        return wait

    def work(self) -> None:
        """Do one job after the other."""
        while True:
            self.world.pause(lambda: 0.0 if self.jobs else inf, what="a mean to send")
            self.jobs.popleft()()
