"""An eps of 0, or one that is 0 in the moments' dtype: what never had a gradient does not move."""

from __future__ import annotations

from functools import partial

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


def test_a_gradient_goes_back_through_a_direction_of_zero():
    m, v = torch.zeros(3, requires_grad=True), torch.zeros(3)
    reference.steps.over_root(m, v, 0.0).sum().backward()
    assert m.grad.isfinite().all()
