"""Codecs and feedbacks: what travels, what is kept, and that the kernels compute what the algebra says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fn
from fn.collectives.codec import Segments, mean_of_rows, segmented
from fn.collectives.compressed import compressed_all_reduce, encode, initial_errors, settle_errors
from fn.collectives.feedback import LazyError

CODECS = [fn.sign(), fn.sign(block=64), fn.int4(block=64), fn.int8(block=64), fn.identity(torch.bfloat16)]
SEGMENTS = Segments((64, 8, 264, 16), torch.tensor([[64, 8, 264, 16], [64, 3, 200, 0]]))


def algebra(codec):
    """Return the codec without its kernels: the specification."""
    if codec.segmented is None:
        return codec._replace(fused=None)
    return codec._replace(fused=None, segmented=lambda s: algebra(codec.segmented(s)))


def same(a, b):
    for x, y in zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one", "several"])
@pytest.mark.parametrize("codec", [fn.sign(), fn.sign(block=64), fn.sign(padding_counts=True)], ids=range(3))
def test_the_sign_kernels_compute_the_algebra(codec, segments, dtype):
    codec = codec if segments is None else segmented(codec, segments)
    plain, lazy = fn.classic(), codec.fused(fn.classic().rule).init(torch.zeros(2, 352, dtype=dtype))
    one = two = plain.init(torch.zeros(704, dtype=dtype))
    for step in range(4):
        x = torch.randn(2, 352, generator=torch.Generator().manual_seed(step)).to(dtype)
        first, one = encode(algebra(codec), plain, x, one)
        second, two = encode(codec, plain, x, two)
        third, lazy = encode(codec, plain, x, lazy)
        same((first, one), (second, two))
        same((first, one), (third, codec.fused(plain.rule).settle(lazy, 2)))
        assert isinstance(lazy, LazyError)


@pytest.mark.parametrize("codec", CODECS, ids=range(len(CODECS)))
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one", "several"])
def test_what_was_delivered_plus_the_error_is_what_was_sent(codec, segments):
    half, feedback = codec if segments is None else segmented(codec, segments), fn.classic()
    error, sent, delivered = feedback.init(torch.zeros(704)), 0.0, 0.0
    for step in range(20):
        x = torch.randn(2, 352, generator=torch.Generator().manual_seed(step))
        x = x if segments is None else torch.where(segments.mask(x.device), x, 0.0)
        payload, error = encode(half, feedback, x, error)
        sent, delivered = sent + x.double(), delivered + half.decode(payload).double()
    torch.testing.assert_close(delivered + error.view(2, -1), sent, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("codec", [fn.int4(block=64), fn.int8(block=64)], ids=["int4", "int8"])
def test_the_integer_kernels_with_damped_feedback_compute_the_algebra(codec, dtype):
    feedback = fn.damped(beta=0.75, every=3, block=64)
    one = two = feedback.init(torch.zeros(768, dtype=dtype))
    three = codec.fused(feedback.rule).init(torch.zeros(2, 384, dtype=dtype))
    for step in range(7):
        x = torch.randn(2, 384, generator=torch.Generator().manual_seed(step)).to(dtype)
        first, one = encode(algebra(codec), feedback, x, one)
        second, two = encode(codec, feedback, x, two)
        third, three = encode(codec, feedback, x, three)
        same((first, one), (second, two))
        same((first, one.codes, one.scales), (third, three.codes, three.scales.flatten()))
        same(feedback.compensate(torch.zeros(768), one), codec.fused(feedback.rule).settle(three, 2))


def test_damped_feedback_counts_as_zero_in_a_step_of_reset():
    codec, feedback = fn.int4(block=8), fn.damped(beta=0.5, every=2, block=8)
    x, error = torch.linspace(-1, 1, 8)[None], feedback.init(torch.zeros(8))
    plain = codec.encode(x)
    for step in range(6):
        payload, error = encode(codec, feedback, x, error)
        assert (step % 2 == 0) == (
            torch.equal(payload.codes, plain.codes) and torch.equal(payload.scales, plain.scales)
        )


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=range(len(CODECS)))
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one", "several"])
def test_the_whole_all_reduce_is_its_two_halves(codec, segments, lazy):
    feedback = fn.classic(lazy=lazy)

    def whole(x):
        errors = initial_errors(x, "data", codec, feedback, segments=segments)
        for k in range(3):
            y, errors = compressed_all_reduce(x * (1 + k), errors, "data", codec, feedback, segments=segments)
        return y, settle_errors(errors, "data", codec, feedback, segments=segments)

    def halves(x):
        worker, server = fn.classic().init(x), fn.classic().init(x[: x.shape[0] // 2])
        for k in range(3):
            plain = algebra(codec)
            args = ("data", plain, fn.classic())
            shard, worker = fn.reduce_scatter_mean(x * (1 + k), worker, *args, segments=segments)
            y, server = fn.all_gather_shards(shard, server, *args, segments=segments)
        return y, (worker, server)

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 704, generator=torch.Generator().manual_seed(0)).to(dtype)
        same(fn.simulate(whole, "data", 2)(x), fn.simulate(halves, "data", 2)(x))


@pytest.mark.parametrize("codec", [fn.int4(), fn.int8()], ids=["int4", "int8"])
def test_a_shard_is_the_mean_of_the_decoded_rows(codec):
    rows = torch.randn(3, 512)
    generic = codec._replace(decode_mean=None)
    same(mean_of_rows(codec, codec.encode(rows)), mean_of_rows(generic, codec.encode(rows)))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("fused", [False, True])
def test_the_first_stage_of_loco_is_replayed_bit_for_bit(rank, fused):
    data = np.load(Path(__file__).parents[1] / "golden" / "loco_n2l2_beta08.npz")
    grads = torch.from_numpy(data["p0.grad"])[:, rank].flatten(1)
    codec, feedback = fn.int4(block=8), fn.damped(beta=0.8, every=1025, block=8)
    codec = codec if fused else algebra(codec)
    error = feedback.init(grads[0])
    for step, grad in enumerate(grads):
        payload, error = encode(codec, feedback, grad.view(4, -1), error)  # part n L + l goes out as l N + n
        sent = [leaf.unflatten(0, (2, 2)).transpose(0, 1).flatten().numpy() for leaf in payload]
        assert np.array_equal(sent[0], data["p0.wire1_scale"][step, rank])
        assert np.array_equal(sent[1], data["p0.wire1"][step, rank])
        assert np.array_equal(error.codes.numpy(), data["p0.intra_codes"][step, rank])
        assert np.array_equal(error.scales.numpy(), data["p0.intra_scale"][step, rank])


@pytest.mark.parametrize(("make", "argument"), [
    (lambda: fn.sign(block=12), "block"), (lambda: fn.int4(block=0), "block"), (lambda: fn.int8(block=9), "block"),
    (lambda: fn.damped(beta=1.0), "beta"), (lambda: fn.damped(every=0), "every"), (lambda: fn.damped(block=0), "block"),
])  # fmt: skip
def test_bad_arguments_are_named(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        make()


def test_a_lazy_error_is_refused_by_a_codec_without_a_kernel_for_it():
    error = LazyError(torch.zeros(8), torch.zeros(1, 1))
    with pytest.raises(TypeError, match=r"^error: is lazy"):
        encode(fn.int8(), fn.classic(), torch.zeros(1, 8), error)


def test_a_block_that_is_not_finite_comes_back_as_nan():
    x = torch.ones(1, 512)
    x[0, 3] = float("inf")
    for codec in (fn.int4(), fn.int8()):
        found = codec.decode(codec.encode(x))
        assert found[0, :256].isnan().all()
        assert found[0, 256:].isfinite().all()
