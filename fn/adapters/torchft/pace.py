"""How fast an island takes its local steps, whether it is late, and what the time of all islands goes into."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

SEEN = 20
"""Steps of a round, and arrivals, whose median counts: the last ones."""

LOOKS = 8
"""How often in a round an island looks whether it is late."""


class Host(threading.local):
    """The clock of the host, as this thread reads it: a simulation gives its threads another one."""

    seconds: Callable[[], float] = staticmethod(time.monotonic)


host = Host()


def now(device: torch.device) -> Any:
    """Return this moment in what is queued on a device: seconds on a CPU, else an event that nobody waits for."""
    if device.type == "cpu":
        return host.seconds()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def between(earlier: Any, later: Any) -> float:
    """Return the seconds between two moments; an accelerator is waited for."""
    if isinstance(earlier, float):
        return float(later - earlier)
    later.synchronize()
    return float(earlier.elapsed_time(later) / 1000)


def clock() -> float:
    """Return the seconds of the host."""
    return float(now(torch.device("cpu")))


class Goodput(NamedTuple):
    """What islands made of their time, in local steps, summed over all of them.

    could: what they could have taken at their own median speed, with those that were absent at the speed of the others.
    entered: what entered an exchange. waiting, exchanging: lost while they waited for a quorum, and from there to the
    end of an exchange. absent: to islands that were lost and had not joined again. The rest went to slow steps.
    """

    could: float = 0.0
    entered: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0
    absent: float = 0.0

    @property
    def share(self) -> float:
        """Return the goodput, up to 1."""
        return self.entered / self.could if self.could else 1.0

    def __str__(self) -> str:
        lost = {name: getattr(self, name) for name in ("waiting", "exchanging", "absent")}
        lost["slow steps"] = self.could - self.entered - sum(lost.values())
        parts = (f"{100 * x / (self.could or 1.0):.1f} % {name}" for name, x in lost.items())
        return f"{100 * self.share:.1f} % (lost: {', '.join(parts)})"


def goodput_of(words: Sequence[Any], islands: int) -> Goodput:
    """Return the goodput of a round.

    Args: words: what the islands told. islands: how many there were at most.
    """
    there = [of for of in words if of.joined and not of.behind and of.pace]
    if not there:
        return Goodput()
    absent = (islands - len(there)) * median(of.passed for of in there) / median(of.pace for of in there)
    sums = [sum(getattr(of, name) / of.pace for of in there) for name in ("passed", "waited", "exchanged")]
    entered = sum(of.speaks * of.entering for of in there)
    return Goodput(sums[0] + absent, entered, sums[1], sums[2], absent)


class Pace:
    """The moments of an island: its local steps, its arrivals at exchanges, and what its time went into.

    ends: of the last local steps of this round. arrivals: seconds of its last rounds. taken, before: local steps of
    this round and of the last one. began: when this round began. told: when the others were told of the time last.
    counted: the same in the last exchange that was written. waited, exchanged: seconds since that. goodput: of all
    islands since this one began. of_round: the same of the present exchange, until it is written.
    """

    def __init__(self, device: torch.device):
        self.device, self.ends, self.arrivals = device, deque[Any](maxlen=SEEN + 1), deque[float](maxlen=SEEN)
        self.taken = self.before = 0
        self.began = self.told = self.counted = clock()
        self.waited = self.exchanged = 0.0
        self.goodput = self.of_round = Goodput()

    def step(self) -> None:
        """Note that a local step has ended."""
        self.ends.append(now(self.device))
        self.taken += 1

    def seconds(self) -> float:
        """Return the median seconds of a step; 0 if none was timed."""
        return median(between(*pair) for pair in pairwise(self.ends)) if len(self.ends) > 1 else 0.0

    def arrive(self) -> None:
        """Note that a round ends."""
        self.arrivals.append(clock() - self.began)

    def begin(self) -> None:
        """Begin a round; the first of its steps is timed from now on."""
        self.began, self.before, self.taken = clock(), self.taken, 0
        self.ends.clear()
        self.ends.append(now(self.device))

    def is_late(self, k: float, least: float, most: float) -> bool:
        """Return whether this round lasts longer than the last ones: median + k MAD, within bounds of the second."""
        usual = median(self.arrivals)
        spread = median(abs(x - usual) for x in self.arrivals)
        return clock() - self.began > usual + min(max(k * spread, least), most)

    def ask(self) -> float:
        """Note that a quorum is asked for; return when."""
        self.told, self.of_round = clock(), Goodput()
        return self.told

    def tell(self, since: float) -> tuple[float, float, float]:
        """Return the seconds since the last exchange that was written, those of waiting, and those of exchanging.

        Args: since: when this island began to wait for the others.
        """
        self.told = clock()
        self.waited += self.told - since
        return self.told - self.counted, self.waited, self.exchanged

    def count(self) -> Goodput:
        """Add up the goodput of an exchange that is written; what was told before it counts no more. Return it."""
        self.counted, self.waited, self.exchanged = self.told, 0.0, 0.0
        self.goodput = Goodput(*map(sum, zip(self.goodput, self.of_round, strict=True)))
        return self.of_round

    def end(self) -> None:
        """Note that an exchange has ended, or is on its way."""
        self.exchanged += clock() - self.told
