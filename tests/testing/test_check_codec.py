"""The codec kit: our own codecs keep what it asks, and each way to break a codec is seen and named."""

from __future__ import annotations

from functools import partial

import chains
import pytest
import torch

import fn
from fn.adapters.deepspeed import transforms as deepspeed
from fn.collectives.feedback import Classic, Damped, classic
from fn.testing import check_codec

OURS = {
    "sign": fn.sign(),
    "sign(block=64)": fn.sign(block=64),
    "sign, DeepSpeed's": deepspeed.codec(2),
    "int4": fn.int4(),
    "int8(block=64)": fn.int8(block=64),
    "fp8": fn.fp8(),
    "fp8(64, e5m2)": fn.fp8(64, "e5m2"),
    "identity": fn.identity(),
    "identity(bf16)": fn.identity(torch.bfloat16),
    "bins": fn.bins(),
    "e3m0": fn.e3m0(),
    "ballots": fn.ballots(),
    "rotated top_k": fn.rotated(fn.top_k(4, 32)),
    "top_k of signs": fn.top_k(6, 64, over="senders", values=fn.sign()),
}


LIKE_OTHERS = ("sign, DeepSpeed's", "int8(block=64)", "fp8(64, e5m2)", "identity")
"""Codecs with other numbers than those beside them: part of `make reliability-test`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.reliability] * (name in LIKE_OTHERS)) for name in OURS]
)
def test_our_codecs_conform(name):
    report = check_codec(OURS[name])
    assert report, report
    assert report.checks >= 25


def ternary() -> fn.Codec:
    """A codec as a reader of the notebook would write it: no segments, no kernels."""

    def encode(x):
        scale = x.abs().mean(-1, keepdim=True)
        return scale, torch.where(x.abs() > 0.5 * scale, x.sign(), 0.0).nan_to_num().to(torch.int8)

    return fn.Codec(encode, lambda payload: payload[0] * payload[1], align=1, bits=8.0)


def test_a_codec_of_four_fields_conforms():
    assert check_codec(ternary()), check_codec(ternary())


def float8(noise: float = 0.0) -> fn.Codec:
    """Payloads of a dtype that torch stores and does not compare."""

    def encode(x):
        scale = x.abs().amax(-1, keepdim=True).to(torch.promote_types(x.dtype, torch.float32)) / 448
        louder = 1 + noise * torch.rand(()) if noise else 1
        return scale, (x / scale.clamp(min=1e-30) * louder).to(torch.float8_e4m3fn)

    return fn.Codec(encode, lambda payload: payload[0] * payload[1].to(payload[0].dtype), align=4, bits=8.0)


def test_a_payload_of_float8_conforms():
    assert check_codec(float8()), check_codec(float8())


def test_payloads_of_float8_are_compared():
    assert any("give another payload" in fault for fault in check_codec(float8(noise=0.5)).faults)


CODEC = ternary()


def written_in_place(x):
    return CODEC.encode(x.mul_(2))


def forgets_the_rows(x):
    scale, codes = CODEC.encode(x)
    return scale.mean(), codes


def hides_what_is_not_finite(x):
    return CODEC.encode(x.nan_to_num())


def louder_than_it_was(x):
    scale, codes = CODEC.encode(x)
    return 4 * scale, codes


def one_scale_for_the_batch(x):
    scale, codes = CODEC.encode(x)
    return scale * (1 + torch.rand(())), codes


def never_zero(x):
    scale, codes = CODEC.encode(x)
    return scale + 1, codes.clamp(min=0) * 2 - 1


def another_scale(rule):
    found = fn.sign().fused(rule)
    return found and found._replace(encode=lambda x, error: found.encode(2 * x, error))


def another_beta(rule):
    return fn.int8().fused(rule._replace(beta=0.5)) if isinstance(rule, Damped) else None


def another_decay():
    def segmented(segments):
        half = fn.sign().segmented(segments)
        found = half.fused(classic().rule)
        other = found._replace(averages=lambda mu, grads, decay, **rest: found.averages(mu, grads, 0.5, **rest))
        return half._replace(fused=lambda rule: other if isinstance(rule, Classic) else None)

    return segmented


def keeps_the_last_to_itself(x):
    payload = CODEC.encode(x)
    return payload[0], torch.cat([payload[1][:, :-1], torch.zeros_like(payload[1][:, -1:])], 1)


def sees_only_what_comes_first(x):
    return CODEC.encode(torch.cat([x[:, :64], x[:, 64:].nan_to_num(0.0, 0.0, 0.0)], 1))


BROKEN = {
    "does not come back at": CODEC._replace(encode=keeps_the_last_to_itself),
    "nan comes back finite": CODEC._replace(encode=sees_only_what_comes_first),
    "wrote into its argument": CODEC._replace(encode=written_in_place),
    "must be the 3 rows": CODEC._replace(encode=forgets_the_rows),
    "no rank would skip": CODEC._replace(encode=hides_what_is_not_finite),
    "grows without end": CODEC._replace(encode=louder_than_it_was),
    "another payload": CODEC._replace(encode=one_scale_for_the_batch),
    "zeros: moved": CODEC._replace(encode=never_zero),
    "must be floating": CODEC._replace(decode=lambda payload: payload[1]),
    "8 per element in the ledger": CODEC._replace(bits=1.6),
    "when it is alone": CODEC._replace(decode=lambda p: p[0].mean(0, keepdim=True) * p[1]),
    "its neighbour": CODEC._replace(segmented=lambda segments: CODEC),
    "not the mean of": fn.int8()._replace(decode_mean=lambda p: fn.int8().decode(p).sum(0)),
    "not what was sent": fn.sign()._replace(fused=another_scale),
    "`averages` is not": fn.sign()._replace(segmented=another_decay()),
    "the kernel for": fn.int8()._replace(fused=another_beta),
    "segmented` is another codec": fn.int8()._replace(segmented=fn.int8(64).segmented),
    "compiled it differs": CODEC._replace(decode=lambda p: p[0] * p[1] * (1 + torch.compiler.is_compiling())),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_a_broken_codec_is_seen(complaint):
    report = check_codec(BROKEN[complaint])
    assert not report
    assert complaint in repr(report), report


@pytest.mark.parametrize("make", [fn.onebit_adam, partial(chains.onebit_lamb, layout="per_tensor"), fn.loco_adamw])
def test_a_payload_of_every_second_element_travels(make):
    """A piece of one or none of them is contiguous with a stride of 2, which cannot be viewed as bytes."""

    def decode(payload):
        return torch.stack(payload, -1).flatten(1)

    codec = fn.Codec(lambda x: (x.float()[:, ::2], x.float()[:, 1::2]), decode, align=2, bits=32.0)
    assert check_codec(codec)
    tx, grads = make(axis="data", codec=codec), [torch.randn(2, 3)]

    def step(g):
        params = [torch.zeros(3)]
        return tx.update(fn.Phase.COMPRESSED)(g, tx.init(params), params)[0]

    assert torch.isfinite(fn.simulate(step, "data", 2, out_dims=None)(grads)[0]).all()


def test_a_codec_that_holds_small_numbers_back_until_they_are_large_may_do_so():
    held_back = CODEC._replace(encode=lambda x: torch.where(x.abs() >= 3.0, x, 0.0), decode=lambda payload: payload)
    assert not any("zeros" in fault for fault in check_codec(held_back).faults)
    faults = check_codec(held_back._replace(encode=torch.zeros_like)).faults
    assert any("does not come back" in fault for fault in faults), faults
