"""How the rows of all kernels are laid out: segments, runs of them, padding; and lists of tensors as rows.

A row of n elements is divided into segments, each with a scale of its own. `runs` lists them as pairs (count, width),
one after the other: [2, 1024, 1, 40] is two segments of 1024 elements and one of 40. `valid` says how many leading
elements of each segment are real. What lies behind them is padding, which is never counted and always decodes to zero.

Kernels of signs take a `block`, too: with it every so many elements of a segment have a scale of their own, the last
ones of a segment, which may be fewer, one more. They are B in a row; `blocks_of` says which. 0: a segment has one.

A list of tensors and the rows (R, n) of a message: segment s of row r is piece r of tensor s, R equal pieces each,
zeros behind the end of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.kernels.tracing import cached_plan


def runs_of(runs: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first segment, first element, count, width) of every run."""
    segment = start = 0
    for count, width in zip(runs[::2], runs[1::2], strict=True):
        yield segment, start, count, width
        segment += count
        start += count * width


def row_length(runs: Sequence[int]) -> int:
    """Return n, the number of elements that the runs describe."""
    return sum(c * w for c, w in zip(runs[::2], runs[1::2], strict=True))


def widths_of(runs: Sequence[int]) -> list[int]:
    """Return the width of every segment."""
    return [width for count, width in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def scale_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scales and errors: float64 for float64, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def bytes_for(n: int) -> int:
    """Return how many bytes n sign bits take."""
    return math.ceil(n / 8)


def per_run(x: Tensor, runs: Sequence[int], f: Callable[[Tensor, int, int], Tensor]) -> list[Tensor]:
    """Return f(part (R, count, width), first segment, end segment) for every run of x (R, n)."""
    rows = x.shape[0]
    parts = []
    for segment, start, count, width in runs_of(runs):
        # (R, n) -> (R, count width) -> (R, count, width)
        part = x[:, start : start + count * width].reshape(rows, count, width)
        parts.append(f(part, segment, segment + count))
    return parts


def blocks_of(valid: Tensor, runs: Sequence[int], block: int) -> tuple[Tensor, Sequence[int]]:
    """Return valid and runs of what has a scale each: blocks of so many elements, or for 0 the segments."""
    return tile(tuple(widths_of(runs)), valid, block) if block else (valid, runs)


@cached_plan
def plan_of_blocks(valid: Tensor, runs: tuple[int, ...], block: int) -> tuple[Tensor, Sequence[int]]:
    """Return `blocks_of`, once for an object `valid`: for kernels that take blocks of some sizes as segments."""
    return blocks_of(valid, runs, block)


def count_scales(runs: Sequence[int], block: int) -> int:
    """Return how many scales a row has."""
    of_widths = zip(runs[::2], runs[1::2], strict=True)
    return sum(count * (-(-width // block) if block else 1) for count, width in of_widths)


def tile(widths: tuple[int, ...], valid: Tensor, block: int) -> tuple[Tensor, list[int]]:
    """Cut every segment into blocks, the last one shorter: return valid (R, blocks) and the runs.

    >>> tile((5, 2), torch.tensor([[5, 2], [3, 0]]), 4)     # runs of (number, length): a block of 4, one of 1, one of 2
    (tensor([[4, 1, 2],
            [3, 0, 0]]), [1, 4, 1, 1, 1, 2])
    """
    owners, starts, lengths, runs = _grid(widths, block, valid.device)
    # (R, S) -> (R, blocks): what is real of a segment behind the beginning of the block
    return (valid.index_select(1, owners) - starts).clamp(min=0).minimum(lengths), [*runs]


def _grid(widths: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return per block its segment, its first element there and its length; and the runs."""
    runs: list[int] = []
    for width in widths:
        whole, rest = divmod(width, block)
        runs += [whole, block] * (whole > 0) + [1, rest] * (rest > 0)
    starts = [torch.arange(0, width, block, dtype=torch.int64, device=device) for width in widths]
    # `torch.cat` refuses an empty list, which a row without tensors has.
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    owners = [torch.full_like(first, s) for s, first in enumerate(starts)]
    lengths = [(width - first).clamp(max=block) for width, first in zip(widths, starts, strict=True)]
    return torch.cat([*owners, empty]), torch.cat([*starts, empty]), torch.cat([*lengths, empty]), tuple(runs)


def padding_mask(x: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """Return (R, n) bool, true where an element of x (R, n) is real and not padding."""

    def part(p: Tensor, first: int, end: int) -> Tensor:
        # (width,) < (R, count, 1) -> (R, count, width)
        inside = torch.arange(p.shape[-1], dtype=torch.int64, device=x.device) < valid[:, first:end, None]
        # (R, count, width) -> (R, count width)
        return inside.expand(p.shape).flatten(1)

    return torch.cat([*per_run(x, runs, part), x.new_empty((x.shape[0], 0), dtype=torch.bool)], -1)


def spread(values: Tensor, runs: Sequence[int]) -> Tensor:
    """Repeat the value of every segment, values (R, S), over its elements: (R, n)."""
    rows = values.shape[0]
    parts = [
        # (R, count, 1) -> (R, count, width) -> (R, count width)
        values[:, first : first + count, None].expand(rows, count, width).reshape(rows, count * width)
        for first, _, count, width in runs_of(runs)
    ]
    return torch.cat([*parts, values[:, :0]], -1)


def rows_of(tensors: Sequence[Tensor], rows: int, runs: Sequence[int]) -> Tensor:
    """Return tensors as the rows (R, n) that `runs` describe, zero behind their ends."""
    pieces = []
    for tensor, width in zip(tensors, widths_of(runs), strict=True):
        flat = tensor.reshape(-1)
        # (numel,) -> (R width,) -> (R, width)
        pieces.append(F.pad(flat, (0, rows * width - flat.shape[0])).view(rows, width))
    # (R, width) of each tensor -> (R, n)
    return torch.cat(pieces, dim=1)


def tensors_of(x: Tensor, like: Sequence[Tensor], runs: Sequence[int]) -> list[Tensor]:
    """Return the rows x (R, n) as tensors of given shapes."""
    pieces = x.split(widths_of(runs), dim=1)
    # (R, width) -> (R width,) -> (numel,) -> the shape of the tensor
    return [p.reshape(-1)[: t.numel()].view(t.shape) for p, t in zip(pieces, like, strict=True)]


def paired_views(tensors: Sequence[Tensor], table: Tensor, widths: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of vectors and views of the rows (R, n) that hold R pieces of each, pair by pair of one shape.

    A vector that does not fill its R pieces has two pairs: its whole pieces, and the rest. So a function of lists
    copies between the two without a padded copy of any vector. widths: of the pieces, padding included.
    """
    flats, rows, start = [], [], 0
    for flat, width in zip(tensors, widths, strict=True):
        whole, rest = divmod(flat.shape[0], max(1, width))
        if whole:
            # (numel,) -> (whole pieces, width)
            flats.append(flat[: whole * width].view(whole, width))
            rows.append(table[:whole, start : start + width])
        if rest:
            flats.append(flat[whole * width :])
            rows.append(table[whole, start : start + rest])
        start += width
    return flats, rows


def clear_padding(table: Tensor, sizes: Sequence[int], widths: Sequence[int]) -> None:
    """Write zeros into rows (R, n) behind the ends of vectors of so many elements, R pieces each."""
    start = 0
    for size, width in zip(sizes, widths, strict=True):
        if size < table.shape[0] * width:
            whole, rest = divmod(size, width)
            table[whole, start + rest : start + width].zero_()
            table[whole + 1 :, start : start + width].zero_()
        start += width


def plain(*lists: Sequence[Tensor]) -> bool:
    """Return whether all tensors are what most kernels on lists take: contiguous float32."""
    return dtypes_of(*lists) <= {torch.float32} and contiguous(*lists)


def dtypes_of(*lists: Sequence[Tensor]) -> set[torch.dtype]:
    """Return the dtypes of all tensors."""
    return {*map(attrgetter("dtype"), chain(*lists))}


def contiguous(*lists: Sequence[Tensor]) -> bool:
    """Return whether all tensors are contiguous."""
    return all(map(Tensor.is_contiguous, chain(*lists)))


def alike_in_memory(*lists: Sequence[Tensor]) -> bool:
    """Return whether tensors in the same place of lists have their elements in the same order, without gaps.

    What works on elements one by one, as an optimizer does, may then take them as they lie: tensors in channels_last,
    say. What goes into messages may not, for there the order is that of all ranks.
    """
    if contiguous(*lists):
        return True
    for tensors in zip(*lists, strict=True):
        # the stride of a dimension of one element says nothing, and differs between tensors that are alike
        first, *others = ([(s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1] for t in tensors)
        if any(other != first for other in others) or not (tensors[0].numel() == 0 or is_dense(first)):
            return False
    return True


def is_dense(steps: Sequence[tuple[int, int]]) -> bool:
    """Return whether dimensions (stride, size) leave no gaps and do not overlap."""
    elements = 1
    for stride, size in sorted(steps):
        if stride != elements:
            return False
        elements *= size
    return True
