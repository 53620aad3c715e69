"""Messages: the rows of several tensors as one message each. `exchange` and `gather`; `swap_rows` and `fill_rows`.

The leaves of a row go one behind the other, the widest dtypes first. There is no header between them: shapes and dtypes
are the same on all ranks, which `agreement` has checked. Over connections of our own each leaf is sent from where it
lies and received where it belongs; a collective carries bytes that are joined before and taken apart after.

`swap_rows` and `fill_rows` are `all_to_all` and `all_gather` on the host, for a step in memory that it has. They copy
no row of this rank's own, and are neither traced nor simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.collectives import axis as axes
from fn.collectives import primitives
from fn.collectives.carriers import carrier_of
from fn.collectives.following import shared
from fn.collectives.ledger import record
from fn.collectives.profiling import RangeName, step_range
from fn.collectives.transports.tcp import Connections, Rows
from fn.kernels import memory_pool

Tree = Any


class Direct(NamedTuple):
    """How rows of an axis go over connections of our own. size: number of ranks. rank: this one."""

    axis: str
    size: int
    rank: int
    transport: str
    connections: Connections

    @property
    def peers(self) -> list[int]:
        """Return the other ranks."""
        return [p for p in range(self.size) if p != self.rank]

    def pass_rows(self, collective: str, sends: Rows, receives: Rows) -> None:
        """Send tensors to every other rank and fill tensors from it, and count them as a collective's.

        Raises: `PeerLost` if a rank ends or does not answer in time.
        """
        record(self.axis, collective, sum([part.nbytes for parts in sends.values() for part in parts]))
        try:
            self.connections.exchange(sends, receives)
        except RuntimeError as error:
            primitives.raise_if_lost(error, collective, self.transport)
            raise


def direct(tensors: Sequence[Tensor], axis: str) -> Direct | None:
    """Return how tensors go over connections of our own; None where something else carries tensors like these."""
    size, rank, transport = axes.resolve(axis)
    if size == 1 or transport == axes.SIMULATED:
        return None
    opened = carrier_of(transport, tensors).connections
    return None if opened is None else Direct(axis, size, int(rank), transport, opened)


def exchange(payload: Tree, axis: str) -> Tree:
    """Exchange the rows of a payload, as `all_to_all`, in one uint8 message."""
    return _carry(payload, axis, "exchange", "all_to_all")


def gather(payload: Tree, axis: str, alike: axes.AxisNames = ()) -> Tree:
    """Gather payloads of one row from every rank, as `all_gather`, in one uint8 message: W rows.

    Args: alike: the axes on whose ranks the result is the same, where these are more than one.
    """
    size = axes.axis_size(axis)
    like, make = lambda: codes_like(payload, size), lambda: _carry(payload, axis, "gather", "all_gather")
    return shared("gather", alike or axis, like, make)


def codes_like(payload: Tree, size: int) -> Tree:
    """Return a payload of so many rows, for its shapes and dtypes alone."""
    return tree.map(lambda leaf: leaf.new_empty(()).expand(size, *leaf.shape[1:]), payload)


def _carry(payload: Tree, axis: str, name: RangeName, collective: str) -> Tree:
    leaves, restore = _flatten(payload)
    way = direct(leaves, axis)
    with step_range(name):
        if way is None:
            message = leaves[0] if len(leaves) == 1 else _packed(leaves, torch.uint8)
            if collective == "all_to_all":
                rows = primitives.all_to_all(message, axis)
            else:
                rows = primitives.all_gather(message, axis).flatten(0, 1)  # (W, 1, bytes) -> (W, bytes)
            return restore([rows] if len(leaves) == 1 else _unpacked(rows, leaves))
        # (W, ...) or (1, ...) -> (W, ...)
        received = [memory_pool.empty((way.size, *leaf.shape[1:]), leaf.dtype, leaf.device) for leaf in leaves]
        _pass(way, collective, leaves, received)
        return restore(received)


def swap_rows(rows: Sequence[Tensor] | Tensor, axis: str) -> list[Tensor]:
    """Exchange rows: entry r of the result is the row that rank r held for this rank.

    Args: rows: W contiguous tensors of one shape, entry r for rank r; or one tensor that consists of them. axis: the
        axis' name.
    Returns: as many tensors of that shape; this rank's own is the one that was given.
    Raises: as `all_to_all`.
    """
    table, rows = rows if isinstance(rows, Tensor) else None, [*rows]
    way = direct(rows, axis)
    with step_range("exchange"):
        if way is None:
            if len(rows) == 1:
                return rows
            # W rows (...) -> (W, ...) -> W rows (...)
            return [*primitives.all_to_all(torch.stack(rows) if table is None else table, axis).unbind(0)]
        received = [
            row if r == way.rank else memory_pool.empty(row.shape, row.dtype, row.device) for r, row in enumerate(rows)
        ]
        way.pass_rows("all_to_all", {p: [rows[p]] for p in way.peers}, {p: [received[p]] for p in way.peers})
        return received


def fill_rows(out: Tensor, axis: str) -> None:
    """Write row r of rank r into row r of `out` on all ranks.

    Args: out: (W, ...), contiguous; this rank has written its own row. axis: the axis' name.
    Raises: as `all_gather`.
    """

    def fill() -> Tensor:
        way = direct([out], axis)
        if way is not None:
            way.pass_rows("all_gather", {p: [out[way.rank]] for p in way.peers}, {p: [out[p]] for p in way.peers})
        elif out.shape[0] > 1:
            out.copy_(primitives.all_gather(out[int(axes.axis_index(axis))], axis))
        return out

    with step_range("gather"):
        filled = shared("gather", axis, lambda: out, fill)
        if filled is not out:  # where it is replayed, this rank's own row is in the log, too
            out.copy_(filled)


def _flatten(payload: Tree) -> tuple[list[Tensor], Callable[[list[Tensor]], Tree]]:
    """Return the leaves, and a function that puts them back. A NamedTuple of tensors, a codec's, needs no walk."""
    if hasattr(payload, "_make") and {type(leaf) for leaf in payload} == {Tensor}:
        return [*payload], payload._make
    leaves, structure = tree.flatten(payload)
    return leaves, partial(tree.unflatten, structure)


def _pass(way: Direct, collective: str, leaves: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Send row p, or the only one, to rank p; fill row p of W from rank p, and copy this rank's own."""
    order = _wide_first(leaves)
    # (W, ...), or (1, ...) of which all ranks get the one row, -> W rows (...)
    sent_rows = [leaves[i].contiguous().expand_as(received[i]).unbind() for i in order]
    received_rows = [received[i].unbind() for i in order]
    for sent, filled in zip(sent_rows, received_rows, strict=True):
        # No connection leads from a rank to itself.
        filled[way.rank].copy_(sent[way.rank])
    sends = {p: [rows[p] for rows in sent_rows] for p in way.peers}
    way.pass_rows(collective, sends, {p: [rows[p] for rows in received_rows] for p in way.peers})


def _wide_first(leaves: Sequence[Tensor]) -> list[int]:
    """Return the order of leaves in a message: no value lies across an alignment boundary of its own.

    Behind an odd number of bytes a float would, and the receiver could not view the bytes as floats.
    """
    return sorted(range(len(leaves)), key=lambda i: -leaves[i].element_size())


def _packed(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Join leaves (R, ...) into one message (R, n): of their own dtype, or uint8 with the widest dtypes first."""
    flat = [_flat(leaves[i]) for i in _wide_first(leaves)]
    # (R, n_i) of each leaf -> (R, n)
    return torch.cat([x if x.dtype == dtype else _view(x, dtype) for x in flat], dim=1)


def _unpacked(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Take a message (R, n) apart: return leaves (R, ...) in the dtypes of others, and their shapes but for R."""
    order = _wide_first(like)
    widths = [like[i].shape[1:].numel() * like[i].element_size() // message.element_size() for i in order]
    unpacked: list[Any] = [None] * len(like)
    for i, part in zip(order, message.split(widths, dim=1), strict=True):
        dtype = like[i].dtype
        if dtype != message.dtype:  # a slice of a row begins where no float may: the view needs memory of its own
            part = part.clone(memory_format=torch.contiguous_format)
            part = _view(part, dtype) if part.numel() else part.to(dtype)  # no bytes have no stride to view
        # (R, n_i) -> (R, ...)
        unpacked[i] = part.reshape(part.shape[0], *like[i].shape[1:])
    return unpacked


def joined(leaves: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return tensors as one vector (n,), packed in a dtype.

    Args: device: of a vector of no tensors, which a rank that sends nothing hands to the collective of the others.
    """
    if not leaves:
        return torch.empty(0, dtype=dtype, device=device)
    return _packed([x[None] for x in leaves], dtype)[0]


def apart(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Take a message of `joined` apart: return tensors like these in shape and dtype. They may share its memory."""
    return [x[0] for x in _unpacked(message[None], [x[None] for x in like])]


_VMAP_CAN_VIEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def _flat(leaf: Tensor) -> Tensor:
    """Return a leaf (R, ...) as (R, n) whose rows lie in one piece."""
    flat = leaf.contiguous().view(leaf.shape[0], leaf.shape[1:].numel())
    if flat.shape[1] <= 1 and flat.stride(1) != 1:  # none or a single one is contiguous whatever its stride
        return flat.clone(memory_format=torch.contiguous_format)
    return flat


def _view(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.view(dtype)`, for which vmap has a rule since torch 2.13; before that, a copy of it."""
    viewed: Tensor = x.view(dtype) if _VMAP_CAN_VIEW else torch.ops.fn.reinterpret(x, dtype)
    return viewed


def _reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The schema promises new memory: torch refuses an op that returns a view of its argument without saying so.
    return x.view(dtype).clone()


def _vmap_reinterpret(info: Any, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    return torch.ops.fn.reinterpret(x.movedim(in_dims[0], 0).contiguous(), dtype), 0


_library = torch.library.Library("fn", "FRAGMENT")
_library.define("reinterpret(Tensor x, ScalarType dtype) -> Tensor")
_library.impl("reinterpret", _reinterpret, "CompositeExplicitAutograd")
torch.library.register_fake("fn::reinterpret", _reinterpret, lib=_library)
torch.library.register_vmap("fn::reinterpret", _vmap_reinterpret, lib=_library)
