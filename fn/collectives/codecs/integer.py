"""Integer codecs: blocks of numbers as small integers times a scale. `int4` and `int8`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.arguments import check_whole
from fn.collectives.codecs.codec import Codec, Fused, Segments, segments_of
from fn.collectives.feedback import Damped, DampedError, since_reset
from fn.errors import expected
from fn.kernels.layout import scale_dtype, tile
from fn.kernels.tracing import cached_plan

Tree = Any


class IntPayload(NamedTuple):
    """Quantized values. scales: (R, S) float32 or float64, M / 8 or M / 128 of a block. codes: (R, n / 2) uint8 or
    (R, n) int8; of two in a byte the first lies in the high half.
    """

    scales: Tensor
    codes: Tensor


def int4(block: int = 256) -> Codec:
    """Send 4 bits per element and one scale per block.

        M = max |x|,   code = clamp(round(8 x / M), -8, 7),   C(x) = code M / 8

    The range is symmetric and used in full. The largest positive element of a block comes back as 7/8 of itself, the
    largest negative one exactly; all others are off by at most M / 16. Zero stays zero. A block with a NaN or an Inf
    comes back as NaN. The collectives first cut a tensor into W pieces, one per server, each padded to a multiple of
    `align`, which is 2 here and 1 for `int8`; blocks start anew at every piece, so its last one may be shorter.

    >>> import torch, fn
    >>> payload = fn.int4().encode(torch.tensor([[1.0, -8.0, 8.0, 0.6]]))
    >>> payload                                             # 0x18, 0x71: 1 and -8 in a byte, 7 and 1
    IntPayload(scales=tensor([[1.]]), codes=tensor([[ 24, 113]], dtype=torch.uint8))
    >>> fn.int4().decode(payload)
    tensor([[ 1., -8.,  7.,  1.]])

    Args: block: elements that share a scale; blocks do not cross from one tensor into another. The wire carries 4 + 32
        / block bits per element: 4.125 by default. Smaller blocks follow outliers better, 64 costs 4.5 bits; larger
        ones save at most the last 3 %. Change it together with the `block` of `damped`.
    Raises: ValueError if block is not a positive multiple of 8.

    Paper: Wang et al., ZeRO++ (arXiv 2306.10209), section 4.3; the arithmetic is that of DeepSpeed's kernels.
    """
    return _integer(4, checked_block(block))._replace(make=partial(int4, block))


def int8(block: int = 256) -> Codec:
    """Send 8 bits per element and one scale per block, as `int4` with 128 for 8.

    Elements are off by at most M / 256, the largest positive one by M / 128. Accurate enough for params on their way
    back, without feedback; for gradients `int4` with feedback needs half the bytes.

    >>> import torch, fn
    >>> fn.int8().encode(torch.tensor([[1.0, -8.0, 8.0, 0.6]]))
    IntPayload(scales=tensor([[0.0625]]), codes=tensor([[  16, -128,  127,   10]], dtype=torch.int8))

    Args and Raises: as for `int4`; 8 + 32 / block bits per element.

    Paper: Dettmers et al., 8-bit Optimizers (arXiv 2110.02861), for the blocks; Wang et al., ZeRO++ (arXiv
        2306.10209), section 4.1. The arithmetic is that of DeepSpeed's kernels.
    """
    return _integer(8, checked_block(block))._replace(make=partial(int8, block))


def checked_block(block: int) -> int:
    """Return the length of a block. Raises: TypeError or ValueError if it is no positive multiple of 8."""
    check_whole("block", block)
    if block <= 0 or block % 8:
        raise ValueError(expected("block", "a positive multiple of 8", f"{block}"))
    return int(block)


def _integer(width: int, block: int) -> Codec:
    ops = "quantize", "dequantize_mean"
    return in_blocks(IntPayload, ops, width, width, block, feedback=_with_damped_feedback)


def in_blocks(
    payload: Callable[[Tensor, Tensor], Any], ops: tuple[str, str], number: int, width: int, block: int,
    segments: Segments | None = None, feedback: Callable[[Any, int, Damped], Fused] | None = None,
) -> Codec:  # fmt: skip
    """Return a codec whose elements are codes times the scale of their block.

    Args: payload: (scales, codes) -> it. ops: which quantize, and dequantize to a mean; number: their last argument.
        width: bits of a code. segments: where tensors lie in a row; None: all rows are one tensor's. feedback: makes
        the kernels with a damped error, of (blocks, width, rule); None: there are none.
    """
    quantize, dequantize_mean = (getattr(torch.ops.fn, op) for op in ops)

    @cached_plan
    def blocks(rows: int, n: int, device: torch.device) -> tuple[Tensor, list[int]]:
        return tile(*segments_of(segments, rows, n, device), block)

    def encode(x: Tensor) -> Any:
        codes, scales = quantize(x, *blocks(x.shape[0], x.shape[1], x.device), number)
        return payload(scales, codes)

    def decode(coded: Any) -> Tensor:
        rows, n = coded.codes.shape[0], coded.codes.shape[1] * 8 // width
        cut = blocks(rows, n, coded.codes.device)
        # (R, ...) -> (R, 1, ...): a mean of one message
        decoded: Tensor = dequantize_mean(coded.codes[:, None], coded.scales[:, None], *cut, number)
        return decoded

    def decode_mean(coded: Any) -> Tensor:
        cut = blocks(1, coded.codes.shape[1] * 8 // width, coded.codes.device)
        # (W, bytes) -> (1, W, bytes): one mean of W messages
        mean: Tensor = dequantize_mean(coded.codes[None], coded.scales[None], *cut, number)
        return mean[0]

    def fused(rule: Any) -> Fused | None:
        # One kernel has one set of blocks: with another length the error's would not be the codec's.
        if feedback is None or not isinstance(rule, Damped) or rule.block != block:
            return None
        return feedback(blocks, width, rule)

    # In the codec, so that both end together.
    of_segments = cached_plan(lambda s: in_blocks(payload, ops, number, width, block, s, feedback))
    return Codec(encode, decode, 8 // width, width + 32.0 / block, decode_mean, of_segments, fused)


def _with_damped_feedback(blocks: Any, width: int, rule: Damped) -> Fused:
    """Return an integer codec and `damped` feedback in one; the error's blocks are the codec's."""

    def init(x: Tensor) -> DampedError:
        codes = torch.zeros(x.numel(), dtype=torch.int8, device=x.device)
        scales = torch.ones(blocks(*x.shape, x.device)[0].shape, dtype=scale_dtype(x), device=x.device)
        return DampedError(codes, scales, torch.zeros((), dtype=torch.int64, device=x.device))

    def accepts(x: Tensor, error: Tree) -> bool:
        if not isinstance(error, DampedError):
            return False
        valid, runs = blocks(*x.shape, x.device)
        # Blocks that all are whole are the blocks of the flat vector, too: a state of `Feedback.init` fits then.
        regular = all(w == rule.block for w in runs[1::2])
        return error.scales.shape == valid.shape or (regular and error.scales.shape == (valid.numel(),))

    def encode(x: Tensor, error: DampedError) -> tuple[IntPayload, DampedError]:
        valid, runs = blocks(*x.shape, x.device)
        # (R n,) -> (R, n), and scales (R S,) or (R, S) -> (R, S)
        old, scales = error.codes.view_as(x), since_reset(error, rule.every).view(valid.shape)
        codes, sent, kept, kept_scales = torch.ops.fn.quantize_feedback(x, old, scales, rule.beta, valid, runs, width)
        error = DampedError(kept.reshape(-1), kept_scales.view(error.scales.shape), error.age + 1)
        return IntPayload(sent, codes), error

    def to_plain(error: DampedError, rows: int) -> Tensor:
        # (R n,) -> (R, n)
        codes = error.codes.view(rows, -1)
        valid, runs = blocks(*codes.shape, codes.device)
        scales = since_reset(error, rule.every).view(valid.shape)
        plain: Tensor = torch.ops.fn.dequantize_mean(codes[:, None], scales[:, None], valid, runs, 8)
        return plain.reshape(-1)

    return Fused(init, accepts, encode, to_plain)
