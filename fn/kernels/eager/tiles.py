"""How rows of segments are cut into tiles, which go through all steps of a torch kernel while they are in the cache.

The kernels are written for it. References that are given one tile after the other take 2.6 to 4.5 times as long: they
make a mask of the padding where there is none, and a new tensor of each step. And bits of one byte may be of two tiles.
"""

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

    begin: where the elements begin in their segment; 0 if the segments are whole. real: how many of them are real in
    all rows and segments. valid: (R, S), of all rows.
    """

    rows: slice
    segments: slice
    elements: slice
    begin: int
    real: int
    valid: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the part of x (R, n): (rows, segments, width)."""
        part: Tensor = x[self.rows, self.elements].unflatten(1, (self.segments.stop - self.segments.start, -1))
        return part

    def scales(self, values: Tensor) -> Tensor:
        """Return the values (R, S) that go with it: (rows, segments, 1)."""
        return values[self.rows, self.segments, None]


    def clear(self, part: Tensor) -> Tensor:
        """Write zeros into the padding of a part (rows, segments, width). What is real in all rows is not looked at."""
        if self.real < part.shape[-1]:
            place = torch.arange(self.begin + self.real, self.begin + part.shape[-1], dtype=torch.int64, device="cpu")
            part[..., self.real :].masked_fill_(place >= self.scales(self.valid), 0)
        return part


def tiles(valid: Tensor, runs: Sequence[int]) -> Iterator[Tile]:
    """Yield the tiles of all rows. Args: valid (R, S); runs: as in `layout`."""
    rows, least = valid.shape[0], valid.amin(0).tolist()
    for first, start, count, width in runs_of(runs):
        piece = min(max(width, 1), TILE)
        together = min(TILE // piece, max(count, 1))  # 1 where a segment is wider than a tile
        high = TILE // (together * piece)
        for s in range(0, count, together):
            last = min(s + together, count) - 1
            segments = slice(first + s, first + last + 1)
            for begin in range(0, width, piece):
                elements = slice(start + s * width + begin, start + last * width + min(begin + piece, width))
                real = max(min(least[segments]) - begin, 0)
                for r in range(0, rows, high):
                    yield Tile(slice(r, min(r + high, rows)), segments, elements, begin, real, valid)
