"""The part of a link's bandwidth that messages reach: by speed as published for a transport, given, or measured.

Over TCP it falls where one connection can no longer fill the link. Between published points it is on a straight line,
with both scales logarithmic, so that a faster link is never said to reach less unless the points say so; beyond them it
is that of the nearest point. RDMA, NVLink and MPI's own networks are another matter.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fn.planner.evidence import between, published, show_parts
from fn.planner.units import show_rate

NCCL = "nccl"
"""The transport that is assumed, that of GPUs."""


class Point(NamedTuple):
    """The parts of a bandwidth, in bit/s, that whole messages reach and those in buckets; where, and who says so."""

    bandwidth: float
    whole: float
    buckets: float
    where: str = ""
    source: str = ""


class Efficiency(NamedTuple):
    """The parts of a link's bandwidth that messages reach, by points, the slowest first. said: how they are known."""

    points: tuple[Point, ...]
    said: str = ""

    def at(self, bandwidth: float) -> tuple[float, float]:
        """Return the parts that whole messages reach, and those that leave in buckets."""
        x, at = math.log(bandwidth), [math.log(point.bandwidth) for point in self.points]
        whole = math.exp(between(x, at, [math.log(point.whole) for point in self.points]))
        return whole, math.exp(between(x, at, [math.log(point.buckets) for point in self.points]))

    def words(self, bandwidth: float) -> str:
        """Return a line about links between nodes: what is reached, and how that is known."""
        whole, buckets = self.at(bandwidth)
        below = [p for p in self.points if p.bandwidth <= bandwidth]
        above = [p for p in self.points if p.bandwidth >= bandwidth]
        near = dict.fromkeys((*below[-1:], *above[:1]))
        known = ", ".join(dict.fromkeys((*(p.where for p in near), *(p.source for p in near))))
        reached, less = whole * bandwidth, ""
        most, best = max(((p.whole * p.bandwidth, p.where) for p in below), default=(0.0, ""))
        if most > (1 + 1e-9) * reached:
            less = f" These {show_rate(reached)} are less than the {show_rate(most)} of {best}: so it was published."
        if len(self.points) > 1 and not above:
            less += f" Above {show_rate(self.points[-1].bandwidth)} nothing is published: that part is a guess."
        return (
            f"Links between nodes: whole messages reach {show_parts((whole,))} of {show_rate(bandwidth)}, those in "
            f"buckets {show_parts((buckets,))}; {self.said}{known}.{less}"
        )

    def with_buckets(self, part: float, said: str = "") -> Efficiency:
        """Return it with another part for messages in buckets, on links of every speed."""
        return Efficiency(tuple(point._replace(buckets=part) for point in self.points), said)


FULL = Efficiency((Point(1.0, 1.0, 1.0),), "no losses are counted")
"""All of the bandwidth, on links of every speed."""


def transports() -> tuple[str, ...]:
    """Return the transports whose efficiency is published."""
    return tuple(published()["links"]["transports"])


def share_of_buckets() -> float:
    """Return what messages in buckets reach of what whole ones do, where both are published."""
    slow = published()["links"]["slow"]
    return float(slow["buckets"] / slow["whole"])


def over_tcp(transport: str = NCCL, *, whole: float | None = None, buckets: float | None = None) -> Efficiency:
    """Return what messages of a transport reach over TCP.

        >>> over_tcp("nccl").points[-1].whole, over_tcp("gloo").points[-1].whole
        (0.45, 0.18)

    Args: transport: one of `transports()`. whole, buckets: parts that are given, in place of the published ones.
    """
    links = published()["links"]
    if whole is None:
        points = tuple(map(_point, (links["slow"], *links["transports"][transport])))
        found = Efficiency(points, PUBLISHED)
        return found if buckets is None else found.with_buckets(buckets, f"--bucket-efficiency; {PUBLISHED}")
    if buckets is None:
        return constant(whole, whole * share_of_buckets(), f"--whole-efficiency; {share_words()}")
    return constant(whole, buckets, "--whole-efficiency, --bucket-efficiency")


PUBLISHED = "published for TCP (over RDMA give --whole-efficiency): "


def constant(whole: float, buckets: float, said: str) -> Efficiency:
    """Return parts that hold for links of every speed."""
    return Efficiency((Point(1.0, whole, buckets),), said)


def share_words() -> str:
    """Return how the part of messages in buckets is known where only that of whole ones is given or measured."""
    slow = published()["links"]["slow"]
    return f"buckets have {show_parts((share_of_buckets(),))} of that, as {slow['where']}, {slow['source']}"


def _point(found: dict[str, Any]) -> Point:
    buckets = found.get("buckets", found["whole"] * share_of_buckets())
    return Point(float(found["bits_per_second"]), found["whole"], buckets, found["where"], found["source"])
