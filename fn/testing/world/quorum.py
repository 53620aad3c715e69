"""What the adapter calls of torchft's Manager, and the rules of its lighthouse: who is in the next exchange.

Lighthouse    one for all islands: hears heartbeats, and says who is in a quorum
Server        one for each island: asks the lighthouse once all ranks have asked, and counts their votes
Manager       one for each rank: what `fn.adapters.torchft.optimizer` is given
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from fn.testing.world.network import LIGHTHOUSE, Group, Network, Ring, Seat
from fn.testing.world.scheduler import Process

HEARTBEAT, JOIN, TICK, RETRY = 3.0, 10.0, 0.25, 5.0
"""Seconds: after which an island without heartbeats is lost, that a quorum waits for one which has them, between two
looks, and after which a lighthouse that does not answer is asked again."""

PATIENCE, MEETING, LONGEST = 10.0, 5.0, 3600.0
"""Seconds: of a message between islands, of the islands of a new quorum for each other, and of a quorum."""


class Member(NamedTuple):
    """An island that asks for a quorum. failures: exchanges in a row that it has dropped."""

    server: Server
    step: int
    failures: int


class Quorum(NamedTuple):
    """Who is in an exchange. number: as torchft counts them. serial: no two have the same."""

    number: int
    serial: int
    members: list[Member]


class Lighthouse:
    """torchft's lighthouse. least: islands of an exchange. heard: when an island's last heartbeat came."""

    def __init__(self, network: Network, least: int):
        self.network, self.world, self.least, self.serial = network, network.world, least, 0
        self.down = 0.0
        self.heard, self.asked = dict[Server, float](), dict[Server, tuple[float, Member]]()
        self.servers, self.before, self.number = list[Server](), list[Server](), 0
        self.world.at(TICK, self.look)

    def restart(self, seconds: float) -> None:
        """Forget everything, and answer nobody for some seconds."""
        self.down, self.before, self.number = self.world.now + seconds, [], 0
        waiting, self.asked, self.heard = [member for _, member in self.asked.values()], {}, {}
        for member in waiting:
            self.world.at(self.down + RETRY * self.world.draw.random(), lambda member=member: self.ask(member))

    def ask(self, member: Member) -> None:
        """Hear from an island that it asks for a quorum; it asks again while nobody answers."""
        if not member.server.is_asking(member):
            return
        server, now = member.server, self.world.now
        if now < self.down or not server.reaches(LIGHTHOUSE):
            self.world.at(now + RETRY, lambda: self.ask(member))
            return
        self.heard[server] = now
        self.asked[server] = now, member
        self.decide()

    def look(self) -> None:
        """Hear heartbeats, and decide."""
        if self.world.now >= self.down:
            self.heard |= {server: self.world.now for server in self.servers if server.reaches(LIGHTHOUSE)}
            self.decide()
        self.world.at(self.world.now + TICK, self.look)

    def decide(self) -> None:
        """Found a quorum, if there is one."""
        healthy = [server for server, time in self.heard.items() if self.world.now - time < HEARTBEAT]
        there = {server: asked for server, asked in self.asked.items() if server in healthy}
        if not (self.before and all(server in there for server in self.before)):
            if len(there) < self.least or 2 * len(there) <= len(healthy):
                return
            if len(there) < len(healthy) and self.world.now - min(time for time, _ in there.values()) < JOIN:
                return
        members = sorted((member for _, member in there.values()), key=lambda member: member.server.name)
        now = [member.server for member in members]
        # A new process group for others, and where an exchange was dropped.
        self.number += now != self.before or any(member.failures for member in members)
        self.serial, self.before = self.serial + 1, now
        self.asked = {server: (self.world.now, asked[1]) for server, asked in self.asked.items() if server not in now}
        quorum = Quorum(self.number, self.serial, members)
        for member in members:
            member.server.hear(member, quorum, self.network.arrival(LIGHTHOUSE, member.server.island))


class Server:
    """The part of torchft that an island's first rank hosts. name: sorts islands in a quorum, and is never used again."""

    def __init__(self, lighthouse: Lighthouse, processes: Sequence[Process]):
        self.lighthouse, self.world, self.processes = lighthouse, lighthouse.world, processes
        self.island = processes[0].island
        self.name = f"island_{self.island}:{self.world.draw.random()}"
        self.rounds, self.answers = list[dict[int, Member]](), list[tuple[float, Quorum]]()
        self.votes = list[dict[int, bool]]()
        lighthouse.servers.append(self)

    def reaches(self, other: int) -> bool:
        """Return whether a message from here would leave, and arrive."""
        first, now = self.processes[0], self.world.now
        return first.ended == inf and first.rests <= now and not self.lighthouse.network.is_cut(self.island, other, now)

    def is_asking(self, member: Member) -> bool:
        """Return whether a question is not answered yet."""
        return (
            self.processes[0].ended == inf
            and len(self.answers) < len(self.rounds)
            and member in self.rounds[-1].values()
        )

    def hear(self, member: Member, quorum: Quorum, time: float) -> None:
        """Hear from the lighthouse."""
        if self.is_asking(member):
            self.answers.append((time, quorum))

    def quorum(self, rank: int, number: int, step: int, failures: int) -> Quorum:
        """Return the quorum of a number once all ranks have asked for it."""
        self.rounds += [{}] * (number >= len(self.rounds))
        self.rounds[number] = {**self.rounds[number], rank: (member := Member(self, step, failures))}
        if len(self.rounds[number]) == len(self.processes):
            arrival = self.lighthouse.network.arrival(self.island, LIGHTHOUSE)
            self.world.at(arrival, lambda: self.lighthouse.ask(member))
        if not self.world.pause(
            lambda: self.answers[number][0] if number < len(self.answers) else inf, LONGEST, "a quorum"
        ):
            raise TimeoutError("no quorum was found")
        return self.answers[number][1]

    def vote(self, rank: int, number: int, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        self.votes += [{}] * (number >= len(self.votes))
        self.votes[number] = votes = {**self.votes[number], rank: yes}
        complete = lambda: len(self.votes[number]) == len(self.processes)  # noqa: E731
        if len(votes) < len(self.processes) and not self.world.pause(
            lambda: 0.0 if complete() else inf, 2 * PATIENCE, "votes"
        ):
            raise TimeoutError("a rank of this island did not vote")
        return all(self.votes[number].values())


class Meeting(NamedTuple):
    """Where the islands of a quorum open their connections. came: rank -> process."""

    came: dict[int, Process]
    rings: list[Ring]


class Told(NamedTuple):
    """An exchange: when its quorum was there, when it was voted on, of how many islands, whether it was written."""

    found: float
    ended: float
    count: int
    written: bool
    serial: int


class Manager:
    """torchft's Manager as the adapter knows it.

    quorum: the present one. told: of each exchange that was voted on.
    """

    def __init__(self, server: Server, process: Process, meetings: dict[Any, Meeting]):
        self.server, self.process, self.meetings, self.world = server, process, meetings, server.world
        self.pg, self.step, self.failures, self.number = Group(), 0, 0, -1
        self.error: Exception | None = None
        self.asked = self.voted = 0
        self.quorum: Quorum | None = None
        self.rank: int | None = None
        self.heals = list[Callable[[Any], None]]()
        self.found, self.told = 0.0, list[Told]()

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Register what is called where others wrote an exchange which this island did not."""
        self.heals.append(load)

    def start_quorum(self) -> None:
        """Find the islands of the next exchange, and meet them."""
        self.error = None
        self.asked += 1
        self.quorum = quorum = self.server.quorum(self.process.rank, self.asked - 1, self.step, self.failures)
        self.found = self.world.now
        members, place = quorum.members, self.process.rank
        self.rank = next(i for i, member in enumerate(members) if member.server is self.server)
        latest = max(member.step for member in members)
        first = [i for i, member in enumerate(members) if member.step == latest]
        if quorum.number != self.number:
            self.number = quorum.number
            self.pg.abort()
            try:
                self.meet((members[first[place % len(first)]].server, quorum.number, place), len(members))
            except RuntimeError as error:
                self.report_error(error)
                return
        behind = [i for i, member in enumerate(members) if member.step != latest]
        if self.rank in behind:
            source = members[first[(behind.index(self.rank) + place) % len(first)]].server
            if source.processes[place].ended < inf:
                self.report_error(RuntimeError("the island that was to send its step is lost"))
                return
            for load in self.heals:
                load({})
            self.step = latest

    def meet(self, key: Any, size: int) -> None:
        """Open connections to the same rank of all islands. Raises: RuntimeError if they do not come."""
        meeting = self.meetings.get(key)
        if meeting is None or meeting.rings:  # one of before: a lighthouse that was started again counts from 1
            meeting = self.meetings[key] = Meeting({}, [])
        assert self.rank is not None
        meeting.came[self.rank] = self.process
        network = self.server.lighthouse.network
        arrival = max(network.arrival(self.process.island, other.island) for other in meeting.came.values())
        if len(meeting.came) == size:
            meeting.rings.append(Ring(network, [meeting.came[r] for r in range(size)]))
        if not self.world.pause(lambda: arrival if meeting.rings else inf, MEETING, "the islands of a quorum"):
            raise RuntimeError("Timed out meeting the islands of a quorum")
        self.pg.seat = Seat(meeting.rings[0], self.rank, PATIENCE)

    def errored(self) -> Exception | None:
        """Return what went wrong since the last quorum."""
        return self.error

    def report_error(self, error: Exception) -> None:
        """Hear that something went wrong: then this rank votes against the exchange."""
        self.error = error

    def is_participating(self) -> bool:
        """Return whether this island is in the quorum."""
        return self.rank is not None

    def num_participants(self) -> int:
        """Return how many islands are in the quorum."""
        return len(self.quorum.members) if self.quorum is not None else 0

    def participating_rank(self) -> int | None:
        """Return the number of this island in the quorum."""
        return self.rank

    def current_step(self) -> int:
        """Return how many exchanges were written."""
        return self.step

    def should_commit(self) -> bool:
        """Return whether all ranks of this island say that the exchange has come."""
        self.voted += 1
        written = self.server.vote(self.process.rank, self.voted - 1, self.error is None)
        self.step += written
        self.failures = 0 if written else self.failures + 1
        assert self.quorum is not None
        self.told.append(Told(self.found, self.world.now, len(self.quorum.members), written, self.quorum.serial))
        return written
