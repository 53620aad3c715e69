# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What all kernels of the Triton row share: the cut of rows into blocks, addresses of tensors, launches, vectors.

A program works on one block of one row, at most BLOCK elements that do not cross segments: an entry (first element,
length, segment, offset in the segment) of an int64 table, see `cpu.blocks`. In a row of a message segment s belongs to
tensor s, and the block is also one of that tensor.

Here a block is always a program's. Elements with a scale of their own, which are called a block elsewhere, are a group:
GROUP says how many, and for 0 a segment has one scale. A block is some groups, of which none is in two blocks.

All launches go through `launch`; whatever else is done on the device is an ordinary call of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fn.kernels.cpu.blocks import BlockTable, block_table, runs_of_tensors, scales_of
from fn.kernels.devices import pin_memory
from fn.kernels.gpu.triton.launches import Launch, launch_of
from fn.kernels.gpu.triton.rules import compensated, signed
from fn.kernels.layout import alike_in_memory, bytes_for, contiguous, dtypes_of, plan_of_blocks
from fn.kernels.tracing import PLANS, cached_plan

BLOCK = Launch().block
"""Elements of a block, but for the integer codecs: eight a thread, in two vectors."""

WARPS = 16
"""The most warps of a program: 1024 threads, as many as a program may have, where a warp has 64."""

SUMMED = 1 << 10
"""Blocks of a segment that are added at a time."""

FEW, TABLES = 64, 256
"""Up to FEW tensors, as many tables of addresses are kept as other plans; of more tensors, TABLES are kept: where
gradients get new memory in each step, each step leaves a table behind."""

WITH_STREAMS = ("cuda", "xpu")
"""Devices that copy from pinned memory while the host goes on."""

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What kernels on lists read, as Triton calls it."""

ANYTHING = (
    "n", "blocks", "segments", "per_row", "width", "ranks", "total", "rows", "down", "right", "bits", "received",
)  # fmt: skip
"""Arguments that Triton does not compile anew for: by default it does where a number is 1, and where a number or an
address is a multiple of 16. Of signs, whose bytes are read one by one, the code is the same for all addresses; they
begin behind as many scales as a model has tensors."""

jit: Any = triton.jit


def kernel(f: Any) -> Any:
    """Compile a kernel once for all sizes, and wherever signs lie."""
    return jit(f, do_not_specialize=[name for name in ANYTHING if name in f.__code__.co_varnames])


# on the host


class Cut(NamedTuple):
    """A row cut into blocks.

    host: the blocks, on the host. table: theirs, on the device. ends: (segments + 1,) int64, where the blocks of each
    segment begin and end, on the device. block: the size of a program's block, a power of two. group: elements of a
    group; 0 where a segment has one scale. firsts: (blocks,) int64, the first scale of each block, on the device.
    per_row: scales of a row.
    """

    host: BlockTable
    table: Tensor
    ends: Tensor
    block: int
    group: int
    firsts: Tensor
    per_row: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the elements and the blocks of a row, which kernels call n and blocks."""
        return self.host.n, self.blocks

    @property
    def blocks(self) -> int:
        """Return the blocks of a row."""
        return len(self.host.table)

    def segments(self, valid: Tensor) -> tuple[Any, ...]:
        """Return what kernels take of rows whose segments have padding: table, valid, n, blocks, segments."""
        return self.table, valid.contiguous(), *self.sizes, self.host.segments

    def scales(self, valid: Tensor) -> tuple[Any, ...]:
        """Return what kernels of signs take: table, valid, firsts, n, blocks, segments, per_row."""
        return self.table, valid.contiguous(), self.firsts, *self.sizes, self.host.segments, self.per_row


def cut(runs: Sequence[int], device: torch.device, block: int = BLOCK, group: int = 0) -> Cut:
    """Return the blocks of a row, each at most `block` elements long."""
    return _cut(tuple(runs), device, block, group)


def fits(group: int, block: int = BLOCK) -> bool:
    """Return whether blocks are whole groups of so many elements, and those whole bytes of signs."""
    return group == 0 or (group >= 8 and block % group == 0)


def grouped(valid: Tensor, runs: Sequence[int], group: int) -> tuple[Tensor, Sequence[int], int]:
    """Return valid, runs and a group that fits: groups of other sizes become segments."""
    return (valid, runs, group) if fits(group) else (*plan_of_blocks(valid, tuple(runs), group), 0)


@lru_cache(maxsize=PLANS)
def _cut(runs: tuple[int, ...], device: torch.device, block: int, group: int) -> Cut:
    host = block_table(runs, block)
    longest = int(host.table[:, 1].max(initial=1))
    # (blocks,) -> (segments,), and with a zero in front (segments + 1,)
    counts = np.bincount(host.table[:, 2], minlength=host.segments)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    scales = scales_of(runs, group)
    firsts = scales.starts[host.table[:, 2]] + (host.table[:, 3] >> scales.shift)
    table, bounds, places = (torch.from_numpy(x).to(device) for x in (host.table, ends, firsts))
    return Cut(host, table, bounds, max(16, triton.next_power_of_2(longest)), group, places, scales.total)


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
    """Send a table of addresses, from pinned memory, which torch does not use again before the copy is done.

    A copy from other memory would make the host wait, once for each table.
    """
    # (lists + 2, S) -> (S, lists + 2): what a kernel reads of one tensor lies together
    columns = np.array([*where, sizes, widths or sizes], dtype=np.int64)
    table = torch.from_numpy(np.ascontiguousarray(columns.T))
    table = pin_memory(table) if device.type in WITH_STREAMS else table
    return Addresses(table.to(device, non_blocking=True), not any(a % 16 for a in chain(*where)))


_send_few, _send_many = lru_cache(maxsize=PLANS)(_send), lru_cache(maxsize=TABLES)(_send)


def dtype_of(tensors: Sequence[Tensor]) -> Any:
    """Return the one dtype of the tensors of a list, as Triton calls it, or None; float32 for no tensors."""
    dtypes = dtypes_of(tensors) or {torch.float32}
    return DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


class Lists(NamedTuple):
    """What kernels take of lists of tensors: the blocks of a row, the table of addresses, and constants."""

    row: Cut
    addresses: Tensor
    constants: dict[str, Any]

    @property
    def of_one_shape(self) -> dict[str, Any]:
        """Return constants for kernels that do not ask whether addresses are aligned: they are compiled once.

        Vectors of other widths would add numbers up in another order. Ranks, whose tensors need not lie alike, would
        get norms of other last digits; and the scales of the first codes would compile the kernel once more.
        """
        return {name: value for name, value in self.constants.items() if name != "ALIGNED"}


def lists_of(
    *lists: Sequence[Tensor], runs: Sequence[int] | None = None, block: int = BLOCK, group: int = 0,
    **dtyped: Sequence[Tensor],
) -> Lists | None:  # fmt: skip
    """Return what kernels take of lists of as many tensors each; None for tensors that they do not take.

    All blocks have one size, however small the tensors are: what was compiled for the known answers is what runs.

    Args: runs: of the rows of a message in which the tensors lie in pieces. None: every tensor is a segment of one row.
        block: elements of a program. group: as in `Cut`. dtyped: the lists whose dtype is a constant of the kernel, by
        its name; all others must be float32.
    """
    dtypes = {name: dtype_of(tensors) for name, tensors in dtyped.items()}
    others = [tensors for tensors in lists if not any(tensors is t for t in dtyped.values())]
    if None in dtypes.values() or not lists[0] or not dtypes_of(*others) <= {torch.float32}:
        return None
    # in messages the order of elements is that of all ranks; otherwise it may be any, if all lists have the same
    if not (alike_in_memory(*lists) if runs is None else contiguous(*lists)):
        return None
    row = cut(runs_of_tensors(lists[0]) if runs is None else runs, lists[0][0].device, block, group)
    table = addresses(*lists, widths=() if runs is None else row.host.widths.tolist())
    aligned = table.aligned and (runs is None or row.host.whole)
    return Lists(row, table.table, {**dtypes, "ALIGNED": aligned, "BLOCK": block})


def floats(*numbers: float) -> tuple[float, ...]:
    """Return numbers as floats: Triton would compile a kernel of its own for an int."""
    return tuple(map(float, numbers))


def launch(kernel: Any, like: Tensor, programs: int, *args: Any, **constants: Any) -> None:
    """Launch a kernel on the device of a tensor, with as many warps as its blocks have work for.

    Args: constants: what the kernel is compiled for; BLOCK elements in each of COUNT blocks are a program's.
    """
    if not programs:
        return
    on_device = nullcontext() if like.device.type == "cpu" else torch.accelerator.device_index(like.device.index or 0)
    with on_device:
        kernel[(programs,)](*args, **constants, **options_of(kernel, constants, bounded=is_nvidia(like.device)))


def options_of(kernel: Any, constants: Mapping[str, Any], *, bounded: bool) -> dict[str, Any]:
    """Return what a kernel is compiled with. Args: constants: its own. bounded: whether registers can be bounded."""
    _, per_warp, registers = launch_of(kernel)
    warps = max(1, min(constants.get("COUNT", 1) * constants["BLOCK"] // per_warp, WARPS))
    # a product and a sum are rounded one by one, as in the reference
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return {**options, "maxnreg": registers} if bounded and registers else options


@cached_plan
def ones(count: int, device: torch.device) -> Tensor:
    """Return ones (count,) in float32."""
    return torch.ones(count, dtype=torch.float32, device=device)


def is_nvidia(device: torch.device) -> bool:
    """Return whether a device is a GPU of NVIDIA's, whose compiler alone takes a bound for registers."""
    return device.type == "cuda" and torch.version.hip is None


def outputs(rows: int, row: Cut) -> tuple[Tensor, Tensor]:
    """Return memory for the sign bits of rows, and for the squares of their groups, or else of their blocks."""
    bits = torch.empty((rows, bytes_for(row.host.n)), dtype=torch.uint8, device=row.table.device)
    columns = row.per_row if row.group else row.blocks
    return bits, torch.empty((rows, columns), dtype=torch.float64, device=row.table.device)


def evenly(bits: Tensor) -> Tensor:
    """Return codes (R, W, bytes) whose W R rows lie equally far apart, so that one stride says where each begins.

    Codes are views of messages in which scales follow them. The rows of a message are equally far apart as they are,
    and are not copied.
    """
    rows, ranks, _ = bits.shape
    even = 1 in (rows, ranks) or bits.stride(0) == ranks * bits.stride(1)
    return bits if even and bits.stride(2) == 1 else bits.contiguous()


def messages(bits: Tensor) -> tuple[Any, ...]:
    """Return what kernels take of W messages behind the sizes: their distance in bytes, W, 1 / W."""
    ranks = bits.shape[1]
    return bits.stride(1 if ranks > 1 else 0), ranks, 1.0 / ranks


def sums_of(squares: Tensor, row: Cut) -> Tensor:
    """Return sums of squares, one for each scale: those of blocks are added up for every segment."""
    return squares if row.group else add_up(squares, row)


def add_up(parts: Tensor, row: Cut) -> Tensor:
    """Add what the blocks of rows have summed, (R, blocks) float64, up for every segment: (R, S).

    A program adds the blocks of one segment, in an order that only their number decides.
    """
    sums = torch.empty((parts.shape[0], row.host.segments), dtype=torch.float64, device=parts.device)
    _add_up(parts, row, sums, peaks=False)
    return sums


def add_up_columns(parts: Tensor, row: Cut, *, peaks: bool) -> Tensor:
    """Return what `add_up` does as (S, R).

    Args: peaks: the first row has magnitudes, of which the largest is taken.
    """
    sums = torch.empty((row.host.segments, parts.shape[0]), dtype=torch.float64, device=parts.device)
    # (S, R) -> (R, S) by strides, so that no copy turns the sums
    _add_up(parts, row, sums.t(), peaks=peaks)
    return sums


def _add_up(parts: Tensor, row: Cut, sums: Tensor, *, peaks: bool) -> None:
    args = parts, row.ends, sums, row.blocks, row.host.segments, *sums.stride()
    launch(add_up_kernel, parts, sums.numel(), *args, PEAKS=peaks, BLOCK=SUMMED)


# on the device
#
# Loads are vectors only where Triton knows that addresses are multiples of 16, which ALIGNED says of all of them, and
# that no element is left out. So a kernel has two versions of its work: FULL, for whole blocks, and one for ends.
#
# Offsets are int64: all messages of a step can be more than 2**31 bytes. A program reads its block before it writes it,
# and no program touches another's, so that kernels may write over what they read without a barrier;
# but for `steps.adamw_block`, which says why.


@kernel
def add_up_kernel(parts, ends, sums, blocks, segments, down, right, PEAKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sums (R, S) of parts (R, blocks) in float64; of the first row, if it has peaks, the largest parts.

    down, right: the strides of the sums.
    """
    k = tl.program_id(0).to(tl.int64)
    r = k // segments
    s = k - r * segments
    end = tl.load(ends + s + 1)
    total, peak = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int64)
    for first in range(tl.load(ends + s), end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        part = tl.load(parts + r * blocks + i, mask=i < end, other=0.0)
        total += part
        if PEAKS:  # as integers, of which a NaN is the largest
            peak = tl.maximum(peak, part.to(tl.int64, bitcast=True))
    result = tl.sum(total)
    if PEAKS:
        result = tl.where(r == 0, tl.max(peak).to(tl.float64, bitcast=True), result)
    tl.store(sums + r * down + s * right, result)


@jit
def block_of(table, n, blocks, ALIGNED: tl.constexpr):
    """Return a program's row, first element, position in all rows, length, segment, and offset in that."""
    k = tl.program_id(0).to(tl.int64)
    r = k // blocks
    entry = table + 4 * (k - r * blocks)
    first = tl.load(entry)
    position, offset = r * n + first, tl.load(entry + 3)
    if ALIGNED:
        position, offset = tl.multiple_of(position, 8), tl.multiple_of(offset, 8)
    return r, first, position, tl.load(entry + 1), tl.load(entry + 2), offset


@jit
def scales_of_block(firsts, r, s, blocks, segments, per_row, GROUP: tl.constexpr):
    """Return which scale of a row is the first one of a program's block, and how many a row has."""
    if GROUP:
        first = tl.load(firsts + tl.program_id(0) - r * blocks)
    else:
        first, per_row = s, segments
    return first, per_row


@jit
def pointer(addresses, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to an element of a tensor, whose address is in memory."""
    x = tl.load(addresses).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x + start


@jit
def piece_of(sizes, r, offset, length, ALIGNED: tl.constexpr):
    """Return where a block of row r begins in its tensor, and how many of its elements are inside of that.

    sizes: where the table of addresses has the tensor's elements, and behind them the width of its pieces.
    """
    start = r * tl.load(sizes + 1) + offset
    if ALIGNED:  # said where the number is made: nobody hears it of an argument
        start = tl.multiple_of(start, 8)
    return start, tl.minimum(tl.load(sizes) - start, length)


@jit
def octets(BLOCK: tl.constexpr):
    """Return the elements of a block as (BLOCK / 8, 8): a row is a byte of signs."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@jit
def load(x, i, length, FULL: tl.constexpr):
    """Return elements as float32, zero behind the end."""
    value = tl.load(x + i) if FULL else tl.load(x + i, mask=i < length, other=0.0)
    return value.to(tl.float32)


@jit
def store(x, i, value, length, FULL: tl.constexpr):
    """Write elements, rounded to the dtype of x."""
    value = value.to(x.dtype.element_ty)
    if FULL:
        tl.store(x + i, value)
    else:
        tl.store(x + i, value, mask=i < length)


@jit
def scale_of(scales, length, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the scale of a block, or of its octets (BLOCK / 8, 1). scales: its own, from the first on."""
    if GROUP:
        j = tl.arange(0, BLOCK // 8)[:, None]
        scale = tl.load(scales + j // (GROUP // 8), mask=8 * j < length, other=0.0)
    else:
        scale = tl.load(scales)
    return scale


@jit
def write_codes(b, i, length, real, bits, squares, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sign bits of a block and the squares of norms, in which only real elements count.

    squares: where that of the block goes, or those of its groups.
    """
    counts = (i < real) & (i < length)
    # (BLOCK / 8, 8) -> (BLOCK / 8,) bytes
    ones = ((b >= 0) & counts).to(tl.int32) << tl.arange(0, 8)[None, :]
    j = tl.arange(0, BLOCK // 8)
    tl.store(bits + j, tl.sum(ones, axis=1).to(tl.uint8), mask=8 * j < length)
    # The padding of b keeps what it has, which may not count. The order of the sum depends on whether gradients are
    # aligned, as views of a bucket are not: in float32 the scale, and so later codes, would have other last digits.
    b = tl.where(counts, b, 0.0).to(tl.float64)
    if GROUP:
        g = tl.arange(0, BLOCK // GROUP)
        # (BLOCK / 8, 8) -> (BLOCK / 8,) -> (BLOCK / GROUP, GROUP / 8) -> (BLOCK / GROUP,)
        sums = tl.sum(tl.reshape(tl.sum(b * b, axis=1), (BLOCK // GROUP, GROUP // 8)), axis=1)
        tl.store(squares + g, sums, mask=GROUP * g < length)
    else:
        tl.store(squares, tl.sum(b * b))


@jit
def encode_compensated(x, buffer, sent, out, bits, squares, i, length, real, FULL: tl.constexpr, GROUP: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Add the residual error to x, what is left of a buffer that was sent, and encode."""
    old = load(buffer, i, length, FULL)
    b = tl.where(i < real, compensated(x, old, scale_of(sent, length, GROUP, BLOCK), 0.0), x + old)
    store(out, i, b, length, FULL)
    write_codes(b, i, length, real, bits, squares, GROUP, BLOCK)


@jit
def mean_of(bits, scales, width, ranks, per_row, share, i, length, real, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return share times the sum over the ranks of scale * sign, zero behind the real elements.

    bits, scales: of the first rank; those of the next are `width` bytes and `per_row` numbers on.
    """
    j, k = tl.arange(0, BLOCK // 8), tl.arange(0, 8)
    total = tl.zeros((BLOCK // 8, 8), tl.float32)
    for w in range(ranks):
        byte = tl.load(bits + j, mask=8 * j < length, other=0).to(tl.int32)
        scale = scale_of(scales, length, GROUP, BLOCK) * share
        decoded = signed(((byte[:, None] >> k[None, :]) & 1) - 1, scale, 0)
        total = tl.where(w == 0, decoded, total + decoded)  # 0 + -0 would be 0, where the reference begins with -0
        bits += width
        scales += per_row
    return tl.where(i < real, total, 0.0)


@jit
def peak_of(x):
    """Return the largest magnitude, by its bits as an integer; a NaN's are the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
