"""Averages in another basis: `in_basis`, and two bases, `tiles` and `dct`, the cosines of tiles.

>>> import torch, fn
>>> [part.tolist() for part in fn.tiles(2).into(torch.arange(6).view(2, 3))]
[[[0, 1, 3, 4]], [[2, 5]]]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import (
    Facts,
    Phase,
    Transform,
    UpdateFn,
    check_is_transform,
    check_params,
    check_state,
    check_whole,
    combine,
    unchanged,
)
from fn.collectives.axis import AxisNames, names
from fn.compiling import memoized
from fn.errors import expected
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan

Tree = Any


class Basis(NamedTuple):
    """How a tensor is written in other coordinates, chunk by chunk.

    into: x of any shape -> a list of parts (chunks, length), at least one; a part may have no chunks. The number of
        parts and their shapes depend on the shape of x only.
    back: (parts, shape) -> the tensor of this shape whose parts they are.
    """

    into: Callable[[Tensor], list[Tensor]]
    back: Callable[[Sequence[Tensor], torch.Size], Tensor]


def in_basis(basis: Basis, sync: Transform | Callable[[int], Transform], *, axis: AxisNames | None = None) -> Transform:
    """Average the updates in another basis, tensor by tensor; the errors live there, too.

        u = B^-1 sync(B u_r)

        >>> import torch, fn
        >>> one_number = lambda n: fn.compressed_average("data", fn.top_k(1, n), fn.off(), servers=False)
        >>> tx = fn.in_basis(fn.dct(4), one_number)
        >>> step = lambda g: tx.update(fn.Phase.COMPRESSED)(g, tx.init(g), g)[0]
        >>> g = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]])                       # of two ranks
        >>> fn.simulate(step, "data", 2)(g)[0]                    # of four cosines each sent the largest, its mean
        tensor([3.5000, 3.5000, 3.5000, 3.5000])

    Args:
        basis: such as `tiles(64)`. What it makes of a tensor are parts (chunks, length), which `sync` sees as leaves.
        sync: what averages them, such as `compressed_average(axis, codec)`. Or a function: length -> transform, which
            then averages the parts whose chunks are that long, so that a codec can have blocks of a chunk each:
            `lambda n: compressed_average(axis, top_k(1 / 32, n))`. There is an exchange for each length.
        axis: what the transforms that a function returns communicate over, for combinators that have to know (see
            `fn.Facts`); what a transform says itself need not be repeated.
    Returns: a transform with the phases and the state of `sync`; where that is a function, the state is a tuple of its
        transforms' states, the shortest chunks first, and a phase that one of them lacks raises when it is run.
    Raises: TypeError if basis is no basis, or sync neither a transform nor a function that returns one, the latter from
        `init`.

    Paper: Peng et al., DeMo (arXiv 2411.19870); Sarfi et al., SparseLoCo (arXiv 2508.15706), whose basis is `tiles`.
    """
    if not isinstance(basis, Basis):
        raise TypeError(expected("basis", "a basis, such as fn.tiles(64)", f"{basis!r}"))
    inner = _by_length(sync) if callable(sync) else sync
    check_is_transform("sync", inner)

    def init(params: Tree) -> Tree:
        tree.check_real(params, "params")
        return inner.init([basis.into(p.detach()) for p in tree.leaves(params)])

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        (average,) = updates_of

        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            check_params(params)
            tree.check_updates(updates, params)
            leaves, structure = tree.flatten(tree.in_order(updates, params, "updates"))
            params_parts = [basis.into(p) for p in tree.leaves(params)]
            mean, state = average([basis.into(u) for u in leaves], state, params_parts)
            back = [basis.back(parts, u.shape) for parts, u in zip(mean, leaves, strict=True)]
            return tree.unflatten(structure, back), state

        return update

    made = combine([inner], init, compose, Facts(() if axis is None else names(axis), ("in_basis",)))
    for name in ("warmup_update", "compressed_update", "local_update"):
        if getattr(inner, name) is unchanged:
            made = made._replace(**{name: unchanged})
    return made


def _by_length(sync: Callable[[int], Transform]) -> Transform:
    """Return a transform of lists of parts (chunks, length), which gives those of each length to one of its own."""

    @memoized
    def made(length: int) -> Transform:
        transform = sync(length)
        check_is_transform(f"sync({length})", transform)
        return transform

    def places(parts: Tree) -> dict[int, list[int]]:
        """Return where the parts of each length are, the shortest first."""
        lengths = [part.shape[1] if part.numel() else 0 for part in tree.leaves(parts)]
        return {n: [i for i, length in enumerate(lengths) if length == n] for n in sorted({*lengths} - {0})}

    def init(params: Tree) -> Tree:
        leaves = tree.leaves(params)
        return tuple(made(length).init([leaves[i] for i in chosen]) for length, chosen in places(params).items())

    def update_in(phase: Phase) -> UpdateFn:
        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            check_state(state, tuple)
            (leaves, structure), params_leaves, after = tree.flatten(updates), tree.leaves(params), []
            out = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) if not x.numel() else x for x in leaves]
            for (length, chosen), part_state in zip(places(updates).items(), state, strict=True):
                parts = [leaves[i] for i in chosen], part_state, [params_leaves[i] for i in chosen]
                means, part_state = made(length).composed(phase)(*parts)
                for i, mean in zip(chosen, means, strict=True):
                    out[i] = mean
                after.append(part_state)
            return tree.unflatten(structure, out), tuple(after)

        return update

    warmup, compressed, local = map(update_in, Phase)
    return Transform(init, warmup, compressed, local, facts=Facts())


def tiles(tile: int) -> Basis:
    """Cut matrices into tile x tile squares and vectors into runs of `tile` numbers; each is a chunk, row by row.

    Squares stand in the order of their rows, then of their columns. Sides that `tile` does not divide end in shorter
    tiles, so a matrix has up to four parts, and no part is padded:

        whole squares, then those cut short on the right, those cut short at the bottom, and the corner

    A tensor of three or more dimensions counts as the matrix of its first one by all others, a number as a vector. Only
    the order of the numbers changes.

    Args: tile: the side of a square, a whole number of at least 1.
    Returns: a basis for `in_basis`.
    Raises: TypeError if tile is no whole number; ValueError if it is less than 1.

    Paper: Peng et al., DeMo (arXiv 2411.19870); Sarfi et al., SparseLoCo (arXiv 2508.15706).
    Differs: their chunks are as long as the largest divisor of a side up to `tile`, so that of a prime length each
        element is a chunk of its own, and everything is sent.
    """
    tile = _checked(tile)

    def into(x: Tensor) -> list[Tensor]:
        if not x.numel():
            return [x.reshape(0, tile)]
        matrix, parts, top = x.reshape(_sides(x.shape)), [], 0
        for down, height in _runs(matrix.shape[0], tile):
            left = 0
            for across, width in _runs(matrix.shape[1], tile):
                part = matrix[top : top + down * height, left : left + across * width]
                part = part.reshape(down, height, across, width).transpose(1, 2)
                parts.append(part.reshape(down * across, height * width))
                left += across * width
            top += down * height
        return parts

    def back(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        if not shape.numel():
            return parts[0].reshape(shape)
        rest, (rows, columns), bands = iter(parts), _sides(shape), []
        for down, height in _runs(rows, tile):
            band = []
            for across, width in _runs(columns, tile):
                part = next(rest).reshape(down, across, height, width).transpose(1, 2)
                band.append(part.reshape(down * height, across * width))
            bands.append(torch.cat(band, dim=1))
        return torch.cat(bands).reshape(shape)

    return Basis(into, back)


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of the matrix that a tensor with elements counts as; a vector is one row."""
    return (1, shape.numel()) if len(shape) < 2 else (shape[0], shape.numel() // shape[0])


def _runs(side: int, tile: int) -> list[tuple[int, int]]:
    """Return how a side is cut, as (pieces, length of each): whole ones, then a shorter one."""
    whole, rest = divmod(side, tile)
    return ([(whole, tile)] if whole else []) + ([(1, rest)] if rest else [])


def dct(tile: int | Callable[[int], int]) -> Basis:
    """Write tensors as cosines: cut them into tiles, and take the orthonormal DCT-II of each along all its sides.

        z[q] = sqrt(2 / s) sum_j x[j] cos(pi (2 j + 1) q / (2 s)),   z[0] / sqrt(2),   s the side of the tile

    A tensor of any number of dimensions is cut along each of them. A side that `tile` does not divide ends in a shorter
    tile, so that d dimensions give up to 2^d parts. What is smooth has few large coefficients.

    Args: tile: the side of a tile, a whole number of at least 1; or a function: length of a dimension -> side of its
        tiles.
    Returns: a basis for `in_basis`. Coefficients are float64 for float64 and float32 for all others.
    Raises: TypeError if tile is neither a whole number nor a function; ValueError if it is less than 1; what a function
        returns is looked at when a tensor is cut.

    Paper: Peng et al., DeMo (arXiv 2411.19870), section 3.1.
    Differs: a tile is as long as it is said to be, and the last one shorter; theirs are as long as the largest divisor
        of a side, which of a prime is 1.
    """
    if not callable(tile):
        _checked(tile)

    def runs(shape: torch.Size) -> list[list[tuple[int, int]]]:
        """Return how each dimension is cut, see `_runs`."""
        return [_runs(side, _checked(tile(side) if callable(tile) else tile)) for side in shape or (1,)]

    def into(x: Tensor) -> list[Tensor]:
        x = x.to(scale_dtype(x))
        if not x.numel():
            return [x.reshape(0, 1)]
        parts, cut = [], runs(x.shape)
        x = x.reshape(x.shape or (1,))
        for pieces in itertools.product(*map(_placed, cut)):
            part = x
            for dim, (start, count, length) in enumerate(pieces):
                part = part.narrow(dim, start, count * length)
            part = part.reshape([n for _, count, length in pieces for n in (count, length)])
            for dim, (_, _, length) in enumerate(pieces):
                part = _along(part, 2 * dim + 1, _cosines(length, x.dtype, x.device))
            order = [*range(0, part.ndim, 2), *range(1, part.ndim, 2)]
            parts.append(part.permute(order).reshape(-1, math.prod([length for _, _, length in pieces])))
        return parts

    def back(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        if not shape.numel():
            return parts[0].reshape(shape)
        cut, rest = runs(shape), iter(parts)

        def joined(pieces: tuple[tuple[int, int], ...]) -> Tensor:
            dim = len(pieces)
            if dim < len(cut):
                return torch.cat([joined((*pieces, piece)) for piece in cut[dim]], dim=dim)
            part = next(rest).reshape([count for count, _ in pieces] + [length for _, length in pieces])
            order = [place for i in range(dim) for place in (i, dim + i)]
            part = part.permute(order)
            for i, (_, length) in enumerate(pieces):
                part = _along(part, 2 * i + 1, _cosines(length, part.dtype, part.device).T)
            return part.reshape([count * length for count, length in pieces])

        return joined(()).reshape(shape)

    return Basis(into, back)


def _checked(tile: int) -> int:
    check_whole("tile", tile, 1)
    return int(tile)


def _placed(pieces: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (start, pieces, length of each) of the runs of a dimension."""
    placed, start = [], 0
    for count, length in pieces:
        placed.append((start, count, length))
        start += count * length
    return placed


def _along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """Return x with the vectors along a dimension multiplied by a matrix from the right."""
    return (x.transpose(dim, -1) @ matrix).transpose(dim, -1)


@cached_plan
def _cosines(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix (side, side) whose columns are the cosines: x @ it is the transform of x, it is orthonormal."""
    j = torch.arange(side, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi * (2 * j[:, None] + 1) * j / (2 * side)) * math.sqrt(2 / side)
    matrix[:, 0] *= math.sqrt(0.5)
    return matrix.to(device=device, dtype=dtype)
