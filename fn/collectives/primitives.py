"""The exact collectives `all_to_all`, `all_gather` and `pmean`, on trees, by axis name.

Each is an op `fn::name(x, rank, size, transport)`. The rank is a tensor operand: the vmap level that batches it is the
axis itself, where the exchange is a transposition; any other vmap level is passed by. Below all levels the op
decomposes into torch's functional collectives, so `torch.compile` sees them. This is the only module that names
those: they are private and their names move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives import axis as axes
from fn.collectives.ledger import record

Tree = Any

_library = torch.library.Library("fn", "FRAGMENT")
_Batched = tuple[Tensor, int | None]


def all_to_all(x: Tree, axis: str) -> Tree:
    """Exchange rows: row r of the result is the row that rank r held for this rank.

    Args: x: tree of tensors (W, ...). axis: the axis' name.
    Returns: the same shapes.
    Raises: ValueError if a leaf's first dimension is not the axis size, or the axis is not bound.
    """
    size, rank, transport = axes.resolve(axis)

    def exchange(leaf: Tensor) -> Tensor:
        if leaf.ndim == 0 or leaf.shape[0] != size:
            raise ValueError(f"x: has shape {tuple(leaf.shape)}; its first dimension must be {size}, the size of {axis!r}")
        if size == 1 or leaf.numel() == 0:
            return leaf
        record(axis, "all_to_all", _bytes(leaf) * (size - 1) // size)
        return torch.ops.fn.all_to_all(leaf.contiguous(), rank, size, transport)

    return tree.map(exchange, x)


def all_gather(x: Tree, axis: str) -> Tree:
    """Give every rank the values of all: row r of the result is rank r's value.

    Args: x: tree of tensors of any shape. axis: the axis' name.
    Returns: a tree of tensors (W, ...), the same on every rank.
    Raises: ValueError if the axis is not bound.
    """
    size, rank, transport = axes.resolve(axis)

    def gather(leaf: Tensor) -> Tensor:
        if size == 1 or leaf.numel() == 0:
            return leaf.unsqueeze(0).expand(size, *leaf.shape)
        record(axis, "all_gather", _bytes(leaf) * (size - 1))
        return torch.ops.fn.all_gather(leaf.contiguous(), rank, size, transport)

    return tree.map(gather, x)


def psum(x: Tree, axis: str) -> Tree:
    """Sum over the ranks of an axis. Args, Returns and Raises as for `pmean`."""
    size, rank, transport = axes.resolve(axis)

    def add(leaf: Tensor) -> Tensor:
        if size == 1 or leaf.numel() == 0:
            return leaf
        record(axis, "all_reduce", -(-_bytes(leaf) * 2 * (size - 1) // size))
        return torch.ops.fn.psum(leaf.contiguous(), rank, size, transport)

    return tree.map(add, x)


def pmean(x: Tree, axis: str) -> Tree:
    """Average over the ranks of an axis, in full precision.

    Args: x: tree of floating tensors. axis: the axis' name.
    Returns: the same shapes and dtypes, the same values on every rank.
    Raises: ValueError if the axis is not bound.
    """
    size = axes.axis_size(axis)
    return tree.map(lambda leaf: leaf / size, psum(x, axis)) if size > 1 else x


def exchange(payload: Tree, axis: str) -> Tree:
    """Exchange the rows of a payload, as `all_to_all`, in one uint8 message."""
    message, unpack = _as_message(payload)
    return unpack(all_to_all(message, axis))


def gather(payload: Tree, axis: str) -> Tree:
    """Gather payloads of one row from every rank, as `all_gather`, in one uint8 message: W rows."""
    message, unpack = _as_message(payload)
    return unpack(all_gather(message, axis).flatten(0, 1))


def _as_message(payload: Tree) -> tuple[Tensor, Callable[[Tensor], Tree]]:
    """Join the leaves (R, ...) of a payload into (R, bytes) uint8; return it and what takes such a message apart.

    Wide dtypes come first, so that no value lies across an alignment boundary of its own.
    """
    leaves, structure = tree.flatten(payload)
    if len(leaves) == 1:
        return leaves[0], lambda message: tree.unflatten(structure, [message])
    order = sorted(range(len(leaves)), key=lambda i: -leaves[i].element_size())
    shapes = [leaf.shape[1:] for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    parts = [leaves[i].contiguous().flatten(1).view(torch.uint8) for i in order]
    widths = [part.shape[1] for part in parts]

    def unpack(message: Tensor) -> Tree:
        found: list[Any] = [None] * len(leaves)
        for i, part in zip(order, message.split(widths, dim=1), strict=True):
            if dtypes[i] != torch.uint8:
                part = part.clone(memory_format=torch.contiguous_format).view(dtypes[i])
            found[i] = part.reshape(part.shape[0], *shapes[i])
        return tree.unflatten(structure, found)

    return torch.cat(parts, dim=1), unpack


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _run_all_to_all(x: Tensor, rank: Tensor, size: int, transport: str) -> Tensor:
    rows = [1] * size
    return _wait(torch.ops._c10d_functional.all_to_all_single(x, rows, rows, transport))


def _run_all_gather(x: Tensor, rank: Tensor, size: int, transport: str) -> Tensor:
    flat = _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.reshape(-1), size, transport))
    return flat.view(size, *x.shape)


def _run_psum(x: Tensor, rank: Tensor, size: int, transport: str) -> Tensor:
    return _wait(torch.ops._c10d_functional.all_reduce(x, "sum", transport))


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return waited


def _batched(x: Tensor, dim: int | None, batch: int) -> Tensor:
    return x.unsqueeze(0).expand(batch, *x.shape) if dim is None else x.movedim(dim, 0)


def _vmap_all_to_all(info: Any, dims: Any, x: Tensor, rank: Tensor, size: int, transport: str) -> _Batched:
    x = _batched(x, dims[0], info.batch_size)
    if dims[1] is not None:
        return x.transpose(0, 1), 0
    return torch.ops.fn.all_to_all(x.movedim(0, 1).contiguous(), rank, size, transport), 1


def _vmap_all_gather(info: Any, dims: Any, x: Tensor, rank: Tensor, size: int, transport: str) -> _Batched:
    x = _batched(x, dims[0], info.batch_size)
    if dims[1] is not None:
        return x, None
    return torch.ops.fn.all_gather(x.contiguous(), rank, size, transport), 1


def _vmap_psum(info: Any, dims: Any, x: Tensor, rank: Tensor, size: int, transport: str) -> _Batched:
    x = _batched(x, dims[0], info.batch_size)
    if dims[1] is not None:
        return x.sum(0), None
    return torch.ops.fn.psum(x.contiguous(), rank, size, transport), 0


def _define(name: str, run: Callable[..., Tensor], rule: Callable[..., _Batched]) -> None:
    _library.define(f"{name}(Tensor x, Tensor rank, int size, str transport) -> Tensor")
    _library.impl(name, run, "CompositeImplicitAutograd")
    torch.library.register_vmap(f"fn::{name}", rule, lib=_library)


_define("all_to_all", _run_all_to_all, _vmap_all_to_all)
_define("all_gather", _run_all_gather, _vmap_all_gather)
_define("psum", _run_psum, _vmap_psum)
