"""What every kernel of the Triton row is launched with: the cut of a row into blocks, addresses of tensors, warps.

All launches go through `launch`; whatever else is done on the device is an ordinary call of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fn.kernels.cpu.blocks import BlockTable, block_table
from fn.kernels.devices import pin_memory
from fn.kernels.gpu import triton_sums
from fn.kernels.reference.layout import dtypes_of
from fn.kernels.tracing import PLANS

BLOCK = 1 << 12
"""Elements of a block, but for the integer codecs: eight a thread, in two vectors."""

PER_WARP = 256
"""Elements that a warp works on."""

WARPS = 16
"""The most warps of a program: 1024 threads, where a warp has 64."""

SUMMED = 1 << 10
"""Blocks of a segment that are added at a time."""

FEW, TABLES = 64, 256
"""Tensors of which as many tables of addresses are kept as other plans, and how many are kept of more tensors: where
gradients come and go, each step leaves one behind."""

WITH_STREAMS = ("cuda", "xpu")
"""Devices that copy from pinned memory while the host goes on."""

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What kernels on lists read, as Triton calls it."""


class Cut(NamedTuple):
    """A row cut into blocks, on a device.

    at: the blocks. table: theirs, on the device. ends: (segments + 1,) int64, where the blocks of each segment begin
    and end, on the device. block: the size of a program's block, a power of two.
    """

    at: BlockTable
    table: Tensor
    ends: Tensor
    block: int


@lru_cache(maxsize=PLANS)
def cut(runs: tuple[int, ...], block: int, device: torch.device) -> Cut:
    """Return the blocks of a row, each at most `block` elements long."""
    at = block_table(runs, block)
    longest = int(at.table[:, 1].max(initial=1))
    counts = np.bincount(at.table[:, 2], minlength=at.segments)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    table, bounds = (torch.from_numpy(x).to(device) for x in (at.table, ends))
    return Cut(at, table, bounds, max(16, triton.next_power_of_2(longest)))


class Addresses(NamedTuple):
    """Where the tensors of lists are.

    table: (S, lists + 2) int64 on the device: the addresses of tensor s of every list, its elements and its width.
    aligned: all addresses are multiples of 16, which the widest vector needs.
    """

    table: Tensor
    aligned: bool


def addresses(*lists: Sequence[Tensor], widths: Sequence[int] = ()) -> Addresses:
    """Return where lists of as many tensors each, at least one, are; it is sent to the device once.

    Args: widths: of the pieces in which the tensors lie in rows, none where they lie in no rows.
    """
    device = lists[0][0].device
    where = tuple(tuple(map(Tensor.data_ptr, tensors)) for tensors in lists)
    sizes = tuple(map(Tensor.numel, lists[0]))
    send = _send_few if len(sizes) <= FEW else _send_many
    return send(where, sizes, tuple(widths), device, _stream(device))


def _stream(device: torch.device) -> int:
    """Return the current stream: what is sent on one is not there yet on another."""
    return torch.accelerator.current_stream(device).stream_id if device.type in WITH_STREAMS else 0


def _send(
    where: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], widths: tuple[int, ...], device: torch.device,
    stream: int,
) -> Addresses:  # fmt: skip
    """Send a table of addresses, from pinned memory, which torch does not use again before the copy is done."""
    columns = np.array([*where, sizes, widths or sizes], dtype=np.int64)
    table = torch.from_numpy(np.ascontiguousarray(columns.T))
    table = pin_memory(table) if device.type in WITH_STREAMS else table
    return Addresses(table.to(device, non_blocking=True), not any(a % 16 for a in chain(*where)))


_send_few, _send_many = lru_cache(maxsize=PLANS)(_send), lru_cache(maxsize=TABLES)(_send)


def dtype_of(tensors: Sequence[Tensor]) -> Any:
    """Return the one dtype of the tensors of a list, as Triton calls it, or None; float32 for no tensors."""
    found = dtypes_of(tensors) or {torch.float32}
    return DTYPES.get(found.pop()) if len(found) == 1 else None


def launch(kernel: Any, like: Tensor, programs: int, *args: Any, **constants: Any) -> None:
    """Launch a kernel on the device of a tensor, with as many warps as its blocks have work for.

    Args: constants: what the kernel is compiled for; BLOCK elements in each of COUNT blocks are a program's.
    """
    if not programs:
        return
    here = nullcontext() if like.device.type == "cpu" else torch.accelerator.device_index(like.device.index or 0)
    warps = constants.get("COUNT", 1) * constants["BLOCK"] // PER_WARP
    with here:
        # a product and a sum are rounded one by one, as in the reference
        kernel[(programs,)](*args, **constants, num_warps=max(1, min(warps, WARPS)), enable_fp_fusion=False)


def add_up(parts: Tensor, at: Cut) -> Tensor:
    """Add what the blocks of rows have found, (R, blocks) float64, up for every segment: (R, S).

    A program adds the blocks of one segment, in an order that only their number decides.
    """
    sums = torch.empty((parts.shape[0], at.at.segments), dtype=torch.float64, device=parts.device)
    _add_up(parts, at, sums, peaks=False)
    return sums


def add_up_columns(parts: Tensor, at: Cut, *, peaks: bool) -> Tensor:
    """Return what `add_up` does as (S, R).

    Args: peaks: the first row has magnitudes, of which the largest is taken.
    """
    sums = torch.empty((at.at.segments, parts.shape[0]), dtype=torch.float64, device=parts.device)
    _add_up(parts, at, sums.t(), peaks=peaks)
    return sums


def _add_up(parts: Tensor, at: Cut, sums: Tensor, *, peaks: bool) -> None:
    ends = parts, at.ends, sums, len(at.at.table), at.at.segments, *sums.stride()
    launch(triton_sums.add_up, parts, sums.numel(), *ends, PEAKS=peaks, BLOCK=SUMMED)
