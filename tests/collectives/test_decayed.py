"""Feedback that fades: `decayed` against its equations, and the feedbacks that it is for some arguments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn.collectives.codecs.codec import Segments
from fn.collectives.compressed import encode
from fn.collectives.feedback import from_plain, to_plain

CODECS = [fn.top_k(3, 8), fn.sign(), fn.int8(8), fn.bins()]
PARTS = st.floats(0.01, 1.0)


def rows(seed, n=16):
    return torch.randn(5, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.sampled_from(CODECS), PARTS, PARTS, st.integers(0, 2**31))
def test_it_is_its_equations(codec, keep, deliver, seed):
    feedback, wanted = fn.decayed(keep, deliver), torch.zeros(16, dtype=torch.float64)
    error = feedback.init(wanted)
    for x in rows(seed):
        payload, error = encode(codec, feedback, x[None], error)
        c = x + keep * wanted
        sent = codec.decode(codec.encode(c[None]))[0]
        torch.testing.assert_close(codec.decode(payload)[0], sent)
        wanted = c - deliver * sent
        torch.testing.assert_close(error, wanted)


def test_what_waits_fades_and_what_is_delivered_in_part_is_sent_again():
    """keep 0.5: of 1 that has waited for three steps an eighth is left. deliver 0.25: 1 is sent in all four times."""
    codec, fading = fn.top_k(1, 2), fn.decayed(0.5)
    error = fading.init(torch.zeros(2))
    for x in ([9.0, 1.0], [9.0, 0.0], [9.0, 0.0], [0.0, 0.0]):
        payload, error = encode(codec, fading, torch.tensor([x]), error)
    assert codec.decode(payload).tolist() == [[0.0, 0.125]]
    again, total = fn.decayed(1, 0.25), 0.0
    error = again.init(torch.zeros(1))
    for step in range(60):
        payload, error = encode(fn.identity(), again, torch.tensor([[float(step == 0)]]), error)
        total += float(payload)
    assert total == pytest.approx(4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_error_is_as_wide_as_that_of_classic(dtype):
    x = torch.zeros(8, dtype=dtype)
    error = fn.decayed(0.9, 0.5).init(x)
    assert error.dtype == fn.classic().init(x).dtype
    _, after = encode(fn.top_k(2, 4), fn.decayed(0.9, 0.5), torch.ones(1, 8, dtype=dtype), error)
    assert (after.dtype, after.shape) == (error.dtype, error.shape)


def test_on_another_number_of_ranks_the_error_goes_on_as_it_is():
    """It stands for itself, not for the part of it that the next message gets: else it would fade twice."""
    feedback, error = fn.decayed(0.5, 0.25), torch.arange(8.0)
    segments = Segments((8,), torch.tensor([[8]]))
    plain = to_plain(error, fn.top_k(2, 4), feedback, segments, torch.float32)
    assert torch.equal(plain, error)
    assert torch.equal(from_plain(plain.double(), error, segments, feedback, None), error)


@pytest.mark.parametrize(("make", "argument", "error"), [
    (lambda: fn.decayed(0), "keep", ValueError), (lambda: fn.decayed(1.01), "keep", ValueError),
    (lambda: fn.decayed(math.nan), "keep", ValueError), (lambda: fn.decayed("1"), "keep", TypeError),
    (lambda: fn.decayed(1, 0.0), "deliver", ValueError), (lambda: fn.decayed(1, 2), "deliver", ValueError),
    (lambda: fn.decayed(1, None), "deliver", TypeError),
])  # fmt: skip
def test_bad_arguments_are_named(make, argument, error):
    with pytest.raises(error, match=rf"^{argument}: expected .*, but got "):
        make()
