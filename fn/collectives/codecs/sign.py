"""The sign codec: one bit per element and a scale per tensor or block. `sign`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.base import check_whole
from fn.collectives.codecs.codec import Codec, Fused, Segments, tile
from fn.collectives.feedback import Classic, LazyError
from fn.errors import expected
from fn.kernels import ops
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan, is_concrete

Tree = Any


class SignPayload(NamedTuple):
    """scales: (R, S) float32 or float64; bits: (R, n / 8) uint8."""

    scales: Tensor
    bits: Tensor


def sign(block: int | None = None, *, padding_counts: bool = False) -> Codec:
    """Send one bit per element and the root mean square of the tensor, or of each block, as its scale.

        C(x) = (||x||_2 / sqrt(n)) sgn(x),   sgn(0) = +1

    The collectives first cut a tensor into W pieces, one per server, each padded to a multiple of `align`, which is 8
    here. Blocks start anew at every piece, and a server's scale is that of its piece; a worker's scale without blocks
    is that of the whole tensor.

    Args:
        block: elements of a block. None: one scale for the tensor (all rows that are encoded together).
        padding_counts: count padding elements as data, which is what DeepSpeed does: they dilute the scale and keep
            an error that oscillates.
    Raises: ValueError if block is not a positive multiple of 8.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), section 3, with the scale of Bernstein et al., signSGD with
        majority vote, taken in the 2-norm as the authors' code does.
    Differs: by default padding is neither counted nor given an error.
    """
    if block is not None:
        check_whole("block", block)
    if block is not None and (block <= 0 or block % 8):
        raise ValueError(expected("block", "None or a positive multiple of 8", f"{block}"))
    return _sign(block, padding_counts, None)._replace(make=partial(sign, block, padding_counts=padding_counts))


class _Place(NamedTuple):
    """How R rows of n elements are given to the kernels: as K rows with runs; valid (K, S).

    roots: square roots of what each scale counts, at least 1: (K, S), or (1, S) for scales of whole tensors; by dtype.
    """

    rows: int
    valid: Tensor
    runs: list[int]
    roots: dict[torch.dtype, Tensor]

    def of(self, x: Tensor) -> Tensor:
        """Return x as the kernels' rows."""
        return x.reshape(self.rows, -1)


def _sign(block: int | None, padding_counts: bool, segments: Segments | None) -> Codec:
    def placed(rows: int, valid: Tensor, runs: list[int]) -> _Place:
        counts = valid if block is not None else valid.sum(0, keepdim=True)
        roots = counts.clamp(min=1).double().sqrt()
        return _Place(rows, valid, runs, {torch.float64: roots, torch.float32: roots.float()})

    @cached_plan
    def place(rows: int, n: int, device: torch.device, merge: bool = True) -> _Place:
        if segments is None:
            widths: tuple[int, ...] = (n,)
            valid = torch.full((rows, 1), n, dtype=torch.int64, device=device)
        else:
            widths, valid = segments.widths, segments.valid.to(device).expand(rows, -1)
            if padding_counts:
                valid = torch.tensor(widths, dtype=torch.int64, device=device).expand(rows, -1)
        if block is not None:
            return placed(rows, *tile(widths, valid, block))
        if merge and len(widths) == 1:  # one tensor: its rows are one vector, and its norm is taken as of one vector
            return placed(1, valid.sum(0, keepdim=True), [1, rows * n])
        return placed(rows, valid.contiguous(), [v for w in widths for v in (1, w)])

    def finish(rows: int, at: _Place, bits: Tensor, sums: Tensor, dtype: torch.dtype) -> tuple[SignPayload, Tensor]:
        """Return the payload, and the scales (K, S) as the kernels take them: root mean squares, 0 where nothing is."""
        if block is None and sums.shape[0] > 1:  # a tensor's scale is the same in all rows
            sums = sums.sum(0, keepdim=True)
        scales = sums.sqrt().to(dtype) / at.roots[dtype]
        if scales.shape[0] != at.rows:
            scales = scales.expand(at.rows, -1).contiguous()
        if rows == at.rows:
            return SignPayload(scales, bits), scales
        return SignPayload(scales.expand(rows, -1), bits.reshape(rows, -1)), scales

    def encode(x: Tensor) -> SignPayload:
        at = place(x.shape[0], x.shape[1], x.device)
        bits, sums = torch.ops.fn.sign_encode(at.of(x), at.valid, at.runs)
        return finish(x.shape[0], at, bits, sums, scale_dtype(x))[0]

    def decode(payload: SignPayload) -> Tensor:
        at = place(payload.bits.shape[0], payload.bits.shape[1] * 8, payload.bits.device, merge=False)
        decoded: Tensor = torch.ops.fn.sign_decode(payload.bits, payload.scales.contiguous(), at.valid, at.runs)
        return decoded

    def decode_mean(payload: SignPayload) -> Tensor:
        at = place(1, payload.bits.shape[1] * 8, payload.bits.device)
        scales = payload.scales.contiguous()
        mean: Tensor = torch.ops.fn.sign_decode_mean(payload.bits[None], scales[None], at.valid, at.runs)
        return mean[0]

    with_feedback = _sign_with_feedback(place, finish, segments)
    if block is not None:
        with_feedback = with_feedback._replace(averages=None)  # a segment must be a tensor

    def fused(rule: Any) -> Fused | None:
        return with_feedback if isinstance(rule, Classic) else None

    return Codec(
        encode,
        decode,
        align=8,
        bits=1.0 if block is None else 1.0 + 32.0 / block,
        decode_mean=decode_mean,
        segmented=cached_plan(lambda s: _sign(block, padding_counts, s)),  # in the codec, so that both end together
        fused=fused,
    )


def _sign_with_feedback(
    place: Callable[..., _Place], finish: Callable[..., tuple[SignPayload, Tensor]], segments: Segments | None
) -> Fused:
    """Return sign and classic feedback in one: the error may be a vector, or lazy."""
    length = 0 if segments is None else sum(segments.widths)

    def init(x: Tensor) -> LazyError:
        at = place(*x.shape, x.device)
        buffer = torch.zeros_like(x, dtype=scale_dtype(x))
        return LazyError(buffer.reshape(-1), buffer.new_zeros(at.valid.shape))

    def accepts(x: Tensor, error: Tree) -> bool:
        buffer = error.buffer if isinstance(error, LazyError) else error
        return isinstance(buffer, Tensor) and buffer.dtype in (torch.float32, torch.float64)

    def sent(error: Tree, at: _Place) -> tuple[Tensor, Tensor]:
        if isinstance(error, LazyError):
            return at.of(error.buffer), error.scale
        return at.of(error), error.new_zeros(at.valid.shape)  # an error is a buffer that was sent with scale 0

    def keep(error: Tree, b: Tensor, scales: Tensor, at: _Place) -> Tree:
        if isinstance(error, LazyError):
            return LazyError(b.reshape(-1), scales)
        if is_concrete(b):  # b is a kernel's result and nobody else's
            ops.direct("sign_residual_", b, scales, at.valid, at.runs)
            return b.reshape(-1)
        return torch.ops.fn.sign_residual(b, scales, at.valid, at.runs).reshape(-1)

    def encode(x: Tensor, error: Tree) -> tuple[SignPayload, Tree]:
        at = place(*x.shape, x.device)
        b, bits, sums = torch.ops.fn.sign_encode_feedback(at.of(x), *sent(error, at), at.valid, at.runs)
        payload, scales = finish(x.shape[0], at, bits, sums, b.dtype)
        return payload, keep(error, b, scales, at)

    def encode_over(x: Tensor, error: Tree) -> tuple[SignPayload, Tree]:
        at = place(*x.shape, x.device)
        b, (buffer, scale) = at.of(x), sent(error, at)
        if b.dtype != buffer.dtype or not is_concrete(b, buffer):
            return encode(x, error)
        bits, sums = torch.ops.fn.sign_encode_feedback_(b, buffer, scale, at.valid, at.runs)
        payload, scales = finish(x.shape[0], at, bits, sums, b.dtype)
        return payload, keep(error, b, scales, at)

    def averages(
        mu: list[Tensor], grads: list[Tensor], decay: float, *, error: Tree, rows: int
    ) -> tuple[SignPayload, Tree]:
        assert segments is not None
        at = place(rows, length, mu[0].device)
        b, bits, sums = ops.direct("momentum_encode", mu, grads, decay, *sent(error, at), at.valid, at.runs)
        payload, scales = finish(rows, at, bits, sums, b.dtype)
        return payload, keep(error, b, scales, at)

    def serve(received: SignPayload, error: Tree) -> tuple[SignPayload, Tree]:
        at = place(1, received.bits.shape[1] * 8, received.bits.device)
        args = received.bits[None], received.scales.contiguous()[None], *sent(error, at), at.valid, at.runs
        b, bits, sums = ops.direct("sign_serve", *args) if is_concrete(*args[:4]) else torch.ops.fn.sign_serve(*args)
        payload, scales = finish(1, at, bits, sums, b.dtype)
        return payload, keep(error, b, scales, at)

    def settle(error: Tree, rows: int) -> Tensor:
        if not isinstance(error, LazyError):
            plain: Tensor = error
            return plain
        at = place(rows, error.buffer.shape[0] // rows, error.buffer.device)
        residual: Tensor = torch.ops.fn.sign_residual(*sent(error, at), at.valid, at.runs)
        return residual.reshape(-1)

    by_tensor = averages if segments is not None else None
    return Fused(init, accepts, encode, settle, serve, by_tensor, encode_over)
