"""The cosine transform as a basis for averages: `dct`.

>>> import torch, fn
>>> fn.dct(2).into(torch.tensor([3.0, 1.0, 5.0]))
[tensor([[2.8284, 1.4142]]), tensor([[5.]])]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fn.base import check_whole
from fn.errors import expected
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan
from fn.transforms.bases import Basis


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
        """Return for each dimension how it is cut, as (pieces, length of each): whole ones, then a shorter one."""
        found = []
        for side in shape or (1,):
            length = _checked(tile(side) if callable(tile) else tile)
            whole, rest = divmod(side, length)
            found.append([(whole, length)] * (whole > 0) + [(1, rest)] * (rest > 0))
        return found

    def into(x: Tensor) -> list[Tensor]:
        x = x.to(scale_dtype(x))
        if not x.numel():
            return [x.reshape(0, 1)]
        found, cut = [], runs(x.shape)
        x = x.reshape(x.shape or (1,))
        for pieces in itertools.product(*map(_placed, cut)):
            part = x
            for dim, (start, count, length) in enumerate(pieces):
                part = part.narrow(dim, start, count * length)
            part = part.reshape([n for _, count, length in pieces for n in (count, length)])
            for dim, (_, _, length) in enumerate(pieces):
                part = _along(part, 2 * dim + 1, _cosines(length, x.dtype, x.device))
            order = [*range(0, part.ndim, 2), *range(1, part.ndim, 2)]
            found.append(part.permute(order).reshape(-1, math.prod([length for _, _, length in pieces])))
        return found

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
    check_whole("tile", tile)
    if tile < 1:
        raise ValueError(expected("tile", "a whole number of at least 1", f"{tile}"))
    return int(tile)


def _placed(pieces: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (start, pieces, length of each) of the runs of a dimension."""
    found, start = [], 0
    for count, length in pieces:
        found.append((start, count, length))
        start += count * length
    return found


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
