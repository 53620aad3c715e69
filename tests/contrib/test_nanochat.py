"""What `fn.contrib.nanochat` and its link promise beside the recorded runs and the common contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simulated import normal, one_step
from torch import Tensor

import fn
from fn import Phase, roles

W, C = Phase.WARMUP, Phase.COMPRESSED


def steps(tx: fn.Transform, grads: list[Tensor]) -> tuple[Tensor, Any]:
    p = torch.zeros_like(grads[0])
    state = tx.init(p)
    for g in grads:
        u, state = tx.update(W)(g, state, p)
    return u, state


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)], ids=str)
def test_its_norm_is_that_of_an_orthogonal_matrix_and_lines_of_the_longer_side_become_even(
    shape: tuple[int, int],
) -> None:
    g = normal(*shape) * torch.logspace(-2, 2, shape[0])[:, None]
    u, state = steps(fn.contrib.scale_by_nanochat(), [g])
    assert u.norm() == pytest.approx(math.sqrt(min(shape)), rel=1e-3)
    (nu,) = roles.find(state, "second_moment")
    assert nu.shape == ((shape[0], 1) if shape[0] >= shape[1] else (1, shape[1]))
    lengths = u.norm(dim=1 if shape[0] >= shape[1] else 0)
    assert lengths.max() / lengths.min() < 1.001


def test_a_stack_is_its_matrices_and_zeros_stay_zero() -> None:
    grads = [normal(3, 6, 4, seed=i) for i in range(3)]
    for g in grads:
        g[1] = 0.0
    u, _ = steps(fn.contrib.scale_by_nanochat(), grads)
    for i, x in enumerate(u):
        torch.testing.assert_close(x, steps(fn.contrib.scale_by_nanochat(), [g[i] for g in grads])[0])
    assert not u[1].any()


def test_decay_is_at_the_rate_of_the_shape_and_only_where_the_step_leads_to_zero_too() -> None:
    g, p = normal(6, 3), normal(6, 3, seed=1)
    tx = fn.contrib.nanochat(0.1, weight_decay=0.5)
    moved = tx.update(W)(g, tx.init(p), p)[0]
    u, rate = steps(fn.contrib.scale_by_nanochat(), [g])[0], 0.1 * math.sqrt(2)
    torch.testing.assert_close(moved, -rate * (u + 0.5 * torch.where(u * p >= 0, p, 0.0)))


def test_each_tensor_is_stepped_by_one_rank_and_the_ranks_have_equal_shares_of_a_shape() -> None:
    """By the plan of `fn.owned`.

    Differs: fn.contrib._nanochat.nanochat: tensors of a shape are dealt to the ranks one by one; there each rank has
        consecutive ones, the last ranks may have none, and AdamW's large tensors are cut by rows.
    """
    params = [torch.zeros(4, 3)] * 5 + [torch.zeros(600, 2)]
    tx = fn.contrib.nanochat(axis="data", labels=["hidden"] * 5 + ["other"])
    states: list[Any] = []
    fn.simulate(lambda p: states.append(tx.init(p)) or p[0], "data", 4)([p.expand(4, *p.shape) for p in params])
    (owners,) = roles.find(states, "place")
    assert owners[:4].tolist() == [0, 1, 2, 3]
    assert owners[4] != owners[5]


def test_in_codes_it_ends_near_exact_steps() -> None:
    g = normal(2, 8, 6)
    exact, coded = (
        one_step(fn.contrib.nanochat(0.1, axis="data", codec=codec), g, phase=C) for codec in (None, fn.int8())
    )
    assert 0 < float((exact - coded).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fn.contrib.nanochat(ns_steps=6), "ns_steps: expected at most 5, but got 6"),
        (lambda: fn.contrib.nanochat(b2=1.0), r"b2: expected a number in \[0, 1\), but got 1.0"),
        (lambda: fn.contrib.nanochat(codec=fn.int8()), "codec: is given where no tensors are owned; pass an axis"),
        (lambda: fn.contrib.scale_by_nanochat().init([torch.ones(3)]), "params: expected leaf '0' to be a matrix"),
    ],
)
def test_what_is_wrong_is_named(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_matrices_of_a_stack_cost_their_owners_what_they_cost_muons() -> None:
    params = [torch.zeros(2, 16, 16), torch.zeros(32, 16), torch.zeros(16, 16), torch.zeros(16, 16), torch.zeros(700)]
    plans = []

    def on_rank(x: Tensor) -> Tensor:
        for make in (fn.muon, fn.contrib.nanochat):
            state = make(axis="data", labels=["hidden"] * 4 + ["other"]).init(params)
            plans.append(roles.find(state, "place")[0].tolist())
        return x

    fn.simulate(on_rank, "data", 3)(torch.zeros(3))
    assert plans[0] == plans[1]
