"""Exchanges of rows on the host that copy no row of this rank's own: `swap_rows` and `fill_rows`.

They are `all_to_all` and `all_gather` for a step in memory that it has. They are not traced, and not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fn.collectives import axis as axes
from fn.collectives import primitives
from fn.collectives.observe import step_range
from fn.collectives.peers import is_loss, peer_lost
from fn.collectives.rendezvous import connections
from fn.collectives.sockets import Connections
from fn.collectives.transports import registered
from fn.kernels import buffers


def swap_rows(rows: Sequence[Tensor], axis: str) -> list[Tensor]:
    """Exchange rows: entry r of the result is the row that rank r held for this rank.

    Args: rows: W contiguous tensors of one shape, entry r for rank r. axis: the axis' name.
    Returns: as many tensors of that shape; this rank's own is the one that was given.
    Raises: as `all_to_all`.
    """
    size, rank, transport = axes.resolve(axis)
    others = _connections(rows[0], size, transport)
    with step_range("exchange"):
        if others is None:
            found: Tensor = primitives.all_to_all(torch.stack(list(rows)), axis) if size > 1 else rows[0][None]
            return list(found.unbind(0))
        primitives.count(rows[0], axis, "all_to_all", size - 1, 1)
        me = int(rank)
        received = [row if r == me else buffers.empty(row.shape, row.dtype) for r, row in enumerate(rows)]
        with _named("all_to_all", transport):
            others.pass_rows(rows, received)
        return received


def fill_rows(out: Tensor, axis: str) -> None:
    """Write row r of rank r into row r of `out` on all ranks.

    Args: out: (W, ...), contiguous, of which this rank's own row is there. axis: the axis' name.
    Raises: as `all_gather`.
    """
    size, rank, transport = axes.resolve(axis)
    others, mine = _connections(out[0], size, transport), out[int(rank)]
    with step_range("gather"):
        if others is None:
            if size > 1:
                out.copy_(primitives.all_gather(mine, axis))
            return
        primitives.count(mine, axis, "all_gather", size - 1, 1)
        with _named("all_gather", transport):
            others.pass_rows([mine] * size, out)


def _connections(row: Tensor, size: int, transport: str) -> Connections | None:
    """Return the connections over which rows are sent as they are; None where a collective carries them."""
    if size == 1 or transport in registered or transport == axes.SIMULATED or row.device.type != "cpu":
        return None
    return connections(primitives.group_of(transport))


@contextmanager
def _named(collective: str, transport: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_loss(error):
            raise
        raise peer_lost(error, collective, axes.carried_by(transport), transport) from error
