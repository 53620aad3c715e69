"""The two compressed collectives: recorded cases, the papers' loop over ranks, and nothing gets lost."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from golden_cases import load_cases, names

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
