"""What a seed stands for: islands, what they train, and the faults that happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fn
from fn.arguments import checked
from fn.schedules import Schedule

H, SHAPES = 4, [(4, 4), (8,), (2, 4)]
"""Local steps of a round, and the shapes of what is trained: as long as codes like them, without padding."""

METHODS: dict[str, Callable[..., Any]] = {
    "DiLoCo": partial(fn.diloco, weight_decay=0.0),
    "DiLoCo in 8 bits": partial(fn.diloco, weight_decay=0.0, codec=fn.int8(), servers=False),
    "DiLoCo in signs": partial(fn.diloco, weight_decay=0.0, codec=fn.sign(), servers=False),
    "local SGD in 4 bits": partial(fn.local_sgd, codec=fn.int4(), servers=False),
}
RATES = {"local SGD in 4 bits": 0.3, "DiLoCo in signs": 0.1}
"""Learning rates other than 0.2."""

LARGEST = {"local SGD in 4 bits": 0.03, "DiLoCo in signs": 0.6}
"""The largest loss in the end of rounds in steps where that is not 0.3."""

KILLS = ("kill", "kill a rank", "kill in an exchange", "kill in an exchange")
KINDS = (*KILLS, "stop", "cut", "lighthouse", "full disk", "jump", "slow")
LASTING = ("full disk", "stop", "cut", "lighthouse", "slow")
"""Faults that last. All but the first may cost any island its work: who is left out meanwhile is behind."""


class Event(NamedTuple):
    """A fault. seconds: for how long. other: a number whose meaning is the kind's: a rank, a message, a direction."""

    time: float
    kind: str
    island: int
    seconds: float
    other: int

    def __str__(self) -> str:
        return f"{self.time:8.2f} s  island {self.island}  {self.kind}, for {self.seconds:.1f} s ({self.other})"


class Plan(NamedTuple):
    """What happens in a run.

    seconds: of a round of `fn.every_seconds`; 0: they have `H` steps. pace: each island's seconds a step. saves: steps
    from one checkpoint to the next; 0: there is none. unlike: whether islands say that they have other kernels. warm:
    steps of the warm-up.
    """

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
    warm: int
    events: tuple[Event, ...]

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of an island, a new one."""
        if self.seconds:
            return fn.every_seconds(self.seconds)
        return fn.every(H, fragments=self.fragments, delay=self.delay, start=self.warm)

    @property
    def make(self) -> Callable[..., Any]:
        """Return the method."""
        return partial(METHODS[self.method], **({"fragments": self.fragments} if self.fragments > 1 else {}))

    @property
    def largest(self) -> float:
        """Return the largest loss in the end, which is 2 at the start.

        Of signs of rounds in seconds, which have up to 15 steps, more cannot be said: without a fault, too, they end
        anywhere below it.
        """
        return 2.0 if self.seconds and self.method == "DiLoCo in signs" else LARGEST.get(self.method, 0.3)

    def __str__(self) -> str:
        schedule = f"each {self.seconds:.1f} s" if self.seconds else f"{self.fragments} fragments, delay {self.delay}"
        more = [name for name in ("counts_tokens", "unlike", "saves", "warm") if getattr(self, name)]
        return ", ".join([f"{self.islands} islands of {self.ranks} ranks", self.method, schedule, *more])


@checked("seed")
def drawn(seed: int) -> Plan:
    """Return the plan of a seed.

    Args: seed: any whole number. Raises: TypeError for another kind.
    """
    draw = random.Random(seed)
    islands, method, more = draw.choice([2, 2, 3, 3, 4, 5]), draw.choice([*METHODS]), draw.random()
    fragments = 2 if method.startswith("DiLoCo") and more < 0.4 else 1
    delay = draw.choice([0, 0, 1] if fragments > 1 else [0, 0, 1, 2])
    seconds = draw.uniform(1.0, 3.0) if fragments == 1 and not delay and draw.random() < 0.4 else 0.0
    pace = tuple(draw.uniform(0.2, 0.6) for _ in range(islands))
    time, events = 6.0, list[Event]()
    for kind in [draw.choice(KILLS), *(draw.choice(KINDS) for _ in range(draw.randint(2, 4)))]:
        time += draw.uniform(0.5, 8.0)
        lasts = draw.choice([draw.uniform(0.5, 4.0), draw.uniform(4.0, 20.0)])
        events.append(Event(time, kind, draw.randrange(islands), lasts, draw.randrange(12)))
    counts_tokens, unlike, saves = draw.random() < 0.5, draw.random() < 0.25, draw.choice([0, 4, 9])
    warm = 0 if seconds or unlike else draw.choice([0, 0, 10])  # unlike islands have no warm-up
    flags = counts_tokens, unlike, saves, warm
    return Plan(seed, islands, 1 + seed % 2, method, fragments, delay, seconds, pace, *flags, tuple(events))
