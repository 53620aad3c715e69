"""How rows of segments are cut into tiles, which go through all steps of a torch kernel while they are in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fn.kernels.reference import runs_of

TILE = 1 << 16
"""Elements of a tile, a few of which are in the second-level cache together; a multiple of SHORT."""

SHORT = 256
"""Squares are summed in float32 over so many elements, and in float64 over these sums."""


class Tile(NamedTuple):
    """A part of a row-wise tensor: rows, segments, and the elements of the row that are theirs.

    begin: where the elements begin in their segment; 0 if the segments are whole.
    """

    rows: slice
    segments: slice
    elements: slice
    begin: int

    def of(self, x: Tensor) -> Tensor:
        """Return the part of x (R, n): (rows, segments, width)."""
        part: Tensor = x[self.rows, self.elements].unflatten(1, (self.segments.stop - self.segments.start, -1))
        return part

    def scales(self, values: Tensor) -> Tensor:
        """Return the values (R, S) that go with it: (rows, segments, 1)."""
        return values[self.rows, self.segments, None]


def tiles(rows: int, runs: Sequence[int]) -> Iterator[Tile]:
    """Yield the tiles of all rows."""
    for first, start, count, width in runs_of(runs):
        piece = min(max(width, 1), TILE)
        together = min(TILE // piece, max(count, 1))  # 1 where a segment is wider than a tile
        high = TILE // (together * piece)
        for s in range(0, count, together):
            last = min(s + together, count) - 1
            for begin in range(0, width, piece):
                elements = slice(start + s * width + begin, start + last * width + min(begin + piece, width))
                for r in range(0, rows, high):
                    yield Tile(slice(r, min(r + high, rows)), slice(first + s, first + last + 1), elements, begin)


def least_of(valid: Tensor) -> list[int]:
    """Return how many elements of each segment are real in all rows."""
    found: list[int] = valid.amin(0).tolist()
    return found


def clear(part: Tensor, tile: Tile, valid: Tensor, least: list[int]) -> Tensor:
    """Write zeros into the padding of a part. What is real in all rows is not looked at."""
    low, end = max(min(least[tile.segments]), tile.begin), tile.begin + part.shape[-1]
    if low < end:
        part[..., low - tile.begin :].masked_fill_(torch.arange(low, end, device="cpu") >= tile.scales(valid), 0)
    return part
