"""Bins and 4-bit floats: which levels there are, what padding does, and what arrives of what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

import fn
from fn.collectives.codecs.codec import Segments, segmented, unpack

BINS = [fn.bins(), fn.bins(2, 3), fn.bins(8, 6), fn.bins(256, 6)]
FLOATS = [fn.e3m0(), fn.e3m0(7), fn.e3m0(None)]
SIZES = [0, 1, 7, 1009, 1023]


def arrived(codec, x):
    """Return what comes back of a vector of any length, padded as the collectives do it."""
    n, pad = x.shape[0], -x.shape[0] % codec.align
    row = segmented(codec, Segments((n + pad,), torch.tensor([[n]])))
    return row.decode(row.encode(torch.nn.functional.pad(x, (0, pad))[None]))[0, :n]


def bins_by_hand(x, levels, sigmas):
    """Return what arrives of a vector in float64."""
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0
    step = sigmas * deviation / levels or 1.0
    of = [min(max(round((v - mean) / step + levels // 2), 0), levels - 1) for v in x]
    means = {c: sum(v for v, d in zip(x, of, strict=True) if d == c) / of.count(c) for c in of}
    return [means[c] for c in of]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("levels", "sigmas"), [(4, 6), (2, 3), (8, 6), (256, 6)])
def test_a_number_comes_back_as_the_mean_of_its_bin(levels, sigmas, n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    found = arrived(fn.bins(levels, sigmas), x)
    wanted = torch.tensor(bins_by_hand(x.tolist(), levels, sigmas) if n else [], dtype=torch.float64)
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-5, atol=1e-6)


def test_four_bins_of_six_sigmas_end_at_three_quarters_of_one_and_at_two_and_a_quarter():
    """Differs in nothing but what is sent: a lookup of 4 numbers, from which m need not be taken.

    Differs: fn.collectives.codecs.bins.bins: the wire carries the mean of each bin; the authors send these means less
        m, and m: one number more.
    """
    x = 5.0 + torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    payload = fn.bins(4, 6).encode(x)
    z = (x - x.mean()) / x.std()
    bounds = torch.tensor([-2.25, -0.75, 0.75])
    numbers = unpack(payload.codes, 2, 4096)
    assert torch.equal(numbers, torch.bucketize(z, bounds))
    assert payload.lookup.shape == (1, 4)  # the authors: 4 and a shift
    for code in range(4):
        torch.testing.assert_close(payload.lookup[0, code], x[numbers == code].mean())


def float_by_hand(x, largest):
    levels = sorted([0.0, *(s * largest * 2.0**-j for j in range(7) for s in (1, -1))], key=lambda v: -abs(v))
    return min(levels, key=lambda v: abs(v - x))  # the first of two that are as near, which is the larger


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("block", [None, 7, 256])
def test_a_float_comes_back_as_the_nearest_level_of_its_block(block, n, dtype):
    """Differs from the paper in nothing that it gives.

    Differs: fn.collectives.codecs.e3m0.e3m0: the paper does not say how its numbers are scaled; here by the largest
        magnitude of a block.
    """
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    wanted = []
    for part in x.double().split(block or max(1, n)) if n else []:
        wanted += [float_by_hand(v, float(part.abs().max())) for v in part.tolist()]
    found = arrived(fn.e3m0(block), x)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64).to(found.dtype), rtol=0, atol=0)


def test_halves_go_to_the_larger_level():
    x = torch.tensor([[8.0, -6.0, 3.0, -0.75, 2.0**-4, -(2.0**-4), 2.0**-4.01, 0.0]])
    found = fn.e3m0().decode(fn.e3m0().encode(x))
    assert found.tolist() == [[8.0, -8.0, 4.0, -1.0, 0.125, -0.125, 0.0, 0.0]]


def test_bins_are_those_of_what_is_real():
    codec = segmented(fn.bins(4, 6), Segments((8, 4), torch.tensor([[8, 4], [3, 0]])))
    x = torch.full((2, 12), 2.5)
    x[1, 3:] = 0.0
    found = codec.decode(codec.encode(x))
    assert torch.equal(found, x)


@pytest.mark.parametrize(("make", "argument", "error"), [
    (lambda: fn.bins(3), "levels", ValueError), (lambda: fn.bins(1), "levels", ValueError),
    (lambda: fn.bins(512), "levels", ValueError), (lambda: fn.bins(4.0), "levels", TypeError),
    (lambda: fn.bins(4, 0), "sigmas", ValueError), (lambda: fn.bins(4, -1.0), "sigmas", ValueError),
    (lambda: fn.bins(4, math.inf), "sigmas", ValueError), (lambda: fn.bins(4, math.nan), "sigmas", ValueError),
    (lambda: fn.bins(4, "6"), "sigmas", TypeError),
    (lambda: fn.e3m0(0), "block", ValueError), (lambda: fn.e3m0(2.5), "block", TypeError),
])  # fmt: skip
def test_bad_arguments_are_named(make, argument, error):
    with pytest.raises(error, match=rf"^{argument}: expected .*, but got "):
        make()
