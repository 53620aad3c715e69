"""Payloads on the wire: the rows of several tensors as one message each. `exchange` and `gather`.

The leaves of a row go one behind the other, the widest dtypes first. Over connections of our own each leaf is sent from
where it lies and received where it belongs; a collective carries bytes that are joined before and taken apart after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives import primitives
from fn.collectives.observe import step_range
from fn.collectives.rows import Direct, direct
from fn.collectives.sockets import bytes_of
from fn.kernels import buffers

Tree = Any


def exchange(payload: Tree, axis: str) -> Tree:
    """Exchange the rows of a payload, as `all_to_all`, in one uint8 message."""
    leaves, restore = _flatten(payload)
    way = direct(leaves, axis)
    with step_range("exchange"):
        if way is None:
            message, unpack = _as_message(leaves)
            return restore(unpack(primitives.all_to_all(message, axis)))
        received = [buffers.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        _pass(way, "all_to_all", [leaf.contiguous() for leaf in leaves], received, way.size)
        return restore(received)


def gather(payload: Tree, axis: str) -> Tree:
    """Gather payloads of one row from every rank, as `all_gather`, in one uint8 message: W rows."""
    leaves, restore = _flatten(payload)
    way = direct(leaves, axis)
    with step_range("gather"):
        if way is None:
            message, unpack = _as_message(leaves)
            return restore(unpack(primitives.all_gather(message, axis).flatten(0, 1)))
        gathered = [buffers.empty((way.size, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        _pass(way, "all_gather", [leaf.contiguous() for leaf in leaves], gathered, 1)
        return restore(gathered)


def _flatten(payload: Tree) -> tuple[list[Tensor], Callable[[list[Tensor]], Tree]]:
    """Return the leaves and what puts them back; of a NamedTuple of tensors, as codecs have them, without a walk."""
    if hasattr(payload, "_make") and {type(leaf) for leaf in payload} == {Tensor}:
        return [*payload], payload._make
    leaves, structure = tree.flatten(payload)
    return leaves, partial(tree.unflatten, structure)


def _pass(way: Direct, collective: str, leaves: Sequence[Tensor], into: Sequence[Tensor], rows: int) -> None:
    """Send row p of so many, or the only one, to rank p; fill row p of W from rank p, and copy this rank's own."""
    order = _wide_first(leaves)
    give = [_cut(leaves[i], rows) * (way.size // rows) for i in order]
    take = [_cut(into[i], way.size) for i in order]
    for mine, place in zip(give, take, strict=True):
        place[way.me][:] = mine[way.me]
    others = [p for p in range(way.size) if p != way.me]
    sends = {p: [parts[p] for parts in give] for p in others}
    way.pass_rows(collective, sends, {p: [parts[p] for parts in take] for p in others})


def _cut(x: Tensor, rows: int) -> list[memoryview]:
    """Return the bytes of each row."""
    whole = bytes_of(x)
    width = len(whole) // rows
    return [whole[r * width : (r + 1) * width] for r in range(rows)]


def _wide_first(leaves: Sequence[Tensor]) -> list[int]:
    """Return the order of leaves in a message: no value lies across an alignment boundary of its own."""
    return sorted(range(len(leaves)), key=lambda i: -leaves[i].element_size())


def _as_message(leaves: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Join leaves (R, ...) into (R, bytes) uint8; return it and what takes such a message apart."""
    if len(leaves) == 1:
        return leaves[0], lambda message: [message]
    order = _wide_first(leaves)
    shapes = [leaf.shape[1:] for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    parts = [_view(_flat(leaves[i]), torch.uint8) for i in order]
    widths = [part.shape[1] for part in parts]

    def unpack(message: Tensor) -> list[Tensor]:
        found: list[Any] = [None] * len(leaves)
        for i, part in zip(order, message.split(widths, dim=1), strict=True):
            if dtypes[i] != torch.uint8:
                part = part.clone(memory_format=torch.contiguous_format)
                part = _view(part, dtypes[i]) if part.numel() else part.to(dtypes[i])  # no bytes have no stride to view
            found[i] = part.reshape(part.shape[0], *shapes[i])
        return found

    return torch.cat(parts, dim=1), unpack


_VMAP_CAN_VIEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def _flat(leaf: Tensor) -> Tensor:
    """Return a leaf (R, ...) as (R, n) whose rows lie in one piece."""
    flat = leaf.contiguous().flatten(1)
    if flat.shape[1] <= 1 and flat.stride(1) != 1:  # none or a single one is contiguous whatever its stride
        return flat.clone(memory_format=torch.contiguous_format)
    return flat


def _view(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.view(dtype)`, for which vmap has a rule since torch 2.13; before that, a copy of it."""
    found: Tensor = x.view(dtype) if _VMAP_CAN_VIEW else torch.ops.fn.reinterpret(x, dtype)
    return found


def _reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).clone()


def _vmap_reinterpret(info: Any, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    return torch.ops.fn.reinterpret(x.movedim(in_dims[0], 0).contiguous(), dtype), 0


_library = torch.library.Library("fn", "FRAGMENT")
_library.define("reinterpret(Tensor x, ScalarType dtype) -> Tensor")
_library.impl("reinterpret", _reinterpret, "CompositeExplicitAutograd")
torch.library.register_fake("fn::reinterpret", _reinterpret, lib=_library)
torch.library.register_vmap("fn::reinterpret", _vmap_reinterpret, lib=_library)
