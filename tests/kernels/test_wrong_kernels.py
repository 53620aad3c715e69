"""The kit sees what goes wrong in kernels: each of these is the reference, wrong in one way."""

from __future__ import annotations

import math

import pytest
import torch

import fn
from fn import kernels
from fn.kernels import known_answers, reference
from fn.kernels.reference import REFERENCES
from fn.kernels.table import cells


def reversed_bits(bits):
    signs = reference.codes.unpack_bits(bits, 8 * bits.shape[-1], torch.float32)
    return reference.codes.pack_bits(signs.unflatten(-1, (-1, 8)).flip(-1).flatten(-2))


def with_argument(op, index, change):
    def wrong(*args):
        return REFERENCES[op](*args[:index], change(args[index]), *args[index + 1 :])

    return wrong


def with_first_bits_reversed(op):
    def wrong(*args):
        found = REFERENCES[op](*args)
        return (reversed_bits(found[0]), *found[1:])

    return wrong


def without_the_last(op, lists):
    """Leave the last element of every tensor of these arguments as it was."""

    def wrong(*args):
        before = [x[-1:].clone() for i in lists for x in args[i]]
        found = REFERENCES[op](*args)
        for x, last in zip([x for i in lists for x in args[i]], before, strict=True):
            x[-1:] = last
        return found

    return wrong


def past_the_end(op, tensor_of):
    """Write the element behind a tensor, as a whole vector of a tail would."""

    def wrong(*args):
        found = REFERENCES[op](*args)
        x = tensor_of(args)
        end = x.storage_offset() + x.numel()
        if x.numel() and end < x.untyped_storage().size() // x.element_size():
            x.as_strided((1,), (1,), end).zero_()
        return found

    return wrong


def tail_of_the_gradient_is_missed(mu, grads, *rest):
    whole = [len(m) - len(m) % 4 for m in mu]
    short = [torch.cat([g[:n], m[n:].to(g.dtype)]) for m, g, n in zip(mu, grads, whole, strict=True)]
    return REFERENCES["momentum_encode"](mu, short, *rest)


def without_tails_of_rows(op):
    def wrong(*args):
        found, start = REFERENCES[op](*args), 0
        for width in args[-1][1::2]:
            found[:, start + width - width % 8 : start + width] = 0.0
            start += width
        return found

    return wrong


def blocks_forgotten(op):
    def wrong(*args):
        *results, sums = REFERENCES[op](*args)
        return (*results, sums[:, :1].expand(sums.shape).contiguous() if args[-1] else sums)

    return wrong


def decayed_first(params, grads, mu, nu, b1, b2, eps, decay, *rest):
    coupled = [g + decay * p.to(g.dtype) for p, g in zip(params, grads, strict=True)]
    return REFERENCES["adamw_"](params, coupled, mu, nu, b1, b2, eps, 0.0, *rest)


WRONG = {
    "momentum_encode: bits reversed": with_first_bits_reversed("momentum_encode"),
    "momentum_encode: tail": tail_of_the_gradient_is_missed,
    "momentum_encode: one scale for a segment": blocks_forgotten("momentum_encode"),
    "sign_residual_: a block too far": with_argument("sign_residual_", 1, lambda scales: scales.roll(1, -1)),
    "momentum_encode: error forgotten": with_argument("momentum_encode", 3, torch.zeros_like),
    "drift: no last step": with_argument("drift", 7, lambda lr: 0.0),
    "drift: moved without a gradient": with_argument("drift", 4, lambda nu: [v + 1e-30 for v in nu]),
    "drift: tails": without_tails_of_rows("drift"),
    "momentum_rows: tails": without_tails_of_rows("momentum_rows"),
    "momentum_rows: no factors": with_argument("momentum_rows", 3, lambda factors: None),
    "sign_encode_feedback_: bits reversed": with_first_bits_reversed("sign_encode_feedback_"),
    "sign_residual_: on a copy": with_argument("sign_residual_", 0, torch.clone),
    "sign_residual_: past the end": past_the_end("sign_residual_", lambda args: args[0]),
    "onebit_adam_: bits reversed": with_argument("onebit_adam_", 3, reversed_bits),
    "onebit_adam_: no clamp": with_argument("onebit_adam_", 11, lambda limit: math.inf),
    "onebit_adam_: zeros": with_argument("onebit_adam_", 12, lambda keep: not keep),
    "onebit_adam_: no copies": with_argument("onebit_adam_", 13, lambda copies: []),
    "onebit_adam_: tail of params": without_the_last("onebit_adam_", [0]),
    "onebit_adam_: past the end of mu": past_the_end("onebit_adam_", lambda args: args[1][0]),
    "adamw_: decay in the gradient": decayed_first,
    "adamw_: not frozen": with_argument("adamw_", 10, lambda frozen: False),
    "adamw_: no clamp": with_argument("adamw_", 9, lambda limit: math.inf),
    "adamw_: tail": without_the_last("adamw_", [0, 2, 3]),
    "onebit_lamb_moments_: scaling": with_argument("onebit_lamb_moments_", 2, torch.ones_like),
    "onebit_lamb_moments_: zeros": with_argument("onebit_lamb_moments_", 4, lambda nu: [v + 1e-12 for v in nu]),
    "onebit_lamb_moments_: columns": lambda *args: REFERENCES["onebit_lamb_moments_"](*args).flip(1),
    "onebit_lamb_moments_: past the end": past_the_end("onebit_lamb_moments_", lambda args: args[5][0]),
    "lamb_step_: one rate": with_argument("lamb_step_", 3, lambda rates: rates.mean().expand(rates.shape)),
    "lamb_step_: past the end": past_the_end("lamb_step_", lambda args: args[0][-1]),
    "adamw_into_: the sum": lambda new, rows, *rest: REFERENCES["adamw_into_"](new, [sum(rows)], *rest),
    "adamw_into_: tail": without_the_last("adamw_into_", [0]),
    "adamw_into_: over the old": lambda new, rows, old, *rest: REFERENCES["adamw_into_"](
        old[: len(new)], rows, old, *rest
    ),
    "adamw_into_: magnitudes": lambda *args: REFERENCES["adamw_into_"](*args).flip(0),
    "adamw_into_: never frozen": lambda new, *rest: REFERENCES["adamw_into_"](
        [*new, torch.zeros_like(new[0])][:3], *rest[:-1], False
    ),
    "largest_magnitude: signs": lambda grads: torch.cat(grads).amax(),
    "largest_magnitude: tail": lambda grads: REFERENCES["largest_magnitude"]([g[: len(g) // 8 * 8] for g in grads]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_is_refused_at_its_first_use_and_does_not_conform(name):
    op, kernel = name.partition(":")[0], WRONG[name]
    assert known_answers.complaint(op, REFERENCES[op], torch.device("cpu")) is None
    assert known_answers.complaint(op, kernel, torch.device("cpu")) is not None
    report = fn.testing.conformance(kernels.Accelerator("cpu", {op: kernel}), sizes=(9, 1023))
    faults = [fault for fault in report.faults if "n=" in fault]
    assert faults, "only the known answer is wrong"


def wrong_from(size):
    """Return the two kernels that all others are made of, wrong in the last byte of long rows."""

    def pack(x):
        bits = reference.codes.pack_bits(x)
        return torch.cat([bits[..., :-1], 0 * bits[..., -1:]], -1) if x.shape[-1] >= size else bits

    def unpack(bits, n, dtype):
        signs = reference.codes.unpack_bits(bits, n, dtype)
        return -signs if n >= size else signs

    return {"pack_bits": pack, "unpack_bits": unpack}


@pytest.mark.parametrize("size", [500, 1 << 16])
@pytest.mark.parametrize("op", ["pack_bits", "unpack_bits"])
def test_a_kernel_that_is_right_when_small_is_refused_and_no_other_is_blamed(op, size):
    """It was believed; the references of other ops then went by it, and kernels that were right were refused."""
    others = {"sign_encode": REFERENCES["sign_encode"]}
    row = kernels.Accelerator("cpu", {op: wrong_from(size)[op], **others}, provider="toy")
    kernels.register(row)
    try:
        with pytest.warns(UserWarning, match=f"kernel '{op}' of 'toy'"):
            assert "toy" not in [cell.provider for cell in cells(op, "cpu")]
        assert cells("sign_encode", "cpu")[0].provider == "toy"
    finally:
        kernels.unregister(row)


def test_nan_stands_for_an_infinite_sum_and_for_nothing_else():
    found, infinite = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    assert known_answers.difference(found, infinite, sums=True) is None
    assert known_answers.difference(found, infinite) is not None
    assert known_answers.difference(infinite, found, sums=True) is not None
    assert known_answers.difference(found, torch.ones(2), sums=True) is not None
