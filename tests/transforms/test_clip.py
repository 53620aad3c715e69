"""Clipping by the global norm: of the mean where it is known, of an agreed bound where it is not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn import Phase, tree

ALL_PHASES = list(Phase)


def norm(u) -> float:
    return float(torch.cat([x.double().reshape(-1) for x in tree.leaves(u)]).norm())


@given(st.integers(0, 2**31), st.floats(0.01, 10), st.floats(-3, 3))
def test_the_norm_ends_at_most_at_the_bound_and_the_direction_stays(seed, bound, magnitude):
    generator = torch.Generator().manual_seed(seed)
    u = {"a": torch.randn(5, 3, generator=generator) * 10**magnitude, "b": torch.randn(4, generator=generator)}
    for phase in ALL_PHASES:
        found, state = fn.clip_by_global_norm(bound).update(phase)(u, (), u)
        assert state == ()
        assert norm(found) <= bound * (1 + 1e-6)
        factor = min(1.0, bound / (norm(u) + 1e-6))
        for name, leaf in u.items():
            torch.testing.assert_close(found[name], leaf * factor, rtol=1e-5, atol=0)


def test_it_is_the_factor_of_torch():
    p = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for x in p:
        x.grad = torch.randn_like(x)
    u = [x.grad.clone() for x in p]
    torch.nn.utils.clip_grad_norm_(p, 0.5)
    found, _ = fn.clip_by_global_norm(0.5).warmup_update(u, (), p)
    for x, f in zip(p, found, strict=True):
        torch.testing.assert_close(f, x.grad)


def test_updates_below_the_bound_are_left_alone():
    u = [torch.tensor([0.3, -0.4])]
    found, _ = fn.clip_by_global_norm(1.0).warmup_update(u, (), u)
    assert torch.equal(found[0], u[0])


def test_behind_average_the_warm_up_clips_the_averaged_gradient():
    tx = fn.chain(fn.average("data"), fn.clip_by_global_norm(1.0))
    u = torch.tensor([[10.0, 0.0], [-10.0, 1.0]])  # large, but their mean is not
    f = fn.simulate(lambda u: tx.warmup_update([u], ((), ()), [u])[0][0], "data", 2, out_dims=None)
    torch.testing.assert_close(f(u), u.mean(0))


@pytest.mark.parametrize("world", [2, 4])
def test_with_an_axis_all_ranks_of_the_compressed_phase_use_one_factor_that_bounds_the_mean(world):
    u = torch.randn(world, 6) * torch.arange(1.0, world + 1)[:, None]
    tx = fn.clip_by_global_norm(0.5, "data")
    found = fn.simulate(lambda u: tx.compressed_update([u], (), [u])[0][0], "data", world)(u)
    factors = found / u
    torch.testing.assert_close(factors, factors[:1, :1].expand_as(factors))
    assert found.mean(0).norm() <= 0.5
    expected = 0.5 / u.square().sum(1).mean().sqrt()
    torch.testing.assert_close(factors[0, 0], expected, rtol=1e-5, atol=0)


def test_without_an_axis_the_compressed_phase_clips_each_rank_alone_and_sends_nothing():
    u = torch.randn(2, 6) * torch.tensor([[1.0], [100.0]])
    tx = fn.clip_by_global_norm(0.5)
    with fn.ledger() as book:
        found = fn.simulate(lambda u: tx.compressed_update([u], (), [u])[0][0], "data", 2)(u)
    torch.testing.assert_close(found.norm(dim=1), torch.tensor([0.5, 0.5]))
    assert book.total == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_stay_and_half_precision_does_not_overflow_the_norm(dtype):
    u = [torch.full((1000,), 300.0).to(dtype), torch.ones(3)]
    found, _ = fn.clip_by_global_norm(1.0).warmup_update(u, (), u)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert 0.9 < norm(found) < 1.1


def test_nan_is_not_clipped_away():
    u = [torch.tensor([float("nan"), 1.0])]
    found, _ = fn.clip_by_global_norm(1.0).warmup_update(u, (), u)
    assert found[0].isnan().any()


def test_an_empty_tree_passes():
    assert fn.clip_by_global_norm(1.0).warmup_update([], (), []) == ([], ())


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_bound_that_is_not_positive_is_refused_by_name(value):
    with pytest.raises(ValueError, match="max_norm"):
        fn.clip_by_global_norm(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_is_not_rounded_to_half_precision(dtype):
    grads = [torch.full((1000,), 0.3, dtype=dtype)]
    for bound in torch.linspace(1.0, 2.0, 33).tolist():
        clipped, _ = fn.clip_by_global_norm(bound).warmup_update(grads, (), None)
        exact = (grads[0].double() * bound / float(grads[0].double().norm())).to(dtype)
        assert torch.equal(clipped[0], exact)


def test_a_norm_that_overflows_skips_the_step_instead_of_making_it_zero():
    tx = fn.skip_nonfinite(fn.clip_by_global_norm(1.0))
    params = [torch.ones(3)]
    updates, state = tx.warmup_update([torch.full((3,), 1e30)], tx.init(params), params)
    assert int(state.skipped) == 1
    assert not updates[0].any()
    updates, state = tx.warmup_update([torch.full((3,), 1e15)], state, params)
    assert int(state.skipped) == 1
    torch.testing.assert_close(updates[0].norm(), torch.tensor(1.0))
