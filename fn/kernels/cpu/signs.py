"""The sign kernels on a CPU: the loops of `sign_loops` as cells of the table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fn.kernels import reference
from fn.kernels.cpu import sign_loops as loops
from fn.kernels.cpu.blocks import BlockTable, block_table, blocks_of_segments, run
from fn.kernels.memory_pool import empty
from fn.kernels.reference import NORM_BLOCK
from fn.kernels.reference.layout import plain


def _single(*tensors: Tensor) -> list[Tensor] | None:
    """Return the tensors as contiguous float32, or None if one of them is float64."""
    if any(t.dtype == torch.float64 for t in tensors):
        return None
    return [t.to(torch.float32).contiguous() for t in tensors]


@lru_cache(maxsize=2)
def _norms_agree(width: int) -> bool:
    """Return whether this torch adds squares in the order of the loops, for rows of a width."""
    x = torch.sin(torch.arange(1.0, 1 + 256 * width, device="cpu")).view(256, width)
    x = x * torch.logspace(-3, 3, 256, device="cpu")[:, None]
    valid = torch.full((256, 1), width, device="cpu")
    sums = _encode(x.contiguous(), None, None, None, valid, block_table([1, width]))[1]
    return torch.equal(sums, reference.sum_of_squares(x, [1, width]))


def outputs(rows: int, at: BlockTable) -> tuple[Tensor, Tensor]:
    """Return memory for the bits of rows, and for the squares of their places."""
    bits = empty((rows, reference.bytes_for(at.n)), torch.uint8)
    return bits, torch.empty((rows, len(at.table)), dtype=torch.float64, device="cpu")


def _encode(
    x: Tensor, buffer: Tensor | None, sent: Tensor | None, b: Tensor | None, valid: Tensor, at: BlockTable
) -> tuple[Tensor, Tensor]:
    """Return the bits and the squares of places; write what is encoded into b, if there is one, which may be x."""
    found = outputs(x.shape[0], at)
    addresses = [0 if t is None else t.data_ptr() for t in (x, buffer, sent, b, *found)]
    run(loops.encode, at, valid, *addresses, over=b is x)
    return found


def norms_agree(at: BlockTable) -> bool:
    """Return whether this torch adds squares in the order of the loops."""
    return _norms_agree(64 if at.whole else 63)


def sums_of(squares: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the sums of squares of the segments from those of the places, (R, S) float64."""
    lengths = blocks_of_segments(tuple(runs), NORM_BLOCK, squares.device)
    sums = torch.empty((squares.shape[0], len(lengths)), dtype=torch.float64, device="cpu")
    loops.add_up(squares.data_ptr(), lengths.data_ptr(), *sums.shape, sums.data_ptr())
    return sums


def finish(
    b: Tensor, bits: Tensor, squares: Tensor, at: BlockTable, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the bits, and the sums of squares of the segments from those of the places."""
    if norms_agree(at):
        return bits, sums_of(squares, runs)
    return bits, reference.sum_of_squares(torch.where(reference.padding_mask(b, valid, runs), b, 0.0), runs)


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode`."""
    at, found = block_table(runs), _single(x)
    if found is None or not at.aligned:
        return NotImplemented
    valid = valid.contiguous()
    return finish(found[0], *_encode(found[0], None, None, None, valid, at), at, valid, runs)


def sign_encode_feedback(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode_feedback`."""
    at, found = block_table(runs), _single(x, buffer, sent)
    if found is None or not at.aligned:
        return NotImplemented
    x, buffer, sent = found
    valid, b = valid.contiguous(), empty((x.shape[0], at.n), torch.float32)
    return (b, *finish(b, *_encode(x, buffer, sent, b, valid, at), at, valid, runs))


def sign_encode_feedback_(x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_encode_feedback_`."""
    at = block_table(runs)
    if not plain((x, buffer, sent)) or not at.aligned:
        return NotImplemented
    valid = valid.contiguous()
    return finish(x, *_encode(x, buffer, sent, x, valid, at), at, valid, runs)


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_residual`."""
    at, found = block_table(runs), _single(b, scales)
    if found is None:
        return NotImplemented
    b, scales = found
    out = empty(b.shape, torch.float32)
    run(loops.residual, at, valid.contiguous(), b.data_ptr(), scales.data_ptr(), out.data_ptr())
    return out


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_residual_`."""
    if not plain((b, scales)):
        return NotImplemented
    addresses = b.data_ptr(), scales.data_ptr(), b.data_ptr()
    run(loops.residual, block_table(runs), valid.contiguous(), *addresses, over=True)
    return None


def messages(bits: Tensor) -> tuple[Tensor, int, int]:
    """Return bits (R, W, bytes), the bytes from row to row, and those from message to message."""
    bits = bits if bits.stride(-1) == 1 or bits.shape[-1] <= 1 else bits.contiguous()
    return bits, bits.stride(0), bits.stride(1)


def divided(scales: Tensor) -> Tensor:
    """Return scales (R, W, S) of W messages as what each adds to their mean."""
    return scales if scales.shape[1] == 1 else (scales * (1.0 / scales.shape[1])).contiguous()


def serve(
    bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, b: Tensor | None, valid: Tensor, at: BlockTable
) -> tuple[Tensor, Tensor]:
    """Return the bits and the squares of places of the mean of W messages, with feedback, which is written into b.

    Args: scales: `divided`. b: None where it is not wanted. valid: contiguous.
    """
    found, (received, row_stride, stride) = outputs(bits.shape[0], at), messages(bits)
    message = received.data_ptr(), row_stride, stride, bits.shape[1], scales.data_ptr()
    addresses = [0 if t is None else t.data_ptr() for t in (buffer, sent, b, *found)]
    run(loops.serve, at, valid, *message, *addresses, scratch=4 * NORM_BLOCK)
    return found


def sign_serve(bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_serve`."""
    at, found = block_table(runs), _single(divided(scales), buffer, sent)
    if found is None or not at.aligned:
        return NotImplemented
    scales, buffer, sent = found
    valid, b = valid.contiguous(), empty((bits.shape[0], at.n), torch.float32)
    return (b, *finish(b, *serve(bits, scales, buffer, sent, b, valid, at), at, valid, runs))


def _decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    at, found = block_table(runs), _single(scales)
    if found is None or not at.aligned:
        return NotImplemented
    received, row_stride, stride = messages(bits)
    rows, ranks = bits.shape[:2]
    out = empty((rows, at.n), torch.float32)
    message = (received.data_ptr(), row_stride, stride, ranks, found[0].data_ptr())
    run(loops.decode, at, valid.contiguous(), *message, out.data_ptr())
    return out


def sign_decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode`."""
    return _decode(bits[:, None], scales[:, None], valid, runs)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Any:
    """See `reference.sign_decode_mean`."""
    return _decode(bits, scales * (1.0 / bits.shape[1]), valid, runs)


_FOUND = (
    sign_encode,
    sign_encode_feedback,
    sign_encode_feedback_,
    sign_residual,
    sign_residual_,
    sign_serve,
    sign_decode,
    sign_decode_mean,
)
KERNELS = {f.__name__: f for f in _FOUND}
