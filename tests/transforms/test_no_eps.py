"""An eps of 0, or one that is 0 in the moments' dtype: what never had a gradient does not move."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import fn
from fn import Phase, tree
from fn.kernels import reference

NAMES = ("adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam", "loco_adamw", "sharded_onebit_adam")


def phases_of(name: str) -> list[Phase]:
    if name == "zero_one_adam":
        return [Phase.WARMUP] * 3 + [Phase.LOCAL, Phase.COMPRESSED] * 2
    return [Phase.WARMUP] * 7 if name in ("adamw", "lamb") else [Phase.WARMUP] * 3 + [Phase.COMPRESSED] * 4


def gradient(step: int, rank: int) -> torch.Tensor:
    grad = torch.randn(24, generator=torch.Generator().manual_seed(10 * step + rank))
    grad[:5] = 0.0  # no gradient ever
    return grad


@pytest.mark.parametrize(("eps", "dtype"), [(0.0, torch.float32), (1e-50, torch.float32), (0.0, torch.float64)])
@pytest.mark.parametrize("name", NAMES)
def test_what_never_had_a_gradient_stays_and_the_others_move(name, eps, dtype):
    p, phases = torch.nn.Parameter(torch.ones(24, dtype=dtype)), phases_of(name)
    make = partial(getattr(fn, name), axis="data", eps=eps, weight_decay=0.0)
    opt = fn.Optimizer([p], make, schedule=phases.__getitem__, lr=1e-2)
    for step in range(len(phases)):
        before, p.grad = p.detach().clone(), gradient(step, 0).to(dtype)
        opt.step()
        assert p.isfinite().all(), step
        assert (p[5:] != before[5:]).all(), step
    assert opt.skipped == 0
    assert not any(int(x) for x in tree.fields(opt.states, "dropped"))
    assert torch.equal(p[:5], torch.ones(5, dtype=dtype))
    assert all(x.isfinite().all() for x in tree.leaves(opt.states))


@pytest.mark.parametrize("keep_zeros", [True, False])
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam", "loco_adamw"])
def test_so_it_is_among_simulated_ranks(name, keep_zeros):
    hyper: dict[str, Any] = {} if name == "loco_adamw" else {"keep_zeros": keep_zeros}
    tx = getattr(fn, name)(lr=1e-2, axis="data", eps=0.0, weight_decay=0.0, **hyper)

    def run(grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        params = torch.ones(24)
        state = tx.init(params)
        for grad, phase in zip(grads, phases_of(name), strict=True):
            updates, state = tx.update(phase)(grad, state, params)
            params = fn.apply_updates(params, updates)
        return params, state.skipped

    grads = torch.stack([torch.stack([gradient(step, rank) for step in range(7)]) for rank in range(2)])
    params, skipped = fn.simulate(run, "data", 2)(grads)
    assert skipped.tolist() == [0, 0]
    assert torch.equal(params[:, :5], torch.ones(2, 5))
    assert params.isfinite().all()
    assert (params[:, 5:] != 1).all()


def test_adamw_in_float64_is_otherwise_what_it_was():
    """Against the same without zeros: a branch for zeros changes no other number."""
    moves = []
    for eps in (0.0, 1e-300):
        p = torch.nn.Parameter(torch.ones(19, dtype=torch.float64))
        opt = fn.Optimizer([p], fn.adamw, lr=1e-2, eps=eps)
        for step in range(4):
            p.grad = gradient(step, 0)[5:].double()
            opt.step()
        moves.append(p.detach())
    assert torch.equal(*moves)


@pytest.mark.parametrize("eps", [0.0, 1e-46])
def test_the_references_of_kernels_divide_nothing_by_nothing(eps):
    x, nu = torch.tensor([[0.0, 1.0, 2.0, torch.nan, torch.inf]]), torch.tensor([[0.0, 0.0, 4.0, 0.0, 0.0]])
    found = reference.steps.over_root(x, nu, eps)
    assert found[0, :3].tolist() == [0.0, 0.0, 1.0]
    assert found[0, 3:].isnan().all()  # for the step to be skipped
    lists = [[torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)], [torch.tensor([0.0, 4.0])]]
    reference.REFERENCES["adamw_"](*lists, 0.9, 0.99, eps, 0.0, 0.1, 1.0, 1.0, math.inf, math.inf, False)
    assert torch.equal(lists[0][0], torch.ones(2))


def test_a_gradient_goes_back_through_a_direction_of_zero():
    m, v = torch.zeros(3, requires_grad=True), torch.zeros(3)
    reference.steps.over_root(m, v, 0.0).sum().backward()
    assert m.grad.isfinite().all()


