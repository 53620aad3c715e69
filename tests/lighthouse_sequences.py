"""Islands that join, ask for a quorum, fall silent, come back and leave, while a lighthouse may restart.

A sequence is a list of events, one in each slot: "join x", "ask x STEP FAILURES", "silent x", "back x", "leave x",
"restart". Heartbeats come from who has joined, or asked, until it is silent or leaves. `play` plays one to a
lighthouse, of which `StandIn` is that of `fn.testing.world`; torchft's own is in
`adapters/test_torchft_lighthouse.py`, and what it told is recorded in `golden/lighthouse`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fn.testing.world import quorum

FILE = Path(__file__).parent / "golden" / "lighthouse" / "sequences.json"
EVENTS = 36

SLOT = 8.5 * quorum.TICK
"""Seconds between two events, so chosen that no clock decides: heartbeats that end at an event expire 0.41 slots later
in one of the next slots, the wait for islands that have not asked ends there 0.71 slots later, and until a lighthouse
looks 0.12 slots may pass."""


class Told(NamedTuple):
    """A quorum: the slot in which it was told, its number, its members in order, and at which steps these are.

    steps: None if all members have failures, for torchft tells each such one only how far the foremost is.
    """

    slot: int
    number: int
    members: list[str]
    steps: list[int] | None


def drawn(seed: int) -> list[str]:
    """Draw a sequence."""
    chance, numbers = random.Random(seed), itertools.count()
    asked, silent, events = dict[str, int](), set[str](), list[str]()

    while len(events) < EVENTS:
        awake = [name for name in asked if name not in silent]
        what = chance.choices(["ask", "join", "silent", "back", "leave", "restart"], [14, 1.2, 1.5, 3, 0.8, 0.5])[0]
        if len(asked) < 2 or (what == "join" and len(asked) < 5):
            name = f"{chance.choice('abcdefgh')}{next(numbers)}"  # names come in another order than islands
            asked[name] = chance.choice([0, 1])  # the first that a lighthouse hears of it is a heartbeat, or a question
            events.append(f"ask {name} 1 0" if asked[name] else f"join {name}")
        elif what == "ask" and awake:
            name = awake[0] if chance.random() < 0.7 else chance.choice(awake)  # most often who asked longest ago
            asked[name] = step = asked.pop(name) + 1
            failures = chance.choice([0, 0, 0, 1, 2]) if step > 1 else 0
            events.append(f"ask {name} {step} {failures}")
        elif what == "silent" and awake:
            silent.add(name := chance.choice(awake))
            events.append(f"silent {name}")
        elif what == "back" and silent:
            silent.remove(name := chance.choice(sorted(silent)))
            events.append(f"back {name}")
        elif what == "leave" and len(asked) > 2:
            asked.pop(name := chance.choice([*asked]))
            silent.discard(name)
            events.append(f"leave {name}")
        elif what == "restart" and events[-1] != "restart":
            events.append("restart")
    return events


def play(events: Sequence[str], lighthouse: Any) -> list[Told]:
    """Play a sequence; return the quorums. An island whose question is not answered yet does not ask another time."""
    present = set[str]()
    for slot, event in enumerate(events):
        lighthouse.wait(slot * SLOT)
        what, *words = event.split()
        if what == "restart":
            lighthouse.restart()
        elif what in ("join", "back"):
            present.add(words[0])
        for name in sorted(present):
            lighthouse.heartbeat(name, last=what in ("silent", "leave") and name in words)
        if what in ("silent", "leave"):
            present.discard(words[0])
        if what == "ask":
            present.add(words[0])
            if words[0] not in lighthouse.waiting():
                lighthouse.ask(words[0], int(words[1]), int(words[2]))
    lighthouse.wait(len(events) * SLOT)
    return lighthouse.told()


def recorded() -> list[tuple[list[str], list[Told]]]:
    """Return the sequences, and the quorums that torchft's lighthouse told."""
    sequences = json.loads(FILE.read_text())["sequences"]
    return [(events, [Told(*told) for told in quorums]) for events, quorums in sequences]


class Island:
    """What the stand-in's lighthouse knows of a server: here one that asks when a sequence says so."""

    def __init__(self, name: str, number: int):
        self.name, self.island = name, number
        self.questions, self.answers, self.beats = list[quorum.Member](), list[quorum.Quorum](), False

    def is_asking(self, member: quorum.Member) -> bool:
        """Return whether a question is not answered yet."""
        return self.questions[len(self.answers) :] == [member]

    def reaches_lighthouse(self) -> bool:
        """Return whether its heartbeats arrive."""
        return self.beats


class StandIn:
    """The lighthouse of `fn.testing.world`, with a clock and a network where messages take no time."""

    def __init__(self) -> None:
        self.now, self.draw, self.world = 0.0, random.Random(0), self
        self.tasks, self.order, self.islands = list[Any](), itertools.count(), dict[str, Island]()
        self.lighthouse = quorum.Lighthouse(self)  # type: ignore[arg-type]

    def at(self, time: float, task: Callable[[], None]) -> None:
        """Call a task at a time."""
        heapq.heappush(self.tasks, (time, next(self.order), task))

    def arrival(self, a: int, b: int) -> float:
        """Return when a message arrives that leaves now."""
        return self.now

    def wait(self, time: float) -> None:
        """Let everything happen until a time."""
        while self.tasks[0][0] <= time:
            self.now, _, task = heapq.heappop(self.tasks)
            task()
        self.now = time

    def restart(self) -> None:
        """Begin anew; who waited for an answer has to ask again."""
        self.lighthouse.restart(0)
        for island in self.islands.values():
            del island.questions[len(island.answers) :]

    def heartbeat(self, name: str, last: bool) -> None:
        """Let heartbeats of an island come, or end."""
        if name not in self.islands:
            self.islands[name] = Island(name, len(self.islands))
            self.lighthouse.servers.append(self.islands[name])  # type: ignore[arg-type]
        self.islands[name].beats = not last

    def waiting(self) -> list[str]:
        """Return which islands wait for an answer."""
        return [name for name, island in self.islands.items() if len(island.questions) > len(island.answers)]

    def ask(self, name: str, step: int, failures: int) -> None:
        """Ask for a quorum."""
        self.heartbeat(name, last=False)
        island = self.islands[name]
        island.questions.append(quorum.Member(island, step, failures))  # type: ignore[arg-type]
        self.lighthouse.ask(island.questions[-1])

    def told(self) -> list[Told]:
        """Return the quorums."""
        quorums = {x.serial: x for island in self.islands.values() for x in island.answers}
        return [
            Told(
                int(x.time / SLOT), x.number, [member.server.name for member in x.members],
                None if all(member.failures for member in x.members) else [member.step for member in x.members],
            )
            for _, x in sorted(quorums.items())
        ]  # fmt: skip
