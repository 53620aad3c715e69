"""What carries messages: links with a latency that may be cut, and groups of processes that talk over them.

A message that has not arrived when its sender ends is lost; one on a cut link arrives behind the cut. Who waits for a
process that has ended, or that has left the group, hears of it; of one that is silent it hears nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from fn.collectives.transports.registry import Transport
from fn.errors import PeerLost
from fn.testing.world.scheduler import Process, Scheduler

LIGHTHOUSE = -1
"""The number of the lighthouse, as if it were an island."""


class Network:
    """The links. cuts: (begin, end, the islands of one part).

    fuses: what happens where a process reaches out to other islands. unsure: who did not hear that an exchange had come
    everywhere, when another did: no protocol can prevent that. Only of a message of a single number that is nobody's
    fault; what carries more is followed by one.
    """

    def __init__(self, world: Scheduler):
        self.world, self.unsure = world, set[Process]()
        self.cuts, self.fuses = list[tuple[float, float, frozenset[int]]](), dict[Process, Callable[[], None]]()

    def whole(self, a: int, b: int, time: float) -> float:
        """Return the first time from one on at which the link between two islands is whole."""
        for begin, end, side in sorted(self.cuts, key=lambda cut: cut[:2]):
            time = end if begin <= time < end and (a in side) != (b in side) else time
        return time

    def reach_out(self, process: Process) -> None:
        """Note that a process meets other islands now, or sends to them."""
        self.fuses.get(process, lambda: None)()

    def arrival(self, a: int, b: int, size: int = 0) -> float:
        """Return when a message of so many bytes arrives that leaves now."""
        seconds = (0.001 if a == b else 0.02) * (1 + self.world.draw.random()) * (8 if size > 64 else 1)
        return self.whole(a, b, self.world.now + seconds)


class Ring:
    """The connections among some processes, over which each call sends from everyone to everyone.

    limit: seconds that a call may take. calls: number -> member -> its kind, its rows, and when each of these arrives.
    """

    def __init__(self, network: Network, members: Sequence[Process], limit: float):
        self.network, self.world, self.members, self.limit = network, network.world, members, limit
        self.calls = dict[int, dict[int, tuple[str, list[Tensor], list[float]]]]()
        self.left, self.numbers = [inf] * len(members), [0] * len(members)

    def until(self, number: int, me: int) -> tuple[float, bool]:
        """Return when a call ends for a member, and whether all have come by then."""
        last, call, here = 0.0, self.calls[number], self.members[me].island
        for r, other in enumerate(self.members):
            if r == me:
                continue
            if r in call and call[r][2][me] <= other.ended:
                last = max(last, call[r][2][me])
            elif (gone := min(other.ended, self.left[r])) < inf:
                return self.network.whole(other.island, here, gone + 0.05), False
            else:
                last = inf
        return last, True

    def exchange(self, me: int, kind: str, rows: Sequence[Tensor]) -> list[Tensor]:
        """Send a row to each member; return what came from each. Raises: RuntimeError if not all did."""
        self.numbers[me] = number = self.numbers[me] + 1
        island, size = self.members[me].island, max(x.nbytes for x in rows)
        arrives = [self.network.arrival(island, other.island, size) for other in self.members]
        call = self.calls.setdefault(number, {})
        call[me] = kind, [x.clone() for x in rows], arrives
        if self.members[0].island != self.members[-1].island:
            self.network.reach_out(self.members[me])
        self.world.pause(lambda: self.until(number, me)[0], f"{kind} {number}", self.limit)
        time, came = self.until(number, me)
        if not came or time > self.world.now:
            self.network.unsure |= {self.members[me]} if size <= 8 else set()
            raise RuntimeError("Timed out waiting for a peer" if came else "Connection closed by peer")
        if len({kind for kind, *_ in call.values()}) > 1:
            self.world.end(f"{self.members[me]} is in {kind}, and others are not")
        return [call[r][1][me] for r in range(len(self.members))]


class Group:
    """What the adapter calls of torchft's process group. ring: of the present quorum."""

    ring: Ring | None = None
    rank = 0

    @property
    def parent(self) -> Ring:
        """Return the connections of this quorum."""
        assert self.ring is not None, "process group not initialized"
        return self.ring

    def size(self) -> int:
        """Return the number of members."""
        return len(self.parent.members)

    def abort(self) -> None:
        """Leave the present quorum: others hear of it."""
        if self.ring is not None:
            self.ring.left[self.rank] = self.ring.world.now
        self.ring = None

    def alltoall_base(self, out: Tensor, x: Tensor, gets: list[int], sends: list[int], options: Any) -> Group:
        """Send a part of x to each member."""
        gets, sends = (parts or [len(x) // self.size()] * self.size() for parts in (gets, sends))
        rows = self.parent.exchange(self.rank, "all_to_all", x.split(sends))
        if [len(row) for row in rows] != gets:
            self.parent.world.end(f"{self.parent.members[self.rank]} expects {gets} numbers, and others send others")
        elif sum(gets):
            out.copy_(torch.cat(rows))
        return self

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], options: Any) -> Group:
        """Send x to each member."""
        for out, row in zip(outs[0], self.parent.exchange(self.rank, "all_gather", xs * self.size()), strict=True):
            out.copy_(row)
        return self

    def allreduce(self, xs: list[Tensor], options: Any) -> Group:
        """Sum x over the members, in their order."""
        rows = self.parent.exchange(self.rank, "all_reduce", xs * self.size())
        xs[0].copy_(torch.stack(rows).sum(0))
        return self

    def wait(self) -> None:
        """Return at once: a call has ended when it returns."""


def within(ring: Ring, rank: int) -> Transport:
    """Return the transport among the ranks of an island."""

    def gather(x: Tensor) -> Tensor:
        try:
            return torch.stack(ring.exchange(rank, "all_gather", [x] * len(ring.members)))
        except RuntimeError as error:
            raise PeerLost(f"a rank of this island is lost: {error}") from error

    return Transport(lambda x: gather(x)[:, rank], gather, lambda x: gather(x).sum(0))
