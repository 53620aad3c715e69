"""What a seed stands for: islands, what they train, and the faults that happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fn
from fn.schedules import Schedule

H = 4
"""Local steps of a round."""

METHODS: dict[str, Callable[..., Any]] = {
    "DiLoCo": partial(fn.diloco, weight_decay=0.0),
    "DiLoCo in 8 bits": partial(fn.diloco, weight_decay=0.0, codec=fn.int8(), servers=False),
    "DiLoCo in signs": partial(fn.diloco, weight_decay=0.0, codec=fn.sign(), servers=False),
    "local SGD in 4 bits": partial(fn.local_sgd, codec=fn.int4(), servers=False),
}


class Event(NamedTuple):
    """A fault. seconds: for how long. other: a number whose meaning is the kind's: a rank, a side, a jump."""

    time: float
    kind: str
    island: int
    seconds: float = 0.0
    other: int = 0

    def __str__(self) -> str:
        return f"{self.time:7.2f} s  island {self.island}  {self.kind}, for {self.seconds:.1f} s ({self.other})"


KINDS = ("kill", "kill", "kill", "kill a rank", "stop", "cut", "lighthouse", "full disk", "jump", "slow")


class Plan(NamedTuple):
    """What happens in a run. pace: each island's seconds a step. saves: steps from one checkpoint to the next, or 0."""

    seed: int
    islands: int
    ranks: int
    method: str
    fragments: int
    delay: int
    seconds: float
    pace: tuple[float, ...]
    counts_tokens: bool
    unlike: bool
    saves: int
    events: tuple[Event, ...]

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of an island, a new one."""
        if self.seconds:
            return fn.every_seconds(self.seconds)
        return fn.every(H, fragments=self.fragments, delay=self.delay)

    @property
    def make(self) -> Callable[..., Any]:
        """Return the method."""
        parts = {"fragments": self.fragments} if self.fragments > 1 else {}
        return partial(METHODS[self.method], **parts)

    def __str__(self) -> str:
        schedule = f"each {self.seconds:.1f} s" if self.seconds else f"{self.fragments} fragments, delay {self.delay}"
        more = [name for name in ("counts_tokens", "unlike") if getattr(self, name)] + ["saves"] * bool(self.saves)
        return ", ".join([f"{self.islands} islands of {self.ranks} ranks", self.method, schedule, *more])


def drawn(seed: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(seed)
    islands, ranks = draw.choice([2, 2, 3, 3, 4, 5]), 1 + seed % 2
    method = draw.choice([*METHODS])
    fragments = 2 if method.startswith("DiLoCo") and draw.random() < 0.4 else 1
    delay = draw.choice([0, 0, 1] if fragments > 1 else [0, 0, 1, 2])
    seconds = draw.uniform(1.0, 3.0) if fragments == 1 and not delay and draw.random() < 0.4 else 0.0
    pace = tuple(draw.uniform(0.2, 0.6) for _ in range(islands))
    kinds = ["kill", *(draw.choice(KINDS) for _ in range(draw.randint(2, 4)))]
    time, events = 6.0, list[Event]()
    for kind in kinds:
        time += draw.uniform(0.5, 8.0)
        island = draw.randrange(islands)
        events.append(
            Event(time, kind, island, draw.choice([draw.uniform(0.5, 4.0), draw.uniform(4.0, 20.0)]), draw.randrange(2))
        )
    more = draw.random() < 0.5, draw.random() < 0.25
    return Plan(
        seed, islands, ranks, method, fragments, delay, seconds, pace, *more, draw.choice([0, 4, 9]), tuple(events)
    )
