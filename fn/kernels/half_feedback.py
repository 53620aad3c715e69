"""Integer codes of half precision with an error in 8 bits, by a row's kernels of the parts.

What the reference rounds to the dtype of x on the way is rounded here by copies; kernels of the whole know float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fn.kernels.memory_pool import empty


def quantize_feedback(
    quantize: Callable[..., tuple[Tensor, Tensor]],
    dequantize: Callable[..., Tensor],
    x: Tensor,
    error: Tensor,
    error_scales: Tensor,
    beta: float,
    valid: Tensor,
    runs: Sequence[int],
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.quantize_feedback`. quantize, dequantize: of the row, which return new tensors."""

    def rounded(wide: Tensor) -> Tensor:
        return empty(x.shape, x.dtype, x.device).copy_(wide)

    wide = dequantize(error, error_scales, valid, runs, 8)
    e = rounded(wide)
    h = torch.add(x, e, out=empty(x.shape, x.dtype, x.device))
    codes, scales = quantize(h, valid, runs, width)
    lost = dequantize(codes, scales, valid, runs, width)
    lost.copy_(rounded(lost)).neg_().add_(h)
    kept = wide.copy_(e).mul_(beta).add_(lost.mul_(1.0 - beta))
    return (codes, scales, *quantize(rounded(kept), valid, runs, 8))
