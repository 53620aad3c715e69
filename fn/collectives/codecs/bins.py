"""The bins codec: a few levels, placed by the mean and the standard deviation of a tensor. `bins`."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fn.arguments import check_number, check_whole
from fn.collectives.codecs.codec import Codec, by_width, pack, unpack
from fn.errors import expected
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan


class BinsPayload(NamedTuple):
    """lookup: (R, levels) float32 or float64, what each code stands for; codes: (R, n log2(levels) / 8) uint8."""

    lookup: Tensor
    codes: Tensor


def bins(levels: int = 4, sigmas: float = 6.0) -> Codec:
    """Send the number of the bin in which an element lies, and the mean of each bin.

        m = mean x,   s = standard deviation of x (n - 1),   w = sigmas s / levels
        code = clamp(round((x - m) / w + levels / 2), 0, levels - 1),   C(x) = the mean of the elements of that code

    With 4 levels and 6 sigmas a bin is 1.5 standard deviations wide; the boundaries lie at -2.25, -0.75 and 0.75 of
    them. There is one set of bins for a tensor, and one for each piece of it that a server gets. Elements that are all
    alike come back as they are, up to rounding. A tensor with a NaN or an Inf comes back as NaN.

    >>> import torch, fn
    >>> codec = fn.bins()
    >>> payload = codec.encode(torch.tensor([[-2.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 4.0]]))
    >>> payload                                             # 169 is 0b10_10_10_01: the first element's code is 1
    BinsPayload(lookup=tensor([[ 0.2500, -2.0000,  0.0000,  4.0000]]), codes=tensor([[169, 234]], dtype=torch.uint8))
    >>> codec.decode(payload)
    tensor([[-2.,  0.,  0.,  0.,  0.,  0.,  0.,  4.]])

    Args:
        levels: a power of two from 2 to 256. An element takes log2(levels) bits, and a tensor 4 levels bytes more, so
            many levels are for long tensors.
        sigmas: the width of all bins together, in standard deviations. The outermost bins take what lies beyond.
    Raises: TypeError if levels is no whole number, or sigmas no number; ValueError if levels is no power of two from 2
        to 256, or sigmas is not positive and finite.

    Paper: Sarfi et al., SparseLoCo (arXiv 2508.15706), for the values behind top-k; Therien et al., MuLoCo (arXiv
        2505.23725), for whole tensors. The arithmetic is that of their code.
    Differs: the wire carries the mean of each bin; the authors send these means less m, and m: one number more.
    """
    check_whole("levels", levels)
    if not 2 <= levels <= 256 or levels & (levels - 1):
        raise ValueError(expected("levels", "a power of two from 2 to 256", f"{levels}"))
    check_number("sigmas", sigmas)
    if not 0 < sigmas < math.inf:
        raise ValueError(expected("sigmas", "a positive number", f"{sigmas}"))
    levels, sigmas = int(levels), float(sigmas)

    segmented = cached_plan(lambda s: by_width(lambda n, valid: _bins(levels, sigmas, valid), s))
    return _bins(levels, sigmas, None)._replace(segmented=segmented, make=partial(bins, levels, sigmas))


def _bins(levels: int, sigmas: float, valid: Tensor | None) -> Codec:
    """Return the codec for one tensor. valid: (R, 1), how many elements of each row are real; None: all."""
    width = levels.bit_length() - 1
    align = 8 // math.gcd(width, 8)

    def encode(x: Tensor) -> BinsPayload:
        x, n = x.to(scale_dtype(x)), x.shape[1]
        counts = torch.full((1, 1), n, dtype=torch.int64, device=x.device) if valid is None else valid.to(x.device)
        # (R, n), or (1, n) where all rows are alike
        real = torch.arange(n, dtype=torch.int64, device=x.device) < counts
        # (R, n) -> (R, 1); a row in which nothing is real has the mean 0, not 0 / 0
        mean = torch.where(real, x, 0.0).sum(1, keepdim=True) / counts.clamp(min=1)
        apart = torch.where(real, x - mean, 0.0)
        deviation = (apart.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
        step = sigmas * deviation / levels
        # Equal elements have no deviation. Divided by it, all of them would be NaN.
        step = torch.where(step.isfinite() & (step > 0), step, 1.0)
        codes = (apart / step + levels // 2).round().clamp(0, levels - 1)
        # What a NaN becomes as an integer differs between devices. The lookup is NaN then, so the code does not matter.
        codes = torch.where(codes.isnan(), 0.0, codes).to(torch.uint8)
        # Means of differences: those of the numbers themselves would lose digits where the mean is large.
        lookup = _means(apart, codes, real, levels) + mean
        return BinsPayload(lookup, pack(codes, width))

    def decode(payload: BinsPayload) -> Tensor:
        n = payload.codes.shape[1] * 8 // width
        # (R, levels) -> (R, n)
        return payload.lookup.gather(1, unpack(payload.codes, width, n))

    return Codec(encode, decode, align, float(width))


def _means(x: Tensor, codes: Tensor, real: Tensor, levels: int) -> Tensor:
    """Return the mean of the real elements of x (R, n) with each code: (R, levels), 0 where there are none."""
    means = []
    # A pass for each level: the order in which a scatter adds is another one each time on some devices.
    for level in range(levels):
        inside = (codes == level) & real
        means.append(torch.where(inside, x, 0.0).sum(1) / inside.sum(1).clamp(min=1))
    # (R,) of each level -> (R, levels)
    return torch.stack(means, dim=1)
