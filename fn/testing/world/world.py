"""Islands in a world of their own: their processes, what happens to them, and how a run ends."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fn import roles, tree
from fn.adapters.torchft.islands import group_of, optimizer
from fn.adapters.torchft.pace import Goodput
from fn.collectives.axis import Axis
from fn.collectives.transports.registry import register
from fn.errors import PeerLost
from fn.testing.world.judge import Books, Judge
from fn.testing.world.network import Cut, Network, Ring, Seat, within
from fn.testing.world.plan import Event, Plan
from fn.testing.world.quorum import PATIENCE, Lighthouse, Manager, Meeting, Server
from fn.testing.world.scheduler import Background, Process, Scheduler

SHAPES = [(4, 4), (8,), (2, 4)]
RATE, SLOWER = 0.2, {"local SGD in 4 bits": 0.3}
EXCHANGES = 12
"""Exchanges of a run, at least."""

EVERYWHERE, LASTING = {"cut", "lighthouse", "stop", "slow"}, {"cut", "lighthouse", "stop", "slow", "full disk"}
"""Faults that may cost any island its work, and those that last."""

LAST = 600.0
"""Seconds after which a run has ended."""

group_of.register(Manager, lambda manager: manager.pg)


class Result(NamedTuple):
    """How a run has ended. failure: what is wrong, or nothing. faults: events that happened. loss: of all islands."""

    plan: Plan
    failure: str
    story: list[tuple[float, str, str]]
    exchanges: int
    faults: int
    healings: int
    loss: float
    seconds: float

    @property
    def counts(self) -> bool:
        """Return whether enough has happened."""
        return self.exchanges >= 8 and self.faults >= 3 and self.healings >= 1

    def __str__(self) -> str:
        verdict = "FAILED" if self.failure else "passed" if self.counts else "passed, does not count"
        what = f"{self.exchanges} exchanges, {self.faults} faults, {self.healings} healings, loss {self.loss:.4f}"
        return f"seed {self.plan.seed}: {verdict}; {what}, {self.seconds:.0f} s; {self.plan}"


class World(Scheduler):
    """Islands and all that is around them.

    books: of each rank that has lived. islands: the processes of each, in its present life. saved: the checkpoint of
    each rank. disturbed: when something happened, from when to when.
    """

    def __init__(self, plan: Plan):
        super().__init__(plan.seed)
        self.plan, self.network = plan, Network(self)
        self.lighthouse = Lighthouse(self.network, least=1)
        self.judge, self.books = Judge(self), dict[Process, Books]()
        self.islands = dict[int, list[Process]]()
        self.meetings, self.saved = dict[Any, Meeting](), dict[tuple[int, int], dict[str, Tensor]]()
        self.disturbed, self.touched = list[tuple[float, float]](), dict[int, float]()
        self.full, self.slow = set[int](), dict[int, float]()
        self.quiet, self.happened, self.loss = 0.0, 0, inf
        self.lives = 0

    def launch(self, island: int) -> None:
        """Start an island."""
        self.lives += 1
        processes = [Process(island, rank, self.lives, self.now) for rank in range(self.plan.ranks)]
        self.islands[island] = processes
        server, ring = Server(self.lighthouse, processes), Ring(self.network, processes)
        for process in processes:
            seat = Seat(ring, process.rank, 6 * PATIENCE)
            self.start(process, partial(self.live, process, server, seat), self.ended)

    def live(self, process: Process, server: Server, seat: Seat) -> None:
        """Train, as a rank of an island."""
        plan, island = self.plan, process.island
        self.sleep(1.0 + self.draw.random())
        draw = torch.Generator("cpu").manual_seed(1000 * plan.seed + island)
        params = [nn.Parameter(torch.randn(s, generator=draw, dtype=torch.float32, device="cpu")) for s in SHAPES]
        manager = Manager(server, process, self.meetings)
        factor = (1.0 + island) if plan.counts_tokens else 1.0
        books = self.books[process] = Books(process, manager, factor)
        name = register(f"{process} {process.life}", within(seat))
        inside = Axis(plan.ranks, torch.tensor(process.rank, dtype=torch.int64, device="cpu"), name)

        def tokens() -> float:
            new, books.uncounted = books.uncounted, 0
            return factor * new

        make = partial(self.judge.watched, plan.make)
        opt: Any = optimizer(
            params, make, manager, schedule=plan.schedule, tokens=tokens if plan.counts_tokens else None, inside=inside,
            late=(6.0, 2.0, 10.0), lr=SLOWER.get(plan.method, RATE),
        )  # fmt: skip
        books.begin(opt)
        opt.background = Background(self, process, self.ended)
        opt.row = f"row {island % 2}" if plan.unlike else opt.row
        opt.register_load_state_dict_post_hook(self.judge.loaded)
        opt.register_step_pre_hook(books.count)  # behind the adapter's, which may heal
        try:
            if (island, process.rank) in self.saved:
                books.is_loading = True
                opt.load_state_dict(self.saved[island, process.rank])
                # The schedule says when the last exchange was, and a state dict nothing of one that was dropped.
                books.is_loading, books.steps = False, 0 if plan.counts_tokens else opt.steps - opt.sent
            while True:
                self.sleep(
                    plan.pace[island]
                    * (0.9 + 0.2 * self.draw.random())
                    * (5 if self.slow.get(island, 0) > self.now else 1)
                )
                self.gradients(params, opt, process, seat)
                began = self.now
                opt.step()
                opt.zero_grad()
                self.judge.look(opt, began)
                self.save(opt, process)
                self.see(books, opt)
        finally:
            opt.pace.goodput = Goodput()  # or it would say so whenever it is collected

    def gradients(self, params: list[nn.Parameter], opt: Any, process: Process, seat: Seat) -> None:
        """Set the gradients of a quadratic, with noise, in the mean over the ranks of the island."""
        number = ((self.plan.seed * 7919 + opt.steps) * 11 + process.island) * 2 + process.rank
        draw = torch.Generator("cpu").manual_seed(number)
        flat = torch.cat([p.detach().reshape(-1) for p in params])  # (...) each -> (n,)
        g = flat - 1.0 + 0.3 * torch.randn(flat.shape, generator=draw, dtype=torch.float32, device="cpu")
        if seat.size > 1:
            try:
                g = torch.stack(seat.send("gradients", [g] * seat.size)).mean(0)
            except RuntimeError as error:
                raise PeerLost(f"a rank of this island is lost: {error}") from error
        for p, part in zip(params, g.split([p.numel() for p in params]), strict=True):
            p.grad = part.view(p.shape)

    def save(self, opt: Any, process: Process) -> None:
        """Save now and then; a full disk ends the process."""
        if self.plan.saves and opt.steps % self.plan.saves == 0:
            if self.touched.get(-2 - process.island, 0.0) > self.now:
                raise OSError("No space left on device")
            self.saved[process.island, process.rank] = {k: x.clone() for k, x in opt.state_dict().items()}

    def see(self, books: Books, opt: Any) -> None:
        """End the run once all islands have been in two whole exchanges behind all faults."""
        island, told = books.process.island, books.manager.told[-2:]
        quiet = self.happened == len(self.plan.events) and self.now > self.quiet
        full = (
            quiet
            and len(told) == 2
            and all(t.count == self.plan.islands and t.written and t.found > self.quiet for t in told)
        )
        (self.full.add if full else self.full.discard)(island)
        if len(self.full) == self.plan.islands and books.manager.step >= EXCHANGES:
            anchor = torch.cat([x.reshape(-1) for x in tree.leaves(roles.find(opt.units[0].state, "copies")[0])])
            self.loss = float((anchor - 1.0).square().mean())
            self.end()
        elif self.now > LAST:
            self.end(f"not all islands are together after {LAST:.0f} s")

    def ended(self, process: Process, error: BaseException) -> None:
        """Hear that a process has ended by an exception; what started it starts its island again."""
        process.ended = self.now
        self.tell(process, f"ends by {type(error).__name__}: {error}")
        if not isinstance(error, PeerLost | TimeoutError | OSError) or not self.is_touched(process):
            self.end(f"{process} ends by " + "".join(traceback.format_exception(error)))
        self.lose(process.island, self.now)

    def lose(self, island: int, time: float) -> None:
        """End an island one of whose ranks has ended, and start it again."""
        life = self.islands[island][0].life

        def end() -> None:
            for process in self.islands[island]:
                process.ended = min(process.ended, self.now)

        def again() -> None:
            if self.islands[island][0].life == life:
                self.tell(f"island {island}", "is started again")
                self.launch(island)

        self.touched[island] = max(self.touched.get(island, 0.0), self.now + 0.01)
        self.full.discard(island)
        self.disturbed.append((time, time + 2.0))
        self.at(time + self.draw.uniform(0.05, 1.0), end)
        self.quiet = max(self.quiet, time + 6.0)
        self.at(time + self.draw.uniform(1.5, 6.0), again)

    def happen(self, event: Event) -> None:
        """Let a fault happen."""
        time, kind, island, seconds, other = event
        processes = self.islands[island]
        if any(process.ended < inf for process in processes):
            self.at(self.now + 2.0, partial(self.happen, event._replace(time=self.now + 2.0)))
            return
        self.happened += 1
        self.tell(f"island {island}", f"{kind} ({seconds:.1f} s, {other})")
        self.quiet = max(self.quiet, time + seconds)
        end = time + (seconds if kind in LASTING else 0.01)
        for i in range(self.plan.islands) if kind in EVERYWHERE else [island]:
            self.touched[i] = max(self.touched.get(i, 0.0), end)
        self.disturbed.append((time, time + seconds + 1.0))
        if kind in ("kill", "kill a rank"):
            for process in processes[other % len(processes) :][:1] if kind == "kill a rank" else processes:
                process.ended = self.now
            self.lose(island, self.now)
        elif kind == "stop":
            processes[other % len(processes)].rests = self.now + seconds
        elif kind == "cut":
            side = {island, *((island + 1) % self.plan.islands for _ in range(other))}
            self.network.cuts.append(Cut(self.now, self.now + seconds, frozenset(side)))
        elif kind == "lighthouse":
            self.lighthouse.restart(seconds)
        elif kind == "full disk":
            self.touched[-2 - island] = time + seconds
        elif kind == "jump":
            for process in processes:
                process.ahead += (50.0 if other else -50.0) * seconds
        elif kind == "slow":
            self.slow[island] = time + seconds

    def is_touched(self, process: Process) -> bool:
        """Return whether something has happened to an island in its present life."""
        return self.touched.get(process.island, 0.0) > process.born

    def is_disturbed(self, begin: float, end: float) -> bool:
        """Return whether something happened in a time."""
        return any(a < end and begin < b for a, b in self.disturbed)


class _Heard(logging.Handler):
    """What the adapter logs is part of the story."""

    def __init__(self, world: World):
        super().__init__(logging.WARNING)
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self.world.here is not None:
            self.world.tell(self.world.process, record.getMessage())


@contextmanager
def hearing(world: World) -> Iterator[None]:
    """Let the world hear what the library logs, and nobody else."""
    logger, handler = logging.getLogger("fn"), _Heard(world)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def run(plan: Plan) -> Result:
    """Run what a plan says."""
    world = World(plan)
    for island in range(plan.islands):
        world.launch(island)
    for event in plan.events:
        world.at(event.time, partial(world.happen, event))
    with hearing(world):
        world.go()
    judge = world.judge
    return Result(
        plan, world.failure, world.story, len(judge.exchanges), world.happened, judge.heals, world.loss, world.now
    )
