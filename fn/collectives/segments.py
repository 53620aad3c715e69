"""How several tensors share one row of a message, and how their pieces are cut into blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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

    def row(self, index: Tensor) -> Segments:
        """Return the segments of one row, chosen by a 0-d index."""
        return Segments(self.widths, self.valid.to(index.device).index_select(0, index.view(1)))

    def mask(self, device: torch.device) -> Tensor:
        """Return (R, n) bool, true at real elements."""
        places = torch.cat([torch.arange(w) for w in self.widths]).to(device)
        counts = self.valid.to(device).repeat_interleave(torch.tensor(self.widths, device=device), dim=1)
        return places < counts


def tile(widths: tuple[int, ...], valid: Tensor, block: int) -> tuple[Tensor, list[int]]:
    """Cut every segment into blocks, the last one shorter: return valid (R, blocks) and the runs."""
    runs: list[int] = []
    counts = []
    for s, width in enumerate(widths):
        whole, rest = divmod(width, block)
        runs += [whole, block] * (whole > 0) + [1, rest] * (rest > 0)
        starts = torch.arange(0, width, block, device=valid.device)
        counts.append((valid[:, s : s + 1] - starts).clamp(0, block).minimum(width - starts))
    return torch.cat([*counts, valid[:, :0]], 1), runs
