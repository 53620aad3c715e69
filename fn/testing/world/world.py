"""Islands in a world of their own: their processes, what happens to them, and how a run ends."""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from fn.adapters.torchft.islands import group_of, optimizer
from fn.adapters.torchft.pace import Goodput
from fn.arguments import checked
from fn.collectives.axis import Axis
from fn.collectives.transports.registry import register
from fn.errors import PeerLost
from fn.testing.world.judge import Books, Judge, flat
from fn.testing.world.network import Network, Ring, within
from fn.testing.world.plan import KILLS, LASTING, RATES, SHAPES, Event, H, Plan
from fn.testing.world.quorum import PATIENCE, Lighthouse, Manager, Server
from fn.testing.world.scheduler import Background, Process, Scheduler

EXCHANGES, LAST = 12, 600.0
"""Exchanges of a run, at least, and seconds after which it has ended."""

group_of.register(Manager, lambda manager: manager.group)


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

    def told(self) -> str:
        """Return the story, a line each: time, who, what happened."""
        lines = [f"{time:8.2f} s  {who:<16}  {what}" for time, who, what in self.story]
        return "\n".join([str(self), *map(str, self.plan.events), "", *lines, "", self.failure or "nothing is wrong"])


class World(Scheduler):
    """Islands and all that is around them.

    islands: the processes of each, in its present life. saved: checkpoints, whole once all ranks have saved. slow,
    full_disk: island -> until when. together: islands that have been in two whole exchanges since it is quiet.
    """

    def __init__(self, plan: Plan):
        super().__init__(plan.seed)
        self.plan, self.network, self.islands = plan, Network(self), dict[int, list[Process]]()
        self.lighthouse, self.judge = Lighthouse(self.network), Judge(self, plan, self.network.unsure)
        self.meetings, self.saved = dict[Any, Any](), defaultdict[Any, dict[int, Any]](dict)
        self.slow, self.full_disk = defaultdict[int, float](float), defaultdict[int, float](float)
        self.quiet, self.happened, self.loss, self.together = 0.0, 0, inf, set[int]()
        for island in range(plan.islands):
            self.launch(island)
        for event in plan.events:
            self.at(event.time, partial(self.happen, event))

    def launch(self, island: int) -> None:
        """Start an island."""
        self.islands[island] = processes = [Process(island, rank, self.now) for rank in range(self.plan.ranks)]
        server, ring = Server(self.lighthouse, processes), Ring(self.network, processes, 6 * PATIENCE)
        for process in processes:
            self.start(process, partial(self.live, process, server, ring))

    def live(self, process: Process, server: Server, ring: Ring) -> None:
        """Train, as a rank of an island."""
        plan, island, rank = self.plan, process.island, process.rank
        self.sleep(1.0 + self.draw.random())
        draw = torch.Generator("cpu").manual_seed(1000 * plan.seed + island)
        params = [nn.Parameter(torch.randn(s, generator=draw, dtype=torch.float32, device="cpu")) for s in SHAPES]
        manager, factor = Manager(server, process, self.meetings), 1.0 + island * plan.counts_tokens
        number = torch.tensor(rank, dtype=torch.int64, device="cpu")
        inside = Axis(plan.ranks, number, register(str(process), within(ring, rank)))

        trained = 0

        def tokens() -> float:
            nonlocal trained
            new, trained = factor * trained, 0
            books.tokens += new
            return new

        opt: Any = optimizer(
            params, partial(self.judge.watched, plan.make), manager, schedule=plan.schedule, inside=inside,
            tokens=tokens if plan.counts_tokens else None, late=(6.0, 2.0, 10.0), lr=RATES.get(plan.method, 0.2),
        )  # fmt: skip
        books = self.judge.books[process] = Books(process, manager, opt)
        opt.row, opt.background = f"row {island * plan.unlike % 2}", plan.delay and Background(self, process)
        try:
            whole = [states for key, states in self.saved.items() if key[0] == island and len(states) == plan.ranks]
            if whole:
                tensors, saved = whole[-1][rank]
                for p, x in zip(params, tensors, strict=True):
                    p.copy_(x)
                opt.load_state_dict(saved)
                self.judge.loaded(books, is_copy=False)
                # The schedule says when the last exchange was, and a state dict nothing of one that was dropped.
                books.steps = opt.steps - opt.sent
            opt.register_load_state_dict_post_hook(lambda _: self.judge.loaded(books, is_copy=True))
            while True:
                slowed = 5.0 if self.slow[island] > self.now else 1.0
                self.sleep(slowed * plan.pace[island] * self.draw.uniform(0.9, 1.1))
                self.gradients(params, opt.steps, rank, ring)
                trained += 1  # as a script counts tokens: those of a step in the warm-up before its exchange
                began = self.now
                opt.step()
                opt.zero_grad()
                self.judge.look(books, began)
                self.save(opt, process)
                self.see(books)
        finally:
            opt.pace.goodput = Goodput()  # or it would say so whenever it is collected
            manager.group.ring = None  # or the names of transports would keep this world

    def gradients(self, params: list[nn.Parameter], step: int, rank: int, ring: Ring) -> None:
        """Set the gradients of a quadratic, with noise, in the mean over the ranks of the island."""
        number = ((self.plan.seed * 7919 + step) * 11 + ring.members[0].island) * 2 + rank
        draw, here = torch.Generator("cpu").manual_seed(number), torch.cat([p.detach().reshape(-1) for p in params])
        noise = torch.randn(here.shape, generator=draw, dtype=torch.float32, device="cpu")
        g = within(ring, rank).all_gather(here - 1.0 + 0.3 * noise).mean(0)  # (n,) -> (W, n) -> (n,)
        for p, part in zip(params, g.split([p.numel() for p in params]), strict=True):
            p.grad = part.view(p.shape)

    def save(self, opt: Any, process: Process) -> None:
        """Save now and then; a full disk ends the process."""
        if self.plan.saves and opt.steps % self.plan.saves == 0:
            if self.full_disk[process.island] > self.now:
                raise OSError("No space left on device")
            states = self.saved[process.island, process.born, opt.steps]
            params = [p.clone() for p in self.judge.books[process].params]
            states[process.rank] = params, {k: x.clone() for k, x in opt.state_dict().items()}

    def see(self, books: Books) -> None:
        """End the run once all islands have been in two whole exchanges behind all faults."""
        told, all_there = books.manager.told[-2:], self.plan.islands
        whole = [found > self.quiet and count == all_there and written for found, _, count, written, _ in told]
        is_quiet = self.happened == len(self.plan.events) and whole == [True, True]
        (self.together.add if is_quiet else self.together.discard)(books.process.island)
        # Steps, too: torchft tells an island how many exchanges there were before that gets a state of those.
        is_long = books.manager.step >= EXCHANGES and books.opt.steps >= EXCHANGES * H
        if len(self.together) == all_there and is_long:
            self.loss = float((flat(books.agreed)[: flat(books.params).numel()] - 1.0).square().mean())
            self.judge.check(self.loss <= self.plan.largest, "the loss is more than without faults")
            self.end()
        elif self.now > LAST:
            self.end(f"not all islands are together after {LAST:.0f} s")

    def ended(self, process: Process, error: BaseException) -> None:
        """Hear that a process has ended by an exception."""
        self.tell(process, f"ends by {type(error).__name__}: {error}")
        if (
            not isinstance(error, PeerLost | TimeoutError | OSError)
            or self.judge.touched[process.island] <= process.born
        ):
            self.end(f"{process} ends by " + "".join(traceback.format_exception(error)))
        self.lose(self.islands[process.island], [process])

    def lose(self, processes: list[Process], lost: list[Process]) -> None:
        """End ranks of an island: what started it ends the others, and starts it again."""
        island = processes[0].island

        def end(which: list[Process]) -> None:
            for process in which:
                process.ended = min(process.ended, self.now)

        def again() -> None:
            if self.islands[island] is processes:
                self.tell(f"island {island}", "is started again")
                self.launch(island)

        end(lost)
        self.judge.touched[island] = max(self.judge.touched[island], self.now + 0.01)
        self.judge.disturbed.append((self.now, self.now + 2.0))
        self.quiet = max(self.quiet, self.now + 6.0)
        self.together.discard(island)
        self.at(self.now + self.draw.uniform(0.05, 1.0), partial(end, processes))
        self.at(self.now + self.draw.uniform(1.5, 6.0), again)

    def burn(self, processes: list[Process], lost: list[Process], messages: Iterator[int]) -> None:
        """End ranks of an island behind some messages, while the last one is on its way."""
        if next(messages, 1) == 0:
            travels = self.draw.choice((0.05, 0.3)) * self.draw.random()  # as small messages do, and large ones
            self.at(self.now + travels, partial(self.lose, processes, lost))

    def happen(self, event: Event) -> None:
        """Let a fault happen; later, if its island is lost now."""
        _, kind, island, seconds, other = event
        processes, end = self.islands[island], self.now + seconds
        one = processes[other % len(processes)]
        if any(process.ended < inf for process in processes):
            self.at(self.now + 2.0, partial(self.happen, event))
            return
        self.happened, self.quiet = self.happened + 1, max(self.quiet, end)
        self.tell(f"island {island}", f"{kind} ({seconds:.1f} s, {other})")
        self.judge.disturbed.append((self.now, end + 1.0))
        # Who was stopped may end what it was in behind it, alone.
        until = end + 0.1 if kind in LASTING else self.now + 0.01
        for i in range(self.plan.islands) if kind in LASTING[1:] else [island]:
            self.judge.touched[i] = max(self.judge.touched[i], until)
        if kind == "kill in an exchange":
            lost = processes if other % 3 else [one]
            self.network.fuses[one] = partial(self.burn, processes, lost, iter(range(other, -1, -1)))
        elif kind in KILLS:
            self.lose(processes, processes if kind == "kill" else [one])
        elif kind == "stop":
            one.rests = end
        elif kind == "cut":
            self.network.cuts.append((self.now, end, frozenset({island, (island + other) % self.plan.islands})))
        elif kind == "lighthouse":
            self.lighthouse.restart(seconds)
        elif kind == "jump":
            for process in processes:
                process.ahead += (50.0 if other % 2 else -50.0) * seconds
        else:
            (self.slow if kind == "slow" else self.full_disk)[island] = end


@checked("plan")
def run(plan: Plan) -> Result:
    """Run what a plan says, and judge it; the same plan gives the same story.

    Args: plan: as `drawn` returns it, or with other events. Returns: how it has ended; its `failure` is "" if all held.
    Raises: TypeError for another kind.
    """
    world, logger = World(plan), logging.getLogger("fn")

    def heard(record: logging.LogRecord) -> bool:  # what the library logs is part of the story, and for nobody else
        world.tell(world.here.process, record.getMessage())
        return False

    logger.addFilter(heard)
    try:
        world.pass_on()
        world.left.acquire()  # until all threads have ended
    finally:
        logger.removeFilter(heard)
    found = len(world.judge.exchanges), world.happened, world.judge.heals, world.loss, world.now
    return Result(plan, world.failure, world.story, *found)


@checked("result")
def shrunk(result: Result) -> Result:
    """Return a failing run with the fewest events: none of them can be left out.

    What is left may fail in another way than before: any failure is one.

    Args: result: of `run`. Raises: TypeError for another kind.
    """
    events = result.plan.events
    for i in reversed(range(len(events))):
        less = run(result.plan._replace(events=events[:i] + events[i + 1 :]))
        if less.failure:
            return shrunk(less)
    return result
