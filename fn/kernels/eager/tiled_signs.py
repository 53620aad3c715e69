"""Sign codes by torch functions on a CPU, tile by tile: where no compiler is there for anything faster.

The reference goes over whole vectors again and again, with a fresh one for every result. Here a tile goes through all
its steps while it is in the cache, and what is kept comes from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn.kernels import memory_pool
from fn.kernels.eager.tiles import SHORT, tiles
from fn.kernels.reference import row_length, scale_dtype
from fn.kernels.tracing import cached_plan

PACK = 0x0102040810204080
"""Eight bytes, 0 or 1, times this have their bits side by side in the highest byte: bit i of byte i ends at 56 + i."""


def sign_encode(x: Tensor, valid: Tensor, runs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """See `reference.sign_encode`."""
    return _encode(x.to(scale_dtype(x)), None, None, valid, runs)


def sign_encode_feedback_(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """See `reference.sign_encode_feedback_`."""
    return _encode(x, buffer, sent, valid, runs)


def sign_encode_feedback(
    x: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.sign_encode_feedback`."""
    b = memory_pool.empty(x.shape, torch.promote_types(x.dtype, buffer.dtype), x.device).copy_(x)
    return (b, *_encode(b, buffer, sent, valid, runs))


def sign_serve(
    bits: Tensor, scales: Tensor, buffer: Tensor, sent: Tensor, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.sign_serve`."""
    b = sign_decode_mean(bits, scales, valid, runs)
    return (b, *_encode(b, buffer, sent, valid, runs))


def sign_residual_(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> None:
    """See `reference.sign_residual_`."""
    for tile in tiles(valid, runs):
        part = tile.of(b)
        part.sub_(tile.clear(_delivered(part, tile.scales(scales))))


def sign_residual(b: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """See `reference.sign_residual`."""
    found = memory_pool.empty(b.shape, b.dtype, b.device).copy_(b)
    sign_residual_(found, scales, valid, runs)
    return found


def sign_decode(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """See `reference.sign_decode`."""
    return sign_decode_mean(bits[:, None], scales[:, None], valid, runs)


def sign_decode_mean(bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> Tensor:
    """See `reference.sign_decode_mean`."""
    rows, ranks, width = bits.shape
    found = memory_pool.empty((rows, 8 * width), scales.dtype, scales.device)
    each = found if ranks == 1 else memory_pool.empty(found.shape, found.dtype, found.device)
    signs, scales = _signs(scales.dtype), scales * (1.0 / ranks)
    for r in range(ranks):
        to = each if r else found
        torch.index_select(signs, 0, bits[:, r].reshape(-1).int(), out=to.view(-1, 8))
        for tile in tiles(valid, runs):
            part = tile.of(to).mul_(tile.scales(scales[:, r]))
            if r:
                part = tile.of(found).add_(part)
            tile.clear(part)
    return found[:, : row_length(runs)].contiguous()


def _delivered(part: Tensor, scales: Tensor) -> Tensor:
    """Return scale * sgn(part); sgn(-0.0) is 1."""
    return torch.copysign(scales, part + 0.0)


def _encode(
    x: Tensor, buffer: Tensor | None, sent: Tensor | None, valid: Tensor, runs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the bits and the squares of x (R, n), to which the residual of a buffer is added first, in place."""
    rows, n = x.shape
    signs = memory_pool.empty((rows, n + -n % 8), torch.bool, x.device)
    signs[:, n:] = False
    sums = torch.zeros(valid.shape, dtype=torch.float64, device="cpu")
    fresh = sent is not None and not sent.any()  # a buffer that was sent with scale 0 is an error itself
    for tile in tiles(valid, runs):
        part = tile.of(x)
        if buffer is not None and sent is not None:
            old = tile.of(buffer)
            if not fresh:
                delivered = tile.clear(_delivered(old, tile.scales(sent)))
                old = torch.sub(old, delivered, out=delivered)
            part.add_(old)
        tile.clear(torch.ge(part, 0, out=tile.of(signs)))
        real = part if tile.real >= part.shape[-1] else tile.clear(part.clone())
        sums[tile.rows, tile.segments] += _squares(real)
    return _pack(signs), sums


def _pack(signs: Tensor) -> Tensor:
    """Return the bits of signs (R, n), n a multiple of 8, whose memory is used up."""
    words = signs.view(-1).view(torch.int64).mul_(PACK).bitwise_right_shift_(56)
    return words.to(torch.uint8).view(signs.shape[0], signs.shape[1] // 8)


@cached_plan
def _signs(dtype: torch.dtype) -> Tensor:
    """Return the eight signs that each byte stands for: (256, 8)."""
    bits = (
        torch.arange(256, dtype=torch.int64, device="cpu")[:, None] >> torch.arange(8, dtype=torch.int64, device="cpu")
        & 1
    )
    return (2 * bits - 1).to(dtype)


def _squares(x: Tensor) -> Tensor:
    """Return the sums of squares over the last dimension."""
    whole = x.shape[-1] - x.shape[-1] % SHORT
    total: Tensor = torch.linalg.vector_norm(x[..., whole:], dim=-1).double().square()
    if whole:
        blocks = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (-1, SHORT)), dim=-1)
        total += blocks.double().square().sum(-1)
    return total


_FOUND = (
    sign_encode, sign_encode_feedback, sign_encode_feedback_, sign_residual, sign_residual_, sign_serve, sign_decode,
    sign_decode_mean,
)  # fmt: skip
KERNELS = {f.__name__: f for f in _FOUND}
