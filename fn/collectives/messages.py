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


def gather(payload: Tree, axis: str) -> Tree:
    """Gather payloads of one row from every rank, as `all_gather`, in one uint8 message: W rows."""
    return _carry(payload, axis, "gather", "all_gather")


def _carry(payload: Tree, axis: str, name: RangeName, collective: str) -> Tree:
    leaves, restore = _flatten(payload)
    way = direct(leaves, axis)
    with step_range(name):
        if way is None:
            message, unpack = _as_message(leaves)
            if collective == "all_to_all":
                return restore(unpack(primitives.all_to_all(message, axis)))
            # (W, 1, bytes) -> (W, bytes)
            return restore(unpack(primitives.all_gather(message, axis).flatten(0, 1)))
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
    way = direct([out], axis)
    with step_range("gather"):
        if way is None:
            if out.shape[0] > 1:
                out.copy_(primitives.all_gather(out[int(axes.axis_index(axis))], axis))
            return
        way.pass_rows("all_gather", {p: [out[way.rank]] for p in way.peers}, {p: [out[p]] for p in way.peers})


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


def _as_message(leaves: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Join leaves (R, ...) into (R, bytes) uint8; return it, and a function that takes such a message apart."""
    if len(leaves) == 1:
        return leaves[0], lambda message: [message]
    order = _wide_first(leaves)
    shapes = [leaf.shape[1:] for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    parts = [_view(_flat(leaves[i]), torch.uint8) for i in order]
    widths = [part.shape[1] for part in parts]

    def unpack(message: Tensor) -> list[Tensor]:
        unpacked: list[Any] = [None] * len(leaves)
        for i, part in zip(order, message.split(widths, dim=1), strict=True):
            if dtypes[i] != torch.uint8:  # a slice of a row begins where no float may: the view needs memory of its own
                part = part.clone(memory_format=torch.contiguous_format)
                part = _view(part, dtypes[i]) if part.numel() else part.to(dtypes[i])  # no bytes have no stride to view
            # (R, n) -> (R, ...)
            unpacked[i] = part.reshape(part.shape[0], *shapes[i])
        return unpacked

    # (R, bytes) of each leaf -> (R, all bytes)
    return torch.cat(parts, dim=1), unpack


def joined(leaves: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return tensors as one vector (n,): of their own dtype, or uint8 with the widest dtypes first.

    Args: device: of a vector of no tensors, which a rank that sends nothing hands to the collective of the others.
    """
    # (...) of each tensor -> (n_i,), and below (n,)
    flat = [leaves[i].reshape(-1) for i in _wide_first(leaves)]
    if not flat:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([x if x.dtype == dtype else x.contiguous().view(dtype) for x in flat])


def apart(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Take a message of `joined` apart: return tensors like these in shape and dtype. They may share its memory."""
    order = _wide_first(like)
    lengths = [like[i].numel() * like[i].element_size() // message.element_size() for i in order]
    unpacked: list[Any] = [None] * len(like)
    for i, part in zip(order, message.split(lengths), strict=True):
        if like[i].dtype != message.dtype:  # a float begins where it may only in memory of its own
            part = part.clone().view(like[i].dtype) if like[i].numel() else part.to(like[i].dtype)
        # (n_i,) -> (...)
        unpacked[i] = part.view(like[i].shape)
    return unpacked


_VMAP_CAN_VIEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def _flat(leaf: Tensor) -> Tensor:
    """Return a leaf (R, ...) as (R, n) whose rows lie in one piece."""
    flat = leaf.contiguous().flatten(1)
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
