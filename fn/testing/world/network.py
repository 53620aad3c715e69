"""What carries messages: links with a latency that may be cut, and groups of processes that talk over them.

A message that has not arrived when its sender ends is lost; one on a cut link arrives behind the cut. Who waits for a
process that has ended, or that has left the group, hears of it; of one that is silent it hears nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.collectives.transports.registry import Transport
from fn.errors import PeerLost
from fn.testing.world.scheduler import Process, Scheduler

LIGHTHOUSE = -1
"""The number of the lighthouse, as if it were an island."""


class Cut(NamedTuple):
    """A network in two parts: the islands of one of them, and for how long."""

    begin: float
    end: float
    side: frozenset[int]


class Network:
    """The links. cuts: that have been, and are.

    unsure: who did not hear that an exchange had come everywhere, when another did: no protocol can prevent that. Only
    of a message of a single number that is nobody's fault; what carries more is followed by one.
    """

    def __init__(self, world: Scheduler):
        self.world, self.cuts, self.unsure = world, list[Cut](), set[Process]()

    def is_cut(self, a: int, b: int, time: float) -> bool:
        """Return whether two islands are in different parts."""
        return any(cut.begin <= time < cut.end and (a in cut.side) != (b in cut.side) for cut in self.cuts)

    def arrival(self, a: int, b: int, size: int = 0, time: float | None = None) -> float:
        """Return when a message of so many bytes arrives that leaves at a time, now by default."""
        quick = 0.001 if a == b else 0.02
        there = (self.world.now if time is None else time) + quick * (1 + self.world.draw.random()) * (
            8 if size > 64 else 1
        )
        for cut in sorted(self.cuts):
            if cut.begin <= there < cut.end and (a in cut.side) != (b in cut.side):
                there = cut.end + quick
        return there


class Post(NamedTuple):
    """What a member sends in a call: its kind, a row for each member, and when each of these arrives."""

    kind: str
    rows: Sequence[Tensor]
    arrives: list[float]


class Ring:
    """The connections among some processes, over which each call sends from everyone to everyone."""

    def __init__(self, network: Network, members: Sequence[Process]):
        self.network, self.world, self.members = network, network.world, members
        self.calls, self.left = dict[int, dict[int, Post]](), [inf] * len(members)

    def until(self, call: dict[int, Post], me: int) -> tuple[float, bool]:
        """Return when a call ends for a member, and whether all have come by then."""
        last = 0.0
        for r, other in enumerate(self.members):
            gone = min(other.ended, self.left[r])
            if r != me and (r not in call or call[r].arrives[me] > other.ended):
                if gone == inf:
                    last = inf
                else:
                    return max(gone + 0.05, self.open_at(r, me, gone)), False
            elif r != me:
                last = max(last, call[r].arrives[me])
        return last, True

    def open_at(self, a: int, b: int, time: float) -> float:
        """Return the first time from one on at which the link between two members is whole."""
        islands = self.members[a].island, self.members[b].island
        return max(
            [
                time,
                *(c.end for c in self.network.cuts if c.begin <= time < c.end and self.network.is_cut(*islands, time)),
            ]
        )

    def exchange(self, me: int, number: int, kind: str, rows: Sequence[Tensor], limit: float) -> list[Tensor]:
        """Send a row to each member in the call of a number, and return what came. Raises: RuntimeError if not all did."""
        island, size = self.members[me].island, max(x.nbytes for x in rows)
        arrives = [self.network.arrival(island, other.island, size) for other in self.members]
        call = self.calls.setdefault(number, {})
        call[me] = Post(kind, [x.clone() for x in rows], arrives)
        self.world.pause(lambda: self.until(call, me)[0], limit, f"{kind} {number} of {len(self.members)}")
        time, came = self.until(call, me)
        if not came or time > self.world.now:
            if size <= 8:
                self.network.unsure.add(self.members[me])
            raise RuntimeError("Connection closed by peer" if not came else "Timed out waiting for a peer")
        if any(post.kind != kind for post in call.values()):
            self.world.end(
                f"{self.members[me]} is in {kind}, and others are in {[post.kind for post in call.values()]}"
            )
        return [call[r].rows[me] for r in range(len(self.members))]


class Seat:
    """A member's place in a ring. limit: seconds that a call may take."""

    def __init__(self, ring: Ring, rank: int, limit: float):
        self.ring, self.rank, self.limit, self.number = ring, rank, limit, 0

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.ring.members)

    def send(self, kind: str, rows: Sequence[Tensor]) -> list[Tensor]:
        """Take the next call."""
        self.number += 1
        return self.ring.exchange(self.rank, self.number, kind, rows, self.limit)

    def leave(self) -> None:
        """Close this member's connections: others hear of it."""
        self.ring.left[self.rank] = min(self.ring.left[self.rank], self.ring.world.now)


class Done:
    """A call that has ended."""

    def wait(self) -> None:
        """Return at once."""


class Group:
    """What the adapter calls of torchft's process group. parent: that of the present quorum."""

    def __init__(self) -> None:
        self.seat: Seat | None = None

    @property
    def parent(self) -> Seat:
        """Return the member's place of this quorum."""
        assert self.seat is not None, "process group not initialized"
        return self.seat

    def size(self) -> int:
        """Return the number of members."""
        return self.parent.size

    def abort(self) -> None:
        """Leave the present quorum."""
        if self.seat is not None:
            self.seat.leave()
        self.seat = None

    def alltoall_base(self, out: Tensor, x: Tensor, gets: list[int], sends: list[int], options: Any) -> Done:
        """Send a part of x to each member."""
        size = self.size()
        gets, sends = (parts or [len(x) // size] * size for parts in (gets, sends))
        rows = self.parent.send("all_to_all", x.split(sends))
        if [len(row) for row in rows] != gets:
            self.parent.ring.world.end(
                f"{self.parent.ring.world.process} expects {gets} numbers, and others send others"
            )
        out.copy_(torch.cat(rows) if sum(gets) else out)
        return Done()

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], options: Any) -> Done:
        """Send x to each member."""
        for out, row in zip(outs[0], self.parent.send("all_gather", xs * self.size()), strict=True):
            out.copy_(row)
        return Done()

    def allreduce(self, xs: list[Tensor], options: Any) -> Done:
        """Add up x over the members, in their order."""
        xs[0].copy_(torch.stack(self.parent.send("all_reduce", xs * self.size())).sum(0))
        return Done()


def within(seat: Seat) -> Transport:
    """Return the transport among the ranks of an island."""

    def send(kind: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            try:
                return torch.stack(seat.send(kind, x.unbind() if kind == "all_to_all" else [x] * seat.size))
            except RuntimeError as error:
                raise PeerLost(f"a rank of this island is lost: {error}") from error

        return run

    return Transport(send("all_to_all"), send("all_gather"), lambda x: send("psum")(x).sum(0))
