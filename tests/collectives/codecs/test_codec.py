"""Codecs and feedbacks: what travels, what is kept, and that the kernels compute what the algebra says."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import fn
from fn.adapters.deepspeed import transforms as deepspeed
from fn.collectives.agreement import describe
from fn.collectives.codecs.codec import Segments, segmented
from fn.collectives.compressed import compressed_all_reduce, encode
from fn.collectives.feedback import LazyError
from fn.collectives.hierarchy import initial_errors
from fn.testing.codec import settle_errors

CODECS = [fn.sign(), fn.sign(block=64), fn.int4(block=64), fn.int8(block=64), fn.identity(torch.bfloat16)]
CODECS += [fn.fp8(block=64), fn.fp8(64, "e5m2")]
SEGMENTS = Segments((64, 8, 264, 16), torch.tensor([[64, 8, 264, 16], [64, 3, 200, 0]]))


def algebra(codec):
    """Return the codec without its kernels: the specification."""
    if codec.segmented is None:
        return codec._replace(fused=None)
    return codec._replace(fused=None, segmented=lambda s: algebra(codec.segmented(s)))


def same(a, b):
    for x, y in zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


FEEDBACKS = [fn.classic(), fn.classic(lazy=True), fn.classic(store="int8"), fn.damped(0.5, 3, block=64), fn.off()]
FEEDBACKS += [fn.decayed(0.95), fn.decayed(1, 0.05)]
SPARSE = [fn.bins(), fn.e3m0(), fn.e3m0(None), fn.top_k(3, 8), fn.top_k(0.1, over="senders", values=fn.bins(8, 6))]


@pytest.mark.parametrize("which", [*CODECS, *SPARSE, deepspeed.codec(2), fn.identity(), *FEEDBACKS])
def test_codecs_and_feedbacks_can_be_pickled_and_copied(which):
    for again in (pickle.loads(pickle.dumps(which)), copy.deepcopy(which)):
        assert type(again) is type(which)
        assert describe(again) == describe(which)
    changed = which._replace(**{which._fields[0]: lambda x: x})
    assert copy.deepcopy(changed)[:-1] == changed[:-1]
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):  # and not what it was before
        pickle.dumps(changed)


@pytest.mark.parametrize("which", [*CODECS, *SPARSE, *FEEDBACKS])
def test_codecs_and_feedbacks_are_shown_as_the_call_that_makes_them(which):
    again = eval(repr(which), {"fn": fn, "torch": torch})
    assert describe(again) == describe(which)
    changed = which._replace(**{type(which)._fields[0]: len})
    assert repr(changed).startswith(f"{type(which).__name__}({type(which)._fields[0]}=len, ")
    assert "0x" not in repr(changed)


def test_a_codec_with_a_function_of_another_one_is_not_pickled_as_its_own():
    """The two functions have the same code, and differ in what they close over."""
    mixed = fn.sign(8)._replace(encode=fn.sign(16).encode)
    with pytest.raises((AttributeError, pickle.PicklingError), match="encode"):
        pickle.dumps(mixed)


def sent(codec, feedback):
    """Return what arrives in four rounds of several tensors, and the last error."""
    half, out = segmented(codec, SEGMENTS), []
    error = feedback.init(torch.zeros(704))
    for step in range(4):
        x = torch.randn(2, 352, generator=torch.Generator().manual_seed(step))
        payload, error = encode(half, feedback, x * SEGMENTS.mask(x.device), error)
        out.append(half.decode(payload))
    return torch.stack([*out, error.view(2, -1)])


@pytest.mark.parametrize("codec", [fn.sign(), fn.int8()], ids=["sign", "int8"])
@pytest.mark.parametrize("which", [fn.classic, fn.damped, fn.off], ids=lambda which: which.__name__)
def test_a_feedback_with_a_function_of_ones_own_runs_that_one_and_no_kernel_for_the_old_one(which, codec):
    functions = torch.zeros_like, lambda x, e: x + 0.5 * e, lambda c, decoded, e: (c - decoded).clamp(-1, 1)
    changed = which()._replace(init=functions[0], compensate=functions[1], residual=functions[2])
    assert torch.equal(sent(codec, changed), sent(codec, fn.Feedback(*functions)))
    assert changed.rule is changed.make is None
    assert which()._replace(compensate=functions[1], rule="told").rule == "told"


@pytest.mark.parametrize("codec", [fn.sign(), fn.int8(), fn.identity()], ids=["sign", "int8", "identity"])
def test_a_codec_with_functions_of_ones_own_runs_these_and_no_kernel_for_the_old_ones(codec):
    functions = {"encode": torch.Tensor.half, "decode": torch.Tensor.float}
    changed = codec._replace(**functions, align=1, bits=16.0)
    assert torch.equal(sent(changed, fn.classic()), sent(fn.Codec(*functions.values(), 1, 16.0), fn.classic()))
    assert changed[4:] == (None,) * 4
    assert codec._replace(bits=2.0)[4:] == (*codec[4:-1], None)
    assert codec._replace(decode=torch.Tensor.float, segmented=len).segmented is len


@pytest.mark.parametrize(
    "make", [fn.int8, lambda: fn.top_k(2, 8, values=fn.bins()), lambda: fn.sign()._replace(segmented=None)]
)
def test_what_is_planned_for_a_codec_ends_with_the_codec(make):
    """Every optimizer that is built without a codec makes one; a notebook builds many."""
    codec = make()
    assert codec.segmented is None or codec.segmented(SEGMENTS) is codec.segmented(SEGMENTS)
    segmented(codec, SEGMENTS).encode(torch.ones(2, 352))
    alive = weakref.ref(codec.encode)
    del codec
    gc.collect()
    assert alive() is None


def test_damped_feedback_counts_as_zero_in_a_step_of_reset():
    codec, feedback = fn.int4(block=8), fn.damped(beta=0.5, every=2, block=8)
    x, error = torch.linspace(-1, 1, 8)[None], feedback.init(torch.zeros(8))
    plain = codec.encode(x)
    for step in range(6):
        payload, error = encode(codec, feedback, x, error)
        assert (step % 2 == 0) == (
            torch.equal(payload.codes, plain.codes) and torch.equal(payload.scales, plain.scales)
        )


def test_the_stored_error_is_scaled_by_its_largest_element_and_beta_weights_the_old_one():
    """4 bits make 0.875 of 1. Of the difference 0.125 a quarter is kept, with the paper's beta three quarters.

    Differs: fn.collectives.feedback.damped: beta weights the old error, as in DeepSpeed; the scale of the stored
        error is taken from each block's maximum, not given.
    """
    beta, block = 0.75, 8
    codec, feedback = fn.int4(block=block), fn.damped(beta, every=100, block=block)
    given = torch.tensor(2.0**-10)  # a step of the stored error, which in 8 bits then ends at 127 / 1024
    for magnitude in (1.0, 1024.0):
        x = magnitude * torch.ones(1, block)
        payload, error = encode(codec, feedback, x, feedback.init(x.flatten()))
        lost = x - codec.decode(payload)
        assert torch.equal(lost, torch.full((1, block), 0.125 * magnitude))
        kept = feedback.compensate(torch.zeros(block), error)
        torch.testing.assert_close(kept, (1 - beta) * lost[0], rtol=1 / 127, atol=0)
        papers = torch.clamp((beta * lost[0] / given).round(), -128, 127) * given
        assert papers[0] == (beta * 0.125 if magnitude == 1.0 else 127 / 1024)


def test_errors_are_reset_each_by_its_own_age():
    """In DeepSpeed's recording of three parameters hardly any two are reset in the same step, and some hardly ever.

    Differs: fn.collectives.feedback.damped: DeepSpeed resets one parameter at a time by a shared counter, here each
        error has its own.
    """
    data = np.load(Path(__file__).parents[2] / "golden" / "loco_n2l2_reset.npz")
    theirs = [np.flatnonzero(data[f"p{i}.reset"]).tolist() for i in range(3)]
    assert theirs == [[0, 4], [0, 2, 7], [0, 5]]
    feedback = fn.damped(every=4, block=8)
    ours = []
    for born in range(3):
        error = feedback.init(torch.zeros(8))._replace(codes=torch.full((8,), 64, dtype=torch.int8))
        at = {step: error._replace(age=error.age + step - born) for step in range(born, 9)}
        ours.append([step for step, e in at.items() if not feedback.compensate(torch.zeros(8), e).any()])
    assert ours == [[0, 4, 8], [1, 5], [2, 6]]


def test_padding_that_counts_dilutes_the_scale_and_keeps_an_error():
    """13 elements of 1 in 16: the scale is sqrt(13 / 16) = 0.90 where padding counts, as in DeepSpeed, and 1 here.

    Differs: fn.collectives.codecs.sign.sign: padding is neither counted nor given an error; in the authors' code, and
        in DeepSpeed's, it is both.
    """
    x = torch.nn.functional.pad(torch.ones(1, 13), (0, 3))
    for counts, scale in ((False, 1.0), (True, (13 / 16) ** 0.5)):
        codec = segmented(deepspeed.codec(2) if counts else fn.sign(), Segments((16,), torch.tensor([[13]])))
        _, error = encode(codec, fn.classic(), x, torch.zeros(16))
        torch.testing.assert_close(error, torch.tensor([1 - scale] * 13 + [-scale * counts] * 3))


def test_integers_are_scaled_as_in_deepspeeds_kernels():
    """The papers' codes are symmetric, so that 1 comes back as 1; in DeepSpeed's the largest comes back as 7/8 of it.

    Differs: fn.kernels.reference.codes: the arithmetic is that of DeepSpeed's kernels, in IEEE float32, for every
        width.
    """
    x = torch.tensor([[1.0, 0.5, -0.25, -1.0] * 2])
    for codec, most in ((fn.int4(block=8), 7), (fn.int8(block=8), 127)):
        papers = (x * most).round() / most
        assert papers[0, [0, 3]].tolist() == [1.0, -1.0]
        assert papers[0, 1] != 0.5
        found = codec.decode(codec.encode(x))
        assert found.dtype == torch.float32
        assert found.tolist() == [[most / (most + 1), 0.5, -0.25, -1.0] * 2]


@pytest.mark.parametrize(("segments", "lazy"), [(None, True), (SEGMENTS, False)], ids=["one, lazy", "several"])
@pytest.mark.parametrize("codec", CODECS, ids=range(len(CODECS)))
def test_the_whole_all_reduce_is_its_two_halves(codec, segments, lazy):
    feedback = fn.classic(lazy=lazy)

    def whole(x):
        errors = initial_errors(x, "data", codec, feedback, segments=segments)
        for k in range(3):
            y, errors = compressed_all_reduce(x * (1 + k), errors, "data", codec, feedback, segments=segments)
        return y, settle_errors(x, errors, "data", codec, feedback, segments)

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


@pytest.mark.parametrize(("make", "argument"), [
    (lambda: fn.sign(block=12), "block"), (lambda: fn.int4(block=0), "block"), (lambda: fn.int8(block=9), "block"),
    (lambda: fn.fp8(block=4), "block"), (lambda: fn.fp8(format="e3m4"), "format"),
    (lambda: fn.damped(beta=1.0), "beta"), (lambda: fn.damped(every=0), "every"), (lambda: fn.damped(block=0), "block"),
])  # fmt: skip
def test_bad_arguments_are_named(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        make()


def test_a_lazy_error_is_refused_by_a_codec_without_a_kernel_for_it():
    error = LazyError(torch.zeros(8), torch.zeros(1, 1))
    with pytest.raises(TypeError, match=r"^error: is lazy"):
        encode(fn.int8(), fn.classic(), torch.zeros(1, 8), error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-20, 1e-7, 1.0, 1e20])
def test_scales_of_blocks_of_signs_take_two_bytes_and_keep_small_and_large_numbers(size, dtype):
    x, codec = (size * torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0] * 24])).to(dtype), fn.sign(block=64)
    payload = codec.encode(x)
    assert sum(leaf.numel() * leaf.element_size() for leaf in payload) == x.numel() * codec.bits / 8 == 30
    torch.testing.assert_close(codec.decode(payload).to(x), x, rtol=2**-8, atol=0)
