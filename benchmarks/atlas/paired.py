"""Comparisons that a reader can believe: rates that are searched elsewhere, and differences that are paired by seed.

A learning rate is chosen on a split and a seed that are not reported: `Search`. What is reported are losses of other
seeds on another split, and their differences to a base's losses of the same seeds, with an interval: `difference`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from scipy.stats import t as student

FACTOR, MOST = 1.8, 6
"""From one learning rate that is tried to the next, and the most such steps up or down."""


def rate_at(start: float, place: int) -> float:
    """Return the learning rate so many factors above the one that a search begins at, in three digits.

    >>> [rate_at(3e-3, place) for place in (-1, 0, 1)]
    [0.00167, 0.003, 0.0054]
    """
    return float(f"{start * FACTOR**place:.3g}")


class Search(NamedTuple):
    """A search for a learning rate. best: the place of the lowest loss so far. missing: the places to try next."""

    best: int | None
    missing: tuple[int, ...]

    @property
    def chosen(self) -> int | None:
        """Return the place of the rate that is chosen; None before the search is over."""
        return None if self.missing else self.best


def search(start: float, losses: Mapping[float, float]) -> Search:
    """Return where a search stands: three rates at first, then further ones until the best is at no edge.

    Args: losses: of the rates that were tried, infinity or NaN for one that diverged.

    >>> search(1.0, {1.0: 0.5, 1.8: 0.4})
    Search(best=None, missing=(-1,))
    >>> search(1.0, {0.556: 0.6, 1.0: 0.5, 1.8: 0.4})
    Search(best=1, missing=(2,))
    """
    places = {place: losses[rate] for place in range(-MOST, MOST + 1) if (rate := rate_at(start, place)) in losses}
    if first := tuple(place for place in (-1, 0, 1) if place not in places):
        return Search(None, first)
    best = min(places, key=lambda place: places[place] if math.isfinite(places[place]) else math.inf)
    return Search(best, tuple(p for p in (best - 1, best + 1) if p not in places and abs(p) <= MOST))


class Difference(NamedTuple):
    """The mean of differences that are paired by seed, and half of its 95 % interval (Student's t)."""

    mean: float
    half: float

    @property
    def verdict(self) -> str:
        """Return what the interval shows: "higher", "lower", or that it shows neither."""
        if not math.isfinite(self.mean):
            return "diverged on a seed"
        return "not told apart" if abs(self.mean) <= self.half else "higher" if self.mean > 0 else "lower"

    def bold(self) -> str:
        """Spell it in three digits, bold where the interval does not hold zero."""
        if not math.isfinite(self.mean):
            return "diverged on a seed"
        return format(self, ".3f") if self.verdict == "not told apart" else f"**{self:.3f}**"

    def __format__(self, spec: str) -> str:
        return f"{self.mean:+{spec or '.4f'}} ± {self.half:{spec or '.4f'}}"

    def __str__(self) -> str:
        return format(self)


def difference(of: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Return how far values are from a base's values of the same seeds; None where fewer than two seeds have both.

    >>> print(difference({1: 2.0, 2: 2.1, 3: 2.2}, {1: 1.9, 2: 2.0, 3: 2.05}))
    +0.1167 ± 0.0717
    """
    pairs = [of[seed] - base[seed] for seed in of if seed in base]
    if len(pairs) < 2:
        return None
    if not all(map(math.isfinite, pairs)):
        return Difference(math.nan, math.nan)
    mean, spread = statistics.fmean(pairs), statistics.stdev(pairs)
    return Difference(mean, float(student.ppf(0.975, len(pairs) - 1)) * spread / math.sqrt(len(pairs)))
