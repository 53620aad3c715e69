"""A param of float16 never overflows: such a step is skipped, on all ranks, and others are in place."""

from __future__ import annotations

from functools import partial

import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase
from fn.inplace.bounds import FLOAT16_LIMIT
from fn.transforms.skip_nonfinite import all_addable

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:steps. the last 5 were skipped"),
    pytest.mark.filterwarnings("ignore:eps. too small"),
]

HALF = torch.float16
NUMBERS = st.floats(-65504, 65504, width=16)


@given(NUMBERS, st.floats(-2e5, 2e5, width=32))
@example(65504.0, 15.9)
@example(65504.0, 16.0)
@example(65504.0, -2e4)
@example(0.0, 65519.9)
@example(0.0, 65520.0)
def test_an_update_is_addable_if_the_rounded_sum_is_finite(p, u):
    params, updates = torch.tensor([1.0, p], dtype=HALF), torch.tensor([0.0, u])
    finite = abs(p + u) < FLOAT16_LIMIT
    assert bool((params + updates).to(HALF).isfinite().all()) == finite
    assert bool(all_addable([updates], [params])) == finite
    assert bool(all_addable([updates], [params.float()]))


def trained(start: float, size: float, lr: float, decay: float, compressed: bool, *, pure: bool) -> tuple:
    """Return the params after each step, which were in place, and the skipped steps."""
    params = [torch.nn.Parameter(torch.full((9,), start, dtype=HALF)), torch.nn.Parameter(torch.ones(3, 5, dtype=HALF))]
    schedule = fn.freeze_after(3) if compressed else None
    make = partial(fn.onebit_adam if compressed else fn.adamw, axis="data", weight_decay=decay)
    opt, found, here = fn.Optimizer(params, make, schedule=schedule, lr=lr), [], []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for t in range(6):
        generator = torch.Generator().manual_seed(10 * t + rank)
        for p in params:
            p.grad = (size * (torch.rand(p.shape, generator=generator) - 0.7)).to(HALF)
        if pure:
            in_place_steps.stage_purely(opt)
        with in_place_steps.listed() as in_place:
            opt.step()
        found.append([p.detach().float() for p in params])
        here.append(any(in_place))
    return found, here, opt.skipped


@settings(deadline=None, max_examples=25)
@given(
    st.floats(-65504, 65504, width=16), st.sampled_from([1e-6, 1e-3, 0.1, 10.0, 6e4]),
    st.sampled_from([1e-4, 1e-2, 1.0, 30.0, 3e3, 6e4]), st.sampled_from([0.0, 0.1, 3.0]), st.booleans(),
)  # fmt: skip
@example(65504.0, 1.0, 30.0, 0.0, False)
@example(1.0, 1.0, 1e-3, 0.0, False)
@example(1.0, 1e-3, 1e-3, 0.0, True)
def test_in_place_or_not_the_same_steps_are_skipped_and_no_param_overflows(start, size, lr, decay, compressed):
    place, _, skipped = trained(start, size, lr, decay, compressed, pure=False)
    pure, here, missed = trained(start, size, lr, decay, compressed, pure=True)
    assert not any(here)
    assert all(x.isfinite().all() for each in place for x in each)
    near = any(float(x.abs().max()) > 0.99 * FLOAT16_LIMIT for each in pure for x in each)
    if not near:  # else the last bit of a sum decides
        assert skipped == missed
        torch.testing.assert_close(place, pure, rtol=4e-3, atol=4e-3 * lr + 1e-6)


def test_ordinary_steps_are_in_place():
    for compressed in (False, True):
        found, here, skipped = trained(1.0, 0.02, 1e-3, 0.01, compressed, pure=False)
        assert (all(here), skipped) == (True, 0)
        assert not torch.equal(found[-1][0], found[0][0])


def test_a_step_that_would_overflow_is_skipped():
    found, _, skipped = trained(65504.0, 1.0, 30.0, 0.0, False, pure=False)
    assert skipped > 0
    assert all(x.isfinite().all() for each in found for x in each)


CASES = [(1.0, 0.02, 1e-3, 0.01), (1.0, 30.0, 1e-2, 0.0), (65504.0, 1.0, 30.0, 0.0), (6e4, 1e-2, 1e-3, 0.0)]


def on_ranks() -> list:
    with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        return [[trained(*case, True, pure=pure) for pure in (False, True)] for case in CASES]


def test_ranks_skip_the_same_steps_and_stay_alike():
    for case, one, two in zip(CASES, *ranks.run(2, on_ranks), strict=True):
        for mine, theirs in zip(one, two, strict=True):
            assert mine[1:] == theirs[1:]
            assert all(torch.equal(a, b) for a, b in zip(mine[0][-1], theirs[0][-1], strict=True))
        (place, here, skipped), (pure, _, missed) = one
        assert skipped == missed, case
        torch.testing.assert_close(place, pure, rtol=4e-3, atol=4e-3 * case[2])
        assert all(here[:3]) == (case[0] != 65504.0), (case, here)


def test_lamb_has_no_bounds_for_it_and_says_so():
    params = [torch.nn.Parameter(torch.ones(4, dtype=HALF))]
    opt = fn.Optimizer(params, partial(fn.onebit_lamb, axis="data"), lr=1e-3, schedule=lambda t: Phase.WARMUP)
    params[0].grad = torch.ones(4, dtype=HALF)
    opt.step()
    assert any("float16" in str(x) for x in opt.training.said)
