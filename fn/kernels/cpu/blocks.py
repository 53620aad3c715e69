"""How a row is cut into places for the compiled CPU loops, and how threads share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fn.kernels.layout import runs_of
from fn.kernels.tracing import PLANS

THREADED = 1 << 22
"""Elements from which several threads share a kernel, if torch may use several."""

LARGER_THAN_CACHE = 1 << 20
"""Elements from which results are written past the cache: they are too many for the second level."""

BLOCK = 1 << 12
"""Elements of a block where squares are added."""

STEP = 256
"""Elements of a piece: enough to pay for the checks in front of a loop."""

WHOLE = 62
"""A shift after which nothing is left of an offset."""

WHOLE_SEGMENTS = 1 << WHOLE
"""Elements of a place that no segment has: every segment is one."""


class Grid(NamedTuple):
    """The blocks of some rows, as compiled loops take them: addresses and numbers.

    blocks: of a row. table: (blocks, 4) as in `BlockTable`. segments: of a row. valid: (R, S). n: elements of a row.
    nontemporal: 1 where results are more than a cache holds, so that they are written past it. step, shift, starts,
    scales: as in `Scales`.
    """

    blocks: int
    table: int
    segments: int
    valid: int
    n: int
    nontemporal: int
    step: int
    shift: int
    starts: int
    scales: int


class Scales(NamedTuple):
    """Where the scales of a row's elements are: of segments, or of blocks of 2**shift elements.

    step: elements of a piece, which has one scale. shift: an offset in a segment, shifted so far to the right, is that
    of its scale; `WHOLE` where a segment has one. starts: (segments,) int64, the first scale of each. total: of a row.
    """

    step: int
    shift: int
    starts: NDArray[np.int64]
    total: int


class BlockTable(NamedTuple):
    """The places of one row.

    table: (places, 4) int64: first element, length, segment, offset in the segment.
    n: elements of a row. segments: how many it has. widths: (segments,) int64, theirs.
    aligned: every place starts at a multiple of 8. whole: and every length is one.
    even: every place starts at an even element and has an even length.
    """

    table: NDArray[np.int64]
    n: int
    segments: int
    widths: NDArray[np.int64]
    aligned: bool
    whole: bool
    even: bool


def block_table(runs: Sequence[int], block: int = BLOCK) -> BlockTable:
    """Return the places of a row, each at most `block` elements long."""
    return _block_table(tuple(runs), block)


def has_loops_for(block: int) -> bool:
    """Return whether the loops take blocks of so many elements: a piece is in one of them, and they share it evenly."""
    return block == 0 or (8 <= block <= STEP and STEP % block == 0)


@lru_cache(maxsize=PLANS)
def scales_of(runs: tuple[int, ...], block: int) -> Scales:
    """Return where scales are, for a block that there are loops for."""
    widths = np.repeat(np.array(runs[1::2], dtype=np.int64), np.array(runs[::2], dtype=np.int64))
    counts = -(-widths // block) if block else np.ones_like(widths)
    starts = np.cumsum(counts) - counts
    return Scales(block or STEP, block.bit_length() - 1 if block else WHOLE, starts, int(counts.sum()))


def runs_of_tensors(tensors: Sequence[Tensor]) -> list[int]:
    """Return the runs of a row in which every tensor is a segment."""
    runs = [1] * (2 * len(tensors))
    runs[1::2] = map(Tensor.numel, tensors)
    return runs


@lru_cache(maxsize=PLANS)
def _block_table(runs: tuple[int, ...], block: int) -> BlockTable:
    parts, n, segments = [np.zeros((0, 4), dtype=np.int64)], 0, 0
    for segment, start, count, width in runs_of(runs):
        offsets = np.arange(0, width, block, dtype=np.int64)
        s = np.repeat(np.arange(count, dtype=np.int64), len(offsets))
        offset = np.tile(offsets, count)
        parts.append(np.stack([start + s * width + offset, np.minimum(block, width - offset), segment + s, offset], 1))
        n, segments = start + count * width, segment + count
    table = np.ascontiguousarray(np.concatenate(parts))
    aligned, whole, even = (not (table[:, columns] % k).any() for columns, k in ((0, 8), ([0, 1], 8), ([0, 1], 2)))
    widths = np.repeat(np.array(runs[1::2], dtype=np.int64), np.array(runs[::2], dtype=np.int64))
    return BlockTable(table, n, segments, widths, aligned, whole, even)


def add_up(squares: Tensor, runs: Sequence[int]) -> Tensor:
    """Add the squared norms of blocks (R, blocks) up to those of segments, in the order of the blocks: (R, S)."""
    lengths = _blocks_of_segments(tuple(runs), squares.device)
    if not squares.numel():
        return squares.new_zeros((squares.shape[0], len(lengths)))
    # (R, blocks) -> (blocks, R) -> (S, R) -> (R, S)
    columns = squares.t().contiguous()
    return torch.segment_reduce(columns, "sum", lengths=lengths, axis=0, unsafe=True).t().contiguous()


@lru_cache(maxsize=PLANS)
def _blocks_of_segments(runs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return how many blocks each segment has, (S,) int64."""
    counts = [-(-width // BLOCK) for count, width in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]
    return torch.tensor(counts, dtype=torch.int64, device=device)


def run(
    kernel: Callable[..., Any], at: BlockTable, valid: Tensor | int, *args: Any, scratch: int = 0, over: bool = False,
    scales: Scales | None = None,
) -> None:  # fmt: skip
    """Run a compiled loop over all places of all rows, on several threads where it pays.

    Args: valid (R, S) int64; where the loop does not look at it, R. args: of the loop; tensors and arrays become
        addresses, a list of tensors the address of a table of theirs, None 0, a float a float32. scratch: bytes of
        memory that each thread gets, its address being the last argument of the kernel. over: results are written over
        what was read, so that they are in the cache. scales: where they are, for the loops that look at scales.
    """
    rows, blocks = valid if isinstance(valid, int) else valid.shape[0], len(at.table)
    elements, total = rows * at.n, rows * blocks
    if not total:
        return
    kept: list[Any] = []  # what the addresses are of; it must live as long as the loop runs
    lengths = 0 if isinstance(valid, int) else _argument(valid.contiguous(), kept)
    nontemporal = int(elements >= LARGER_THAN_CACHE and not over)
    step, shift, starts, per_row = (STEP, WHOLE, None, 0) if scales is None else scales
    of_row = blocks, at.table.ctypes.data, at.segments, lengths, at.n
    grid = Grid(*of_row, nontemporal, step, shift, _argument(starts, kept), per_row)
    values = [_argument(value, kept) for value in args]

    def work(low: int, high: int) -> None:
        memory = torch.empty(scratch, dtype=torch.uint8, device="cpu")  # aligned to 64 bytes
        extra = (memory.data_ptr(),) if scratch else ()
        kernel(low, high, grid, *values, *extra)

    threads = torch.get_num_threads() if elements >= THREADED else 1
    threads = min(threads, os.cpu_count() or 1, total) if threads > 1 else 1
    # Results do not depend on the cuts: squares are added up per place, and those of places afterwards in their order.
    cuts = [total * t // threads for t in range(threads + 1)]
    others = [_pool(os.getpid()).submit(work, cuts[t], cuts[t + 1]) for t in range(1, threads)]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


def _argument(value: Any, kept: list[Any]) -> Any:
    """Return what a loop takes for a value, see `run`; what has to outlive the address is put into `kept`."""
    if isinstance(value, list):
        value = np.fromiter(map(Tensor.data_ptr, value), np.int64, len(value))
    kept.append(value)
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):
        return tuple(_argument(x, kept) for x in value)
    return 0 if value is None else np.float32(value) if isinstance(value, float) else value


# By process: a forked child has none of the threads of its parent's pool, and would wait for them for ever.
@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="fn")
