"""Momentum to direction: the fused pass is the plain formula, and only ever sees plain tensors."""

from __future__ import annotations

import math

import pytest
import torch

import fn
from fn.kernels import reference


@pytest.mark.parametrize("limit", [math.inf, 0.5])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 4097])
def test_the_fused_pass_is_the_formula(n: int, limit: float) -> None:
    x, nu = torch.randn(1, n), torch.rand(1, n)
    nu[:, ::3] = 0
    kept, out = torch.ops.fn.direction(x, nu, 1e-6, limit)
    kept_there, out_there = reference.steps.direction(x, nu, 1e-6, limit)
    assert torch.equal(kept, kept_there)
    torch.testing.assert_close(out, out_there, rtol=3e-7, atol=0)  # torch's square root is not correctly rounded


def test_what_is_not_finite_at_a_zero_comes_back_as_nan() -> None:
    x, nu = torch.tensor([[float("inf"), float("nan"), 1.0] * 4]), torch.tensor([[0.0, 0.0, 0.0] * 4])
    kept, _ = torch.ops.fn.direction(x, nu, 1e-8, math.inf)
    assert kept.isnan().tolist() == [[True, True, False] * 4]
    assert kept[0, 2] == 0


def test_a_simulated_and_a_compiled_step_give_what_the_eager_one_gives() -> None:
    link = fn.scale_by_onebit_adam(sync=fn.compressed_average("data", fn.sign()))
    g = torch.randn(11)
    state = link.init(torch.zeros(11))
    _, state = link.warmup_update(g, state, g)

    def step(g):
        return link.compressed_update(g, state, g)[0]

    eager = step(g)
    mapped = torch.func.vmap(step)(torch.stack([g, -g]))[0]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(g)
    torch.testing.assert_close(mapped, eager, rtol=3e-7, atol=0)
    torch.testing.assert_close(compiled, eager, rtol=3e-7, atol=0)
