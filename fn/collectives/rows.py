"""Exchanges of rows on the host that copy no row of this rank's own: `swap_rows` and `fill_rows`.

They are `all_to_all` and `all_gather` for a step in memory that it has. They are not traced, and not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fn.collectives import axis as axes
from fn.collectives import primitives
from fn.collectives.ledger import record
from fn.collectives.observe import step_range
from fn.collectives.rendezvous import connections
from fn.collectives.sockets import Connections, bytes_of
from fn.collectives.transports import registered
from fn.kernels import buffers
from fn.kernels.eager import is_eager

Parts = Sequence[memoryview]


class Direct(NamedTuple):
    """How rows of an axis go over connections of our own. size: ranks. me: this one."""

    axis: str
    size: int
    me: int
    transport: str
    connections: Connections

    def pass_rows(self, collective: str, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> None:
        """Send bytes to every other rank and fill bytes from it, and count them as a collective's.

        Raises: `PeerLost` if a rank ends or does not answer in time.
        """
        record(self.axis, collective, sum(len(part) for parts in sends.values() for part in parts))
        with primitives.losses_named(collective, self.transport):
            self.connections.exchange(sends, receives)


def direct(tensors: Sequence[Tensor], axis: str) -> Direct | None:
    """Return the way over connections of our own; None where a collective carries tensors like these."""
    size, rank, transport = axes.resolve(axis)
    if size == 1 or transport in registered or transport == axes.SIMULATED or not is_eager(*tensors):
        return None
    if any(t.device.type != "cpu" for t in tensors) or not any(t.numel() for t in tensors):
        return None
    found = connections(primitives.group_of(transport))
    return None if found is None else Direct(axis, size, int(rank), transport, found)


def swap_rows(rows: Sequence[Tensor], axis: str) -> list[Tensor]:
    """Exchange rows: entry r of the result is the row that rank r held for this rank.

    Args: rows: W contiguous tensors of one shape, entry r for rank r. axis: the axis' name.
    Returns: as many tensors of that shape; this rank's own is the one that was given.
    Raises: as `all_to_all`.
    """
    way = direct(rows, axis)
    with step_range("exchange"):
        if way is None:
            found = primitives.all_to_all(torch.stack(list(rows)), axis) if len(rows) > 1 else rows[0][None]
            return [*found.unbind(0)]
        received = [row if r == way.me else buffers.empty(row.shape, row.dtype) for r, row in enumerate(rows)]
        others = [p for p in range(way.size) if p != way.me]
        sends, receives = ({p: [bytes_of(each[p])] for p in others} for each in (rows, received))
        way.pass_rows("all_to_all", sends, receives)
        return received


def fill_rows(out: Tensor, axis: str) -> None:
    """Write row r of rank r into row r of `out` on all ranks.

    Args: out: (W, ...), contiguous, of which this rank's own row is there. axis: the axis' name.
    Raises: as `all_gather`.
    """
    way = direct([out], axis)
    with step_range("gather"):
        if way is None:
            if out.shape[0] > 1:
                out.copy_(primitives.all_gather(out[int(axes.axis_index(axis))], axis))
            return
        mine, others = [bytes_of(out[way.me])], [p for p in range(way.size) if p != way.me]
        way.pass_rows("all_gather", dict.fromkeys(others, mine), {p: [bytes_of(out[p])] for p in others})
