"""What the adapter calls of torchft's Manager, and the rules of its lighthouse: who is in the next exchange.

Lighthouse    one for all islands: hears heartbeats, and says who is in a quorum
Server        one for each island: asks the lighthouse once all ranks have asked, and counts their votes
Manager       one for each rank: what `fn.adapters.torchft.optimizer` is given
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from fn.testing.world.network import LIGHTHOUSE, Group, Network, Ring
from fn.testing.world.scheduler import Process

HEARTBEAT, JOIN, TICK, RETRY = 3.0, 10.0, 0.25, 5.0
"""Seconds: after which an island without heartbeats is lost, that a quorum waits for one which has them, between two
looks, and after which a lighthouse that does not answer is asked again."""

PATIENCE, MEETING = 10.0, 5.0
"""Seconds: of a message between islands, and of the islands of a new quorum for each other."""


class Member(NamedTuple):
    """An island that asks for a quorum. failures: exchanges in a row that it has dropped."""

    server: Server
    step: int
    failures: int


class Quorum(NamedTuple):
    """Who is in an exchange. number: as torchft counts them. serial: no two have the same. time: when it is told."""

    number: int
    serial: int
    time: float
    members: list[Member]


class Lighthouse:
    """torchft's lighthouse. heard: when an island's last heartbeat came. asked: since when an island asks."""

    def __init__(self, network: Network):
        self.network, self.world, self.down = network, network.world, 0.0
        self.heard, self.asked = dict[Server, float](), dict[Server, tuple[float, Member]]()
        self.servers, self.before, self.number, self.serial = list[Server](), list[Server](), 0, 0
        self.world.at(TICK, self.look)

    def restart(self, seconds: float) -> None:
        """Forget everything, and answer nobody for some seconds."""
        self.down, self.before, self.number, waiting = self.world.now + seconds, [], 0, [*self.asked.values()]
        self.asked, self.heard = {}, {}
        for _, member in waiting:
            self.world.at(self.down + RETRY * self.world.draw.random(), partial(self.ask, member))

    def ask(self, member: Member) -> None:
        """Hear from an island that it asks for a quorum; it asks again while nobody answers."""
        server, now = member.server, self.world.now
        if not server.is_asking(member):
            return
        if now < self.down or not server.reaches_lighthouse():
            self.world.at(now + RETRY, partial(self.ask, member))
            return
        self.heard[server], self.asked[server] = now, (now, member)
        self.decide()

    def look(self) -> None:
        """Hear heartbeats, and decide."""
        if self.world.now >= self.down:
            self.heard |= {server: self.world.now for server in self.servers if server.reaches_lighthouse()}
            self.decide()
        self.world.at(self.world.now + TICK, self.look)

    def decide(self) -> None:
        """Found a quorum, if there is one: as `quorum_compute` of torchft's lighthouse.rs, for one island or more."""
        now = self.world.now
        healthy = [server for server, time in self.heard.items() if now - time < HEARTBEAT]
        there = {server: asked for server, asked in self.asked.items() if server in healthy}
        if not (self.before and all(server in there for server in self.before)):
            if not there or 2 * len(there) <= len(healthy):
                return
            if len(there) < len(healthy) and now - min(time for time, _ in there.values()) < JOIN:
                return
        members = sorted((member for _, member in there.values()), key=lambda member: member.server.name)
        servers = [member.server for member in members]
        # A new process group for others, and where an exchange was dropped.
        self.number += servers != self.before or any(member.failures for member in members)
        self.serial, self.before = self.serial + 1, servers
        self.asked = {server: (now, asked[1]) for server, asked in self.asked.items() if server not in servers}
        for member in members:
            if member.server.is_asking(member):
                time = self.network.arrival(LIGHTHOUSE, member.server.island)
                member.server.answers.append(Quorum(self.number, self.serial, time, members))


class Server:
    """The part of torchft that an island's first rank hosts. name: sorts islands, and is never used again."""

    def __init__(self, lighthouse: Lighthouse, processes: Sequence[Process]):
        self.lighthouse, self.world, self.processes = lighthouse, lighthouse.world, processes
        self.island, self.answers = processes[0].island, list[Quorum]()
        self.name = f"island_{self.island}:{self.world.draw.random()}"
        self.asked, self.votes = defaultdict[int, list[Member]](list), defaultdict[int, list[bool]](list)
        lighthouse.servers.append(self)

    def reaches_lighthouse(self) -> bool:
        """Return whether a message from here would leave, and arrive."""
        first, now = self.processes[0], self.world.now
        return first.ended == inf and first.rests <= now >= self.lighthouse.network.whole(self.island, LIGHTHOUSE, now)

    def is_asking(self, member: Member) -> bool:
        """Return whether a question is not answered yet."""
        return self.processes[0].ended == inf and member in self.asked[len(self.answers)]

    def quorum(self, number: int, member: Member) -> Quorum:
        """Return the quorum of a number once all ranks have asked for it."""
        self.asked[number].append(member)
        if len(self.asked[number]) == len(self.processes):
            arrival = self.lighthouse.network.arrival(self.island, LIGHTHOUSE)
            self.world.at(arrival, partial(self.lighthouse.ask, member))
        there = lambda: self.answers[number].time if number < len(self.answers) else inf  # noqa: E731
        self.world.pause(there, "a quorum")
        return self.answers[number]

    def vote(self, number: int, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        votes = self.votes[number]
        votes.append(yes)
        if not self.world.wait_for(lambda: len(votes) == len(self.processes), "votes", 2 * PATIENCE):
            raise TimeoutError("a rank of this island did not vote")
        return all(votes)


class Manager:
    """torchft's Manager as the adapter knows it.

    present: the quorum. told: of each exchange: when its quorum was there, when it was voted on, of how many islands,
    whether it was written, and its serial number. meetings: where the islands of a quorum open their connections.
    """

    def __init__(self, server: Server, process: Process, meetings: dict[Any, dict[int, Process] | Ring]):
        self.server, self.process, self.meetings, self.world = server, process, meetings, server.world
        self.group, self.step, self.failures, self.number, self.asked, self.rank = Group(), 0, 0, -1, 0, 0
        self.error: Exception | None = None
        self.present = Quorum(-1, -1, 0.0, [])
        self.heals, self.found = list[Callable[[Any], None]](), 0.0
        self.told = list[tuple[float, float, int, bool, int]]()

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Register what is called where others wrote an exchange which this island did not."""
        self.heals.append(load)

    def start_quorum(self) -> None:
        """Find the islands of the next exchange, and meet them."""
        self.error, place = None, self.process.rank
        self.asked += 1
        self.present = self.server.quorum(self.asked - 1, Member(self.server, self.step, self.failures))
        self.found, (number, serial, _, members) = self.world.now, self.present
        self.rank = [member.server for member in members].index(self.server)
        latest = max(member.step for member in members)
        first = [member.server for member in members if member.step == latest]
        if number != self.number:
            self.number = number
            self.group.abort()
            try:
                self.meet((serial, place), len(members))
            except RuntimeError as error:
                self.report_error(error)
                return
        behind = [i for i, member in enumerate(members) if member.step != latest]
        if self.rank in behind:
            source = first[(behind.index(self.rank) + place) % len(first)]
            if source.processes[place].ended < inf:
                self.report_error(RuntimeError("the island that was to send its step is lost"))
                return
            for load in self.heals:
                load({})
            self.step = latest

    def meet(self, key: Any, size: int) -> None:
        """Open connections to the same rank of all islands. Raises: RuntimeError if they do not come."""
        network, came = self.server.lighthouse.network, self.meetings.setdefault(key, {})
        assert isinstance(came, dict)
        came[self.rank] = self.process
        arrival = max(network.arrival(self.process.island, other.island) for other in came.values())
        if len(came) == size:
            self.meetings[key] = Ring(network, [came[r] for r in range(size)], PATIENCE)
        network.reach_out(self.process)
        there = lambda: arrival if isinstance(self.meetings[key], Ring) else inf  # noqa: E731
        if not self.world.pause(there, "the islands of a quorum", MEETING):
            raise RuntimeError("Timed out meeting the islands of a quorum")
        self.group.ring, self.group.rank = self.meetings[key], self.rank  # type: ignore[assignment]

    def state_dict(self) -> dict[str, int]:
        """Return how many exchanges were written."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set how many exchanges were written."""
        self.step = state["step"]

    def errored(self) -> Exception | None:
        """Return what went wrong since the last quorum."""
        return self.error

    def report_error(self, error: Exception) -> None:
        """Hear that something went wrong: then this rank votes against the exchange."""
        self.error = error

    def is_participating(self) -> bool:
        """Return whether this island is in the quorum."""
        return self.num_participants() > 0

    def num_participants(self) -> int:
        """Return how many islands are in the quorum."""
        return len(self.present.members)

    def participating_rank(self) -> int:
        """Return the number of this island in the quorum."""
        return self.rank

    def current_step(self) -> int:
        """Return how many exchanges were written."""
        return self.step

    def should_commit(self) -> bool:
        """Return whether all ranks of this island say that the exchange has come."""
        written = self.server.vote(len(self.told), self.error is None)
        self.step, self.failures = self.step + written, 0 if written else self.failures + 1
        self.told.append((self.found, self.world.now, self.num_participants(), written, self.present.serial))
        return written
