"""The two compressed collectives: recorded cases, the papers' loop over ranks, and nothing gets lost."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from golden_cases import load_cases, names
from hypothesis import assume, given
from hypothesis import strategies as st

import fn
from fn.adapters.deepspeed import transforms as deepspeed
from fn.collectives.compressed import compressed_all_reduce

GOLDEN = load_cases("compressed_allreduce")

CODECS = {
    "sign": fn.sign,
    "sign(block=8)": partial(fn.sign, block=8),
    "sign(block=24)": partial(fn.sign, block=24),
    "sign, DeepSpeed's": partial(deepspeed.codec, 1),
    "identity": fn.identity,
    "identity(bf16)": partial(fn.identity, torch.bfloat16),
}


def mean_in_codes(x, worker, server, codec, feedback):
    """Run both halves on one rank."""
    shard, worker = fn.reduce_scatter_mean(x, worker, "data", codec, feedback)
    y, server = fn.all_gather_shards(shard, server, "data", codec, feedback)
    return shard, y, worker, server


def simulated(world, codec, feedback=None):
    f = partial(mean_in_codes, codec=codec, feedback=feedback or fn.classic())
    return fn.simulate(f, "data", world, out_dims=(0, None, 0, 0))


def check_recorded(found, recorded, values):
    """Compare with a recording, to 2e-6 of the largest value that was sent: errors can be what rounding leaves of it.

    The recording took its scales from torch's `vector_norm`, whose inner order of summation is nobody's to copy; ours
    are summed in float64, which is closer to the true norm.
    """
    np.testing.assert_allclose(found, recorded, rtol=0, atol=2e-6 * np.abs(values).max(initial=0.0))


@pytest.mark.parametrize("case", GOLDEN, ids=names(GOLDEN))
def test_the_recorded_all_reduce_is_reproduced(case):
    """All rounds, output and both errors. Where the recording pads, the padded vector is the vector."""
    world, padded = case.world, case.row["padded"]
    worker = torch.from_numpy(case.arrays["worker_error_init"])
    server = torch.from_numpy(case.arrays["server_error_init"])
    step = simulated(world, fn.sign())
    for r in range(case.row["rounds"]):
        x = torch.from_numpy(case.arrays["input"][r]).reshape(world, -1)
        n = x.shape[1]
        x = torch.nn.functional.pad(x, (0, padded - n))
        _, y, worker, server = step(x, worker, server)
        recorded = case.arrays["output"][r].reshape(world, -1)
        for rank in range(world):
            check_recorded(y[:n].numpy(), recorded[rank], recorded)
            np.testing.assert_array_equal(np.signbit(y[:n].numpy()), np.signbit(recorded[rank]))
        check_recorded(worker.numpy(), case.arrays["worker_error"][r], recorded)
        check_recorded(server.numpy(), case.arrays["server_error"][r], recorded)


def pads_as_the_layout_does(case) -> bool:
    unit = 8 * case.world
    return case.world > 1 and case.row["padded"] == -(-int(np.prod(case.row["shape"])) // unit) * unit


LAID_OUT = [case for case in GOLDEN if pads_as_the_layout_does(case)]


@pytest.mark.parametrize("case", LAID_OUT, ids=names(LAID_OUT))
def test_counting_the_padding_is_the_recorded_behaviour_through_the_layout_too(case):
    """The layout pads to multiples of 8 W; recordings with just that padding agree."""
    world = case.world
    tx = fn.compressed_average("data", deepspeed.codec(1))
    x0 = torch.from_numpy(case.arrays["input"][0])
    state = fn.simulate(lambda x: tx.init([x]), "data", world)(x0)
    worker = torch.from_numpy(case.arrays["worker_error_init"])
    server = torch.from_numpy(case.arrays["server_error_init"])
    state = state._replace(worker=(worker,), server=(server,))
    step = fn.simulate(lambda x, s: tx.compressed_update([x], s, [x]), "data", world, out_dims=([None], 0))
    for r in range(case.row["rounds"]):
        (y,), state = step(torch.from_numpy(case.arrays["input"][r]), state)
        recorded = case.arrays["output"][r][0]
        check_recorded(y.numpy(), recorded, recorded)
        np.testing.assert_array_equal(np.signbit(y.numpy()), np.signbit(recorded))
        check_recorded(state.worker[0].numpy(), case.arrays["worker_error"][r], recorded)


ROUNDS = 4


@given(
    st.sampled_from(sorted(CODECS)),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
    st.floats(-6, 6),
)
def test_what_was_delivered_plus_the_error_is_what_was_sent(name, world, pieces, dtype, seed, magnitude):
    """Per rank, per server, and over both halves: the mean of all that was to be sent arrives or is still kept."""
    codec = CODECS[name]()
    n = world * pieces * codec.align
    generator = torch.Generator().manual_seed(seed)
    xs = (torch.randn(ROUNDS, world, n, generator=generator, dtype=torch.float64) * 10**magnitude).to(dtype)
    worker = torch.zeros(world, n, dtype=dtype)
    server = torch.zeros(world, n // world, dtype=dtype)
    step = simulated(world, codec)
    shards = torch.zeros(n, dtype=torch.float64)
    delivered = torch.zeros(n, dtype=torch.float64)
    for x in xs:
        shard, y, worker, server = step(x, worker, server)
        shards += shard.flatten()
        delivered += y
    sent = xs.double().sum(0).mean(0)
    exact = dtype == torch.float64 and name != "identity(bf16)"  # whose decoded rows are float32, and their mean too
    tolerance = float(xs.abs().max()) * n**0.5 * ROUNDS * (1e-13 if exact else 1e-5)
    torch.testing.assert_close(shards + worker.double().mean(0), sent, rtol=0, atol=tolerance)
    torch.testing.assert_close(delivered + server.double().flatten(), shards, rtol=0, atol=tolerance)
    if "sign" in name and n > world * codec.align:
        assert worker.abs().max() > 0  # it is the feedback that makes the sums meet


@pytest.mark.parametrize("name", sorted(CODECS))
@given(seed=st.integers(0, 2**31), magnitude=st.floats(-20, 20))
def test_one_message_decodes_to_what_its_sender_believes_was_sent(name, seed, magnitude):
    """Sum decoded + e = sum sent, on the level of the codec: a single row, without any exchange."""
    codec, feedback = CODECS[name](), fn.classic()
    x = torch.randn(48, generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    assume(bool(x.abs().max() < 1e18))
    error = feedback.init(x)
    total = torch.zeros(48, dtype=torch.float64)
    for _ in range(3):
        compensated = feedback.compensate(x, error)
        decoded = codec.decode(codec.encode(compensated.view(1, -1))).view(-1)
        error = feedback.residual(compensated, decoded, error)
        total += decoded.double()
    scale = float(x.abs().max())
    torch.testing.assert_close(total + error.double(), 3 * x.double(), rtol=0, atol=scale * 1e-5)


def test_without_feedback_what_is_lost_stays_lost():
    codec = fn.sign()
    x = torch.randn(2, 32)
    f = simulated(2, codec, fn.off())
    _, y, worker, server = f(x, (), ())
    assert (worker, server) == ((), ())
    again = f(x, (), ())
    assert torch.equal(again[1], y)
    assert not torch.allclose(y, x.mean(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_every_floating_dtype_comes_back_as_it_went_with_errors_no_narrower_than_float32(name, dtype):
    codec = CODECS[name]()
    x = torch.randn(2, 48).to(dtype)
    zeros = [fn.classic().init(x), fn.classic().init(x[:, :24])]
    shard, y, worker, server = simulated(2, codec)(x, *zeros)
    assert shard.dtype == y.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert worker.dtype == server.dtype == wide
    if "identity" in name:
        narrow = torch.finfo(torch.bfloat16 if "bf16" in name else dtype).eps
        torch.testing.assert_close(y, x.double().mean(0).to(dtype), rtol=4 * narrow, atol=8 * narrow)
    else:
        assert torch.isfinite(y).all()
        assert (y != 0).all()


def test_a_non_contiguous_vector_travels_as_it_looks():
    x = torch.randn(32, 2)
    zeros = torch.zeros(2, 32), torch.zeros(2, 16)
    strided = simulated(2, fn.sign())(x.T, *zeros)
    packed = simulated(2, fn.sign())(x.T.contiguous(), *zeros)
    assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))
    every_other = torch.randn(2, 64)[:, ::2]
    strided = simulated(2, fn.sign())(every_other, *zeros)
    packed = simulated(2, fn.sign())(every_other.contiguous(), *zeros)
    assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_nan_on_one_rank_reaches_every_rank(name):
    """All ranks must see it, or some would step and others not."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(3, 72)
        x[1, 5] = bad
        _, y, _, _ = simulated(3, CODECS[name]())(x, torch.zeros(3, 72), torch.zeros(3, 24))
        assert not torch.isfinite(y).all()


@pytest.mark.parametrize(
    ("x", "error", "kind", "text"),
    [
        (torch.ones(2, 9), torch.zeros(2, 9), ValueError, r"x: .*multiple of 16 long, but got shape \(9,\)"),
        (torch.ones(2, 2, 8), torch.zeros(2, 2, 8), ValueError, r"x: expected one dimension, .*got shape \(2, 8\)"),
        (torch.ones(2, 16, dtype=torch.int32), torch.zeros(2, 16), TypeError, "x: .*got torch.int32"),
        (torch.ones(2, 16), torch.zeros(2, 32), ValueError, r"error: has shape \(32,\).*\(16,\)"),
    ],
)
def test_reduce_scatter_and_all_reduce_refuse_what_does_not_fit_by_name(x, error, kind, text):
    rule = "data", fn.sign(), fn.classic()
    half = fn.simulate(lambda x, e: fn.reduce_scatter_mean(x, e, *rule), "data", 2)
    both = fn.simulate(lambda x, e: compressed_all_reduce(x, (e, e[: len(e) // 2]), *rule), "data", 2)
    for f in (half, both):
        with pytest.raises(kind, match=text):
            f(x, error)


def test_all_gather_refuses_a_misaligned_shard_by_name():
    f = fn.simulate(lambda x, e: fn.all_gather_shards(x, e, "data", fn.sign(), fn.classic()), "data", 2)
    with pytest.raises(ValueError, match=r"shard: .*multiple of 8 long, but got shape \(9,\)"):
        f(torch.ones(2, 9), torch.zeros(2, 9))


def test_two_axes_average_in_two_stages():
    """ZeRO++'s shape of exchange: within a node, then across nodes; on exact numbers it is the mean over all."""

    def on_rank(x):
        local, _ = fn.reduce_scatter_mean(x, (), "local", fn.identity(), fn.off())
        both, _ = fn.reduce_scatter_mean(local, (), "node", fn.identity(), fn.off())
        node, _ = fn.all_gather_shards(both, (), "node", fn.identity(), fn.off())
        return fn.all_gather_shards(node, (), "local", fn.identity(), fn.off())[0]

    x = torch.randn(2, 3, 12, dtype=torch.float64)
    found = fn.simulate(fn.simulate(on_rank, "local", 3, out_dims=None), "node", 2, out_dims=None)(x)
    torch.testing.assert_close(found, x.mean((0, 1)), rtol=1e-13, atol=1e-13)
