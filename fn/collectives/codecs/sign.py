"""The sign codec: one bit per element and a scale per tensor or block. `sign`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.collectives.codecs.codec import Codec, Fused, Segments, segments_of
from fn.collectives.codecs.integer import checked_block
from fn.collectives.feedback import Classic, LazyError
from fn.kernels.layout import blocks_of, count_scales, scale_dtype
from fn.kernels.table import direct
from fn.kernels.tracing import cached_plan, is_concrete

Tree = Any


class SignPayload(NamedTuple):
    """scales: (R, S) float32 or float64, of blocks bfloat16; bits: (R, n / 8) uint8."""

    scales: Tensor
    bits: Tensor


def sign(block: int | None = None) -> Codec:
    """Send one bit per element and the root mean square of the tensor, or of each block, as its scale.

        C(x) = (||x||_2 / sqrt(n)) sgn(x),   sgn(0) = +1

    The collectives first cut a tensor into W pieces, one per server, each padded to a multiple of `align`, which is 8
    here. Blocks start anew at every piece, and a server's scale is that of its piece; a worker's scale without blocks
    is that of the whole tensor.

    >>> import torch, fn
    >>> payload = fn.sign().encode(torch.tensor([[3.0, -1.0, 1.0, -3.0, 1.0, 1.0, -1.0, -1.0]]))
    >>> payload                                             # 53 is 0b00110101: the first element is the lowest bit
    SignPayload(scales=tensor([[1.7321]]), bits=tensor([[53]], dtype=torch.uint8))

    Args:
        block: elements of a block, 1 + 16 / block bits per element, for scales travel as bfloat16, which has the
            range of float32 (float16 ends at 6e-8, where late gradients lie). None: one scale for the tensor (all rows
            that are encoded together), in float32.
    Raises: ValueError if block is not a positive multiple of 8.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), section 3, with the scale of Bernstein et al., signSGD with
        majority vote, taken in the 2-norm as the authors' code does.
    Differs: padding is neither counted nor given an error; in the authors' code, and in DeepSpeed's, it is both.
    """
    block = None if block is None else checked_block(block)
    return _sign(block, None)._replace(make=partial(sign, block))


class _Layout(NamedTuple):
    """How R rows of n elements are given to the kernels: as K rows with runs; valid (K, S), and the size of blocks.

    0: a segment has one scale.
    """

    rows: int
    valid: Tensor
    runs: tuple[int, ...]
    block: int

    @property
    def arguments(self) -> tuple[Tensor, tuple[int, ...], int]:
        """Return what kernels take of the rows."""
        return self.valid, self.runs, self.block

    @property
    def shape_of_scales(self) -> tuple[int, int]:
        """Return (K, B)."""
        return self.rows, count_scales(self.runs, self.block)

    def rows_of(self, x: Tensor) -> Tensor:
        """Return x as the kernels' rows."""
        return x.reshape(self.rows, -1)


def _sign(block: int | None, segments: Segments | None) -> Codec:
    """Return the codec that `sign` describes. segments: where tensors lie in a row; None: all rows are one tensor's."""

    @cached_plan
    def lay_out(rows: int, n: int, device: torch.device, merge: bool = block is None) -> _Layout:
        widths, valid = segments_of(segments, rows, n, device)
        if merge and len(widths) == 1:  # one tensor: its rows are one vector, and its norm is taken as of one vector
            return _Layout(1, valid.sum(0, keepdim=True), (1, rows * n), block or 0)
        return _Layout(rows, valid.contiguous(), tuple(Segments(widths, valid).runs), block or 0)

    @cached_plan
    def roots_of(layout: _Layout, dtype: torch.dtype) -> Tensor:
        """Return square roots of how much each scale is of, at least 1: (K, B), or (1, S) of whole tensors."""
        each, _ = blocks_of(*layout.arguments)
        # (K, S) -> (1, S): a tensor has one scale in all rows
        counts = each if block is not None else each.sum(0, keepdim=True)
        # In float64, rounded once: float32 does not hold every count above 2^24.
        return counts.clamp(min=1).double().sqrt().to(dtype)

    def finish(
        rows: int, layout: _Layout, bits: Tensor, sums: Tensor, dtype: torch.dtype
    ) -> tuple[SignPayload, Tensor]:
        """Return the payload, and the scales (K, S) as the kernels take them: root mean squares, 0 where nothing is."""
        if block is None and sums.shape[0] > 1:  # a tensor's scale is the same in all rows
            # (R, S) -> (1, S)
            sums = sums.sum(0, keepdim=True)
        scales = sums.sqrt().to(dtype) / roots_of(layout, dtype)
        if block is not None:
            sent = scales.bfloat16()  # what is decoded, so a rounding stays in the error
            return SignPayload(sent.reshape(rows, -1), bits.reshape(rows, -1)), sent.to(dtype)
        if scales.shape[0] != layout.rows:
            # (1, S) -> (K, S); a kernel takes an address, to which an expanded tensor is one row
            scales = scales.expand(layout.rows, -1).contiguous()
        if rows == layout.rows:
            return SignPayload(scales, bits), scales
        # (1, R n / 8) -> (R, n / 8): n is a multiple of 8, so that each row begins with a byte
        return SignPayload(scales.expand(rows, -1), bits.reshape(rows, -1)), scales

    def encode(x: Tensor) -> SignPayload:
        layout = lay_out(x.shape[0], x.shape[1], x.device)
        bits, sums = torch.ops.fn.sign_encode(layout.rows_of(x), *layout.arguments)
        return finish(x.shape[0], layout, bits, sums, scale_dtype(x))[0]

    def decode(payload: SignPayload) -> Tensor:
        # Not merged: each row comes from another rank, with a scale of its own.
        layout = lay_out(payload.bits.shape[0], payload.bits.shape[1] * 8, payload.bits.device, merge=False)
        # (R, ...) -> (R, 1, ...): a mean of one message
        one = payload.bits[:, None], scales_of(payload)[:, None]
        decoded: Tensor = torch.ops.fn.sign_decode_mean(*one, *layout.arguments)
        return decoded

    def decode_mean(payload: SignPayload) -> Tensor:
        layout = lay_out(1, payload.bits.shape[1] * 8, payload.bits.device)
        scales = scales_of(payload)
        # (W, n / 8) -> (1, W, n / 8), one mean of W messages
        mean: Tensor = torch.ops.fn.sign_decode_mean(payload.bits[None], scales[None], *layout.arguments)
        return mean[0]

    with_feedback = _sign_with_feedback(lay_out, finish, segments, block or 0)

    def fused(rule: Any) -> Fused | None:
        return with_feedback if isinstance(rule, Classic) else None

    return Codec(
        encode,
        decode,
        align=8,
        bits=1.0 if block is None else 1.0 + 16.0 / block,
        decode_mean=decode_mean,
        segmented=cached_plan(lambda s: _sign(block, s)),  # in the codec, so that both end together
        fused=fused,
    )


def scales_of(payload: SignPayload, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the scales of a payload as the kernels take them."""
    scales = payload.scales.contiguous()
    return scales.to(dtype) if scales.dtype == torch.bfloat16 else scales


def _sign_with_feedback(
    lay_out: Callable[..., _Layout], finish: Callable[..., tuple[SignPayload, Tensor]], segments: Segments | None,
    block: int,
) -> Fused:
    """Return sign and classic feedback in one: the error may be a vector, or lazy."""

    def init(x: Tensor) -> LazyError:
        buffer = torch.zeros_like(x, dtype=scale_dtype(x))
        return LazyError(buffer.reshape(-1), buffer.new_zeros(lay_out(*x.shape, x.device).shape_of_scales))

    def accepts(x: Tensor, error: Tree) -> bool:
        buffer = error.buffer if isinstance(error, LazyError) else error
        return isinstance(buffer, Tensor) and buffer.dtype in (torch.float32, torch.float64)

    def sent(error: Tree, layout: _Layout) -> tuple[Tensor, Tensor]:
        """Return what was encoded last and its scales; a plain error is a buffer that was sent with scale 0."""
        if isinstance(error, LazyError):
            return layout.rows_of(error.buffer), error.scale
        return layout.rows_of(error), error.new_zeros(layout.shape_of_scales)

    def finish_both(
        rows: int, layout: _Layout, error: Tree, buffer: Tensor, bits: Tensor, sums: Tensor
    ) -> tuple[SignPayload, Tree]:
        """Return the payload, and the next error in the form of the last one. buffer: what was encoded, made here."""
        payload, scales = finish(rows, layout, bits, sums, buffer.dtype)
        if isinstance(error, LazyError):
            return payload, LazyError(buffer.reshape(-1), scales)
        if is_concrete(buffer):
            direct("sign_residual_", buffer, scales, *layout.arguments)
        else:  # a trace may not write over it
            buffer = torch.ops.fn.sign_residual(buffer, scales, *layout.arguments)
        return payload, buffer.reshape(-1)

    def encode(x: Tensor, error: Tree) -> tuple[SignPayload, Tree]:
        layout = lay_out(*x.shape, x.device)
        args = layout.rows_of(x), *sent(error, layout), *layout.arguments
        return finish_both(x.shape[0], layout, error, *torch.ops.fn.sign_encode_feedback(*args))

    def encode_over(x: Tensor, error: Tree) -> tuple[SignPayload, Tree]:
        last = error.buffer if isinstance(error, LazyError) else error
        if x.dtype != last.dtype or not is_concrete(x, last):  # x's memory cannot hold the error then
            return encode(x, error)
        layout = lay_out(*x.shape, x.device)
        buffer = layout.rows_of(x)
        written = torch.ops.fn.sign_encode_feedback_(buffer, *sent(error, layout), *layout.arguments)
        return finish_both(x.shape[0], layout, error, buffer, *written)

    def averages(
        mu: list[Tensor], grads: list[Tensor], decay: float, *, error: Tree, rows: int
    ) -> tuple[SignPayload, Tree]:
        assert segments is not None
        layout = lay_out(rows, segments.row_length, mu[0].device)
        args = mu, grads, decay, *sent(error, layout), *layout.arguments
        return finish_both(rows, layout, error, *direct("momentum_encode", *args))

    def serve(received: SignPayload, error: Tree) -> tuple[SignPayload, Tree]:
        layout = lay_out(1, received.bits.shape[1] * 8, received.bits.device)
        # (W, n / 8) -> (1, W, n / 8), and scales (W, S) -> (1, W, S)
        buffer, before = sent(error, layout)
        args = received.bits[None], scales_of(received, before.dtype)[None], buffer, before, *layout.arguments
        served = direct("sign_serve", *args) if is_concrete(*args[:4]) else torch.ops.fn.sign_serve(*args)
        return finish_both(1, layout, error, *served)

    def to_plain(error: Tree, rows: int) -> Tensor:
        if not isinstance(error, LazyError):
            plain: Tensor = error
            return plain
        layout = lay_out(rows, error.buffer.shape[0] // rows, error.buffer.device)
        residual: Tensor = torch.ops.fn.sign_residual(*sent(error, layout), *layout.arguments)
        return residual.reshape(-1)

    return Fused(init, accepts, encode, to_plain, serve, averages if segments is not None else None, encode_over, block)
