"""How several tensors share one row of a message, and how their pieces are cut into blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fn.kernels.tracing import cached_plan, is_concrete


class Segments(NamedTuple):
    """How several tensors share one vector: every row holds a piece of each tensor.

    widths: elements of each tensor in a row, padding included.
    valid: (R, S) int64, how many of them are real in row r.
    """

    widths: tuple[int, ...]
    valid: Tensor

    @property
    def row_length(self) -> int:
        """Return the number of elements of a row."""
        return sum(self.widths)

    @property
    def runs(self) -> list[int]:
        """Return the segments as the kernels take them: (1, width) each."""
        return [value for width in self.widths for value in (1, width)]

    def row(self, index: Tensor | int) -> Segments:
        """Return the segments of one row, chosen by a 0-d index or a number."""
        if isinstance(index, int) or is_concrete(index, self.valid):
            return _row(self, int(index))
        return Segments(self.widths, self.valid.to(index.device).index_select(0, index.view(1)))

    def mask(self, device: torch.device) -> Tensor:
        """Return (R, n) bool, true at real elements."""
        widths = torch.tensor(self.widths, dtype=torch.int64, device=device)
        ends = widths.cumsum(0) - widths + self.valid.to(device)  # (R, S), of what is real in each segment
        ends = ends.repeat_interleave(widths, dim=1, output_size=self.row_length)
        return torch.arange(self.row_length, dtype=torch.int64, device=device) < ends


@cached_plan
def _row(segments: Segments, index: int) -> Segments:
    return Segments(segments.widths, segments.valid[index : index + 1])


def tile(widths: tuple[int, ...], valid: Tensor, block: int) -> tuple[Tensor, list[int]]:
    """Cut every segment into blocks, the last one shorter: return valid (R, blocks) and the runs."""
    owners, starts, lengths, runs = _grid(widths, block, valid.device)
    return (valid.index_select(1, owners) - starts).clamp(min=0).minimum(lengths), [*runs]


@cached_plan
def _grid(widths: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return per block its segment, its first element there and its length; and the runs."""
    runs: list[int] = []
    for width in widths:
        whole, rest = divmod(width, block)
        runs += [whole, block] * (whole > 0) + [1, rest] * (rest > 0)
    starts = [torch.arange(0, width, block, dtype=torch.int64, device=device) for width in widths]
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    owners = [torch.full_like(first, s) for s, first in enumerate(starts)]
    lengths = [(width - first).clamp(max=block) for width, first in zip(widths, starts, strict=True)]
    return torch.cat([*owners, empty]), torch.cat([*starts, empty]), torch.cat([*lengths, empty]), tuple(runs)
