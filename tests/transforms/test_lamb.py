"""LAMB and 1-bit LAMB against the papers, and where they differ from DeepSpeed."""

from __future__ import annotations

from functools import partial
from typing import Any

import chains
import numpy as np
import pytest
import torch
from oracle_family import OnebitLamb
from torch._subclasses.fake_tensor import FakeTensorMode

import fn
from fn import tree
from fn.adapters.deepspeed import transforms as numerics

SHAPES = [(7, 5), (13,), (1,), (0,)]


def start(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(world: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn((world, *shape), generator=generator, dtype=torch.float64) for shape in SHAPES]


def begin(tx: fn.Transform, params: Any, world: int) -> tuple[Any, Any]:
    dims = fn.rank_dims(tx.init(params))
    return fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(params), dims


def advance(tx: fn.Transform, phase: fn.Phase, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(phase)(grads, state, params)
    return fn.apply_updates(params, updates), state


@pytest.mark.parametrize(
    ("world", "weight_decay", "max_step"), [(1, 0.1, None), (3, 0.0, None), (3, 0.1, 0.5), (4, 0.0, 0.5)]
)
def test_one_bit_lamb_is_the_papers(world: int, weight_decay: float, max_step: float | None) -> None:
    hyper = {"lr": 0.02, "b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": weight_decay}
    bounds = {"max_coeff": 2.0, "min_coeff": 0.1, "factor_threshold": 0.3}
    tx = chains.onebit_lamb(axis="data", max_step=max_step, **bounds, **hyper)
    params = start()
    oracle = OnebitLamb([p.numpy().ravel() for p in params], world, max_step=max_step or np.inf, **bounds, **hyper)
    state, dims = begin(tx, params, world)
    for step in range(14):
        phase = fn.freeze_after(5)(step)
        grads = gradients(world, step)
        run = fn.simulate(partial(advance, tx, phase), "data", world, in_dims=(None, dims, 0), out_dims=(None, dims))
        params, state = run(params, state, grads)
        oracle.step([[g[r].numpy().ravel() for g in grads] for r in range(world)], phase is fn.Phase.COMPRESSED)
        for ours, theirs in zip(params, oracle.params, strict=True):
            np.testing.assert_allclose(ours.numpy().ravel(), theirs, rtol=0, atol=1e-9, err_msg=f"step {step}")


def test_lamb_scales_adams_direction_by_the_trust_ratio() -> None:
    params, grads = start(), [g[0] for g in gradients(1, 0)]
    tx = fn.lamb(lr=1.0, max_coeff=10.0, weight_decay=0.1)
    adam = fn.chain(fn.scale_by_adam(eps=1e-6), fn.add_decayed_weights(0.1))
    updates, _ = tx.warmup_update(grads, tx.init(params), params)
    direction, _ = adam.warmup_update(grads, adam.init(params), params)
    for u, d, p in zip(updates, direction, params, strict=True):
        ratio = min(float(p.norm() / d.norm()), 10.0) if p.numel() else 1.0
        torch.testing.assert_close(u, -d * ratio, rtol=1e-6, atol=0)


def test_a_momentum_that_is_zero_at_the_switch_is_no_division_by_zero() -> None:
    """DeepSpeed's scaling is the mean magnitude over the tensor's own: infinite, and its momentum NaN from then on.

    Differs: fn.transforms.lamb.scale_by_onebit_lamb: a tensor whose momentum is zero at the switch keeps scaling 1
        (DeepSpeed divides by zero), one whose ratio was never taken has coefficient 1 (there 0, so that it would
        never move again).
    Differs: fn.lamb_optimizers.onebit_lamb: mu / (sqrt(nu) + eps) of the compressed phase is clamped to 3.
    """
    tx, params = fn.onebit_lamb(lr=0.1, axis="data"), [torch.randn(6), torch.ones(3)]
    state = tx.init(params)
    params, state = advance(tx, fn.Phase.WARMUP, params, state, [torch.randn(6), torch.zeros(3)])
    own = torch.stack([mu.norm() / mu.numel() ** 0.5 for mu in tree.fields(state, "mu")[0]])
    theirs = own.mean() / own
    assert theirs[1] == float("inf")
    assert (torch.zeros(3) * theirs[1]).isnan().all()
    for _ in range(3):
        params, state = advance(tx, fn.Phase.COMPRESSED, params, state, [torch.randn(6), torch.zeros(3)])
    assert torch.equal(params[1], torch.ones(3))
    assert torch.isfinite(params[0]).all()
    assert [float(s) for s in tree.fields(state, "scaling")[0]][1] == 1.0


def test_a_tensor_whose_ratio_was_never_taken_moves_after_the_switch() -> None:
    """Its norm was zero in the warm-up's only step; with DeepSpeed's coefficient of 0 the update would be zero.

    Differs: fn.transforms.lamb.scale_by_onebit_lamb: a tensor whose momentum is zero at the switch keeps scaling 1
        (DeepSpeed divides by zero), one whose ratio was never taken has coefficient 1 (there 0, so that it would
        never move again).
    Differs: fn.lamb_optimizers.onebit_lamb: mu / (sqrt(nu) + eps) of the compressed phase is clamped to 3.
    """
    tx, params = fn.onebit_lamb(lr=0.1, axis="data"), [torch.zeros(4)]
    state = tx.init(params)
    params, state = advance(tx, fn.Phase.WARMUP, params, state, [torch.ones(4)])
    assert float(tree.fields(state, "coefficient")[0][0]) == 0.0
    after, state = advance(tx, fn.Phase.COMPRESSED, params, state, [torch.ones(4)])
    direction, factor = (tree.fields(state, name)[0][0] for name in ("mu", "factor"))
    step = after[0] - params[0]
    assert (step < 0).all()
    clamped = (direction / (0.001**0.5 + 1e-8)).clamp(max=3)
    torch.testing.assert_close(step, -0.1 * 1.0 * factor * clamped)  # there: -0.1 * 0 * ...


def test_deepspeeds_padding_counts_and_returns_while_ours_does_not() -> None:
    params = [torch.randn(5)]
    group = numerics.ParamGroup(0.1, 0.9, 0.999, 1e-8, 0.0, (5,))
    theirs = numerics.onebit_lamb([group], axis="data", world_size=2)
    ours = fn.onebit_lamb(lr=0.1, axis="data")
    errors = []
    for tx, tree_of in ((theirs, lambda x: (x,)), (ours, lambda x: x)):
        state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=fn.rank_dims(tx.init(tree_of(params))))(
            tree_of(params)
        )
        dims = fn.rank_dims(state)
        for step in range(3):
            phase = fn.freeze_after(1)(step)
            run = fn.simulate(partial(advance, tx, phase), "data", 2, in_dims=(None, dims, 0), out_dims=(None, dims))
            _, state = run(tree_of(params), state, tree_of([torch.randn(2, 5)]))
        errors.append(tree.fields(state, "worker")[0][0][:, 5:])
        found = tree.fields(state, "padding")
        assert [(x.numel(), bool(x.abs().max() > 0)) for x in found] == ([(11, True)] if tx is theirs else [])
    assert errors[0].abs().max() > 0
    assert errors[1].abs().max() == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [("coeff_beta", 1.0), ("factor_min", 5.0), ("factor_threshold", -0.1), ("min_coeff", 11.0), ("b1", 1.0)],
)
def test_a_hyper_parameter_out_of_range_is_named(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        fn.scale_by_onebit_lamb(sync=fn.chain(), **{argument: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_warm_up_forgets_how_far_the_ratios_had_moved(dtype: torch.dtype) -> None:
    """The factor is of one freeze: after the next one the steps were up to 4 or half as long as they should be."""
    phases = [fn.Phase.WARMUP] * 2 + [fn.Phase.COMPRESSED] * 4 + [fn.Phase.WARMUP]
    make = partial(fn.onebit_lamb, axis="data")
    tx, params = make(lr=0.1), [p.to(dtype) for p in start()]
    state = tx.init(params)
    own = [torch.nn.Parameter(p.clone()) for p in params]
    opt = fn.Optimizer(own, make, schedule=phases.__getitem__, lr=0.1)
    for t, phase in enumerate(phases):
        grads = [g[0].to(dtype) for g in gradients(1, t)]
        params, state = advance(tx, phase, params, state, grads)
        for p, g in zip(own, grads, strict=True):
            p.grad = g
        opt.step()
        for (factors,) in (tree.fields(state, "factor"), tree.fields(opt.states, "factor")):
            assert (torch.stack(factors) == 1).all() == (phase is fn.Phase.WARMUP)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:0", "cpu")])
def test_trust_ratios_reach_params_on_several_devices(devices):
    with FakeTensorMode():
        params = [torch.ones(3, 4, device=device) for device in devices]
        scaled, _ = fn.scale_by_trust_ratio().update(fn.Phase.WARMUP)(params, (), params)
    assert [str(x.device) for x in scaled] == [*devices]
