"""What `fn.contrib.demo` promises beside the recorded runs and the common contract."""

from __future__ import annotations

import pytest
import torch
from golden.test_golden_bases import CASES
from simulated import one_step

import fn
from fn import Phase


def test_demo_is_sign_sgd_in_the_warm_up_and_alone_and_a_rounding_error_moves_nothing() -> None:
    """Of the cosine with q = 1 on three points the middle is zero; the recorded parameters move there.

    Differs: fn.contrib._demo.demo: in the warm-up, and on one rank, it is signSGD without the momentum. A mean below
        1e-6 of the tensor's largest counts as 0; in the authors' code the sign of a rounding error moves the parameter.
    """
    g = torch.randn(2, 9)
    assert torch.equal(
        one_step(fn.contrib.demo(0.5, axis="data", k=1, tile=3), g, Phase.WARMUP), -0.5 * g.mean(0).sign()
    )
    assert torch.equal(one_step(fn.contrib.demo(0.5, axis="data", k=1, tile=3), g[:1]), -0.5 * g[0].sign())
    waves = torch.tensor([1.0, 0.0, -1.0]).repeat(2, 3)
    assert one_step(fn.contrib.demo(0.5, axis="data", k=1, tile=3), waves).tolist() == [-0.5, 0.0, 0.5] * 3
    moved = 0
    for case in CASES:
        if case.row["method"] == "demo":
            for mean, param in zip(case.each("mean"), case.each("param"), strict=True):
                still = mean[1:].abs().flatten(1) < 1e-6 * mean[1:].abs().flatten(1).amax(1, keepdim=True)
                moved += int((still & (param.diff(dim=0).abs().flatten(1) > 0.5 * case.hyper["lr"])).sum())
    assert moved


@pytest.mark.parametrize(
    ("hyper", "text"),
    [
        ({"k": 0}, "k: expected a whole number of at least 1"),
        ({"k": 17, "tile": 4}, "k: expected a whole number .* at most 16"),
        ({"tile": 0}, "tile: expected a whole number of at least 1, but got 0"),
        ({"values": fn.ballots()}, "values: expected a codec that keeps magn"),
    ],
)
def test_bad_input_is_refused_by_name(hyper: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fn.contrib.demo(axis="data", **hyper)
