"""Adam's moments and 1-bit Adam's, against the papers' loop over ranks in float64."""

from __future__ import annotations

import math

import chains
import numpy as np
import oracle
import pytest
import torch

import fn
from fn import Phase, tree
from fn.adapters.deepspeed import transforms as deepspeed

SHAPES = [(5, 7), (9,), (1,), (2, 3, 4)]
HYPER = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
LR = 0.02


def params() -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def gradients(world: int) -> list[torch.Tensor]:
    return [torch.randn(world, *shape, dtype=torch.float64) for shape in SHAPES]


def trajectory(tx, p, schedule, all_gradients, world):
    """Yield params and state after each step; all but the errors must be the same on every rank."""
    dims = fn.rank_dims(tx.init(p))
    state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(p)
    for t, g in enumerate(all_gradients):
        f = tx.update(schedule(t))

        def step(g, s, p, f=f):
            u, s = f(g, s, p)
            return fn.apply_updates(p, u), s

        p, state = fn.simulate(step, "data", world, in_dims=(0, dims, None), out_dims=(None, dims))(g, state, p)
        yield p, state


def assert_follows(tx, loop, schedule, world, steps=12):
    p = [torch.from_numpy(x.reshape(shape)) for x, shape in zip(loop.params, SHAPES, strict=True)]
    gs = [gradients(world) for _ in range(steps)]
    for t, (found, state) in enumerate(trajectory(tx, p, schedule, gs, world)):
        loop.step([[g[r].reshape(-1).numpy() for g in gs[t]] for r in range(world)], schedule(t) is Phase.COMPRESSED)
        for name, ours in (("mu", tree.fields(state, "mu")[0]), ("nu", tree.fields(state, "nu")[0]), ("params", found)):
            for i, theirs in enumerate(getattr(loop, name)):
                np.testing.assert_allclose(
                    ours[i].reshape(-1), theirs, rtol=1e-9, atol=1e-9, err_msg=f"{name} {i} at {t}"
                )


@pytest.mark.parametrize(("world", "block"), [(1, None), (3, 8), (4, None)])
@pytest.mark.parametrize(("bias_correction", "max_step"), [(False, None), (True, 0.3)])
def test_one_bit_adam_follows_the_papers_loop_through_both_phases(world, block, bias_correction, max_step):
    hyper = {**HYPER, "bias_correction": bias_correction}
    tx = chains.onebit_adam(LR, **hyper, axis="data", codec=fn.sign(block=block), max_step=max_step)
    flat = [p.reshape(-1).numpy() for p in params()]
    loop = oracle.OnebitAdam(flat, world, LR, **hyper, block=block, max_step=max_step or np.inf)
    assert_follows(tx, loop, fn.freeze_after(5), world)


@pytest.mark.parametrize("world", [2, 3])
def test_the_errors_too_follow_the_papers_loop(world):
    tx = chains.onebit_adam(LR, **HYPER, axis="data", layout="per_tensor")
    loop = oracle.OnebitAdam([p.reshape(-1).numpy() for p in params()], world, LR, **HYPER, bias_correction=True)
    p = [torch.from_numpy(x.reshape(shape)) for x, shape in zip(loop.params, SHAPES, strict=True)]
    schedule, gs = fn.freeze_after(2), [gradients(world) for _ in range(6)]
    *_, (_, state) = trajectory(tx, p, schedule, gs, world)
    for t in range(len(gs)):
        loop.step([[g[r].reshape(-1).numpy() for g in gs[t]] for r in range(world)], schedule(t) is Phase.COMPRESSED)
    (worker,), (server,) = tree.fields(state, "worker"), tree.fields(state, "server")
    for i, shape in enumerate(SHAPES):
        n = math.prod(shape)
        np.testing.assert_allclose(worker[i][:, :n], np.stack(loop.means[i].worker), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(server[i].flatten()[:n], loop.means[i].server, rtol=1e-9, atol=1e-9)
        assert bool(worker[i].any()) is (n > 1)


def test_the_frozen_second_moment_stays_bitwise_and_its_age_with_it():
    tx = fn.onebit_adam(axis="data")
    p = params()
    gs = [gradients(2) for _ in range(5)]
    states = [state for _, state in trajectory(tx, p, fn.freeze_after(2), gs, 2)]
    frozen, later = (tree.leaves(tree.fields(s, "nu")) for s in (states[1], states[-1]))
    assert all(map(torch.equal, frozen, later))
    assert not all(map(torch.equal, tree.leaves(tree.fields(states[0], "nu")), frozen))
    assert [int(age) for age in tree.fields(states[-1], "ages")[0]] == [5, 2]


def test_rows_without_any_gradient_stay_exactly_zero_and_do_without_the_mask_drift():
    """One bit cannot say zero: in the paper, and in DeepSpeed, the same rows move.

    Differs: fn.transforms.adam.scale_by_onebit_adam: `bias_correction` is not in the paper, and a momentum without a
        second moment is not kept at zero there; DeepSpeed needs a hand-written mask.
    """
    used = torch.arange(6)[:, None] < 4
    for keep in (True, False):
        sync = fn.compressed_average("data", fn.sign())
        link = fn.scale_by_onebit_adam(sync=sync)
        if not keep:
            link = deepspeed.scale_by_onebit_adam(0.9, 0.999, 1e-8, sync=sync)
        tx = fn.chain(fn.average("data"), link, fn.scale_by_learning_rate(0.1))
        gs = [[used * torch.randn(2, 6, 5, dtype=torch.float64)] for _ in range(8)]
        start = [torch.randn(6, 5, dtype=torch.float64)]
        *_, (found, state) = trajectory(tx, start, fn.freeze_after(3), gs, 2)
        unused_mu = tree.fields(state, "mu")[0][0][4:]
        assert bool(unused_mu.any()) is not keep
        assert torch.equal(found[0][4:], start[0][4:]) is keep
        assert not torch.equal(found[0][:4], start[0][:4])


def test_the_first_step_is_the_sign_with_bias_correction_and_3_times_that_in_the_paper():
    """0.1 g / sqrt(0.001 g^2) = 3.16 without, 1 with.

    Differs: fn.transforms.adam.scale_by_onebit_adam: `bias_correction` is not in the paper, and a momentum without a
        second moment is not kept at zero there; DeepSpeed needs a hand-written mask.
    """
    g = [torch.tensor([2.0, -0.5], dtype=torch.float64)]
    for corrected, size in ((False, 0.1 / 0.001**0.5), (True, 1.0)):
        tx = fn.scale_by_onebit_adam(eps=0.0, sync=fn.average(None), bias_correction=corrected)
        u, _ = tx.warmup_update(g, tx.init(g), g)
        torch.testing.assert_close(u[0], size * g[0].sign())


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_moments_are_never_half_precision(dtype, moments):
    for link in (fn.scale_by_adam(), fn.scale_by_onebit_adam(sync=fn.compressed_average("data", fn.sign()))):
        p = [torch.ones(4, dtype=dtype)]
        state = link.init(p)
        u, after = link.warmup_update(p, state, p)
        assert state.mu[0].dtype == state.nu[0].dtype == after.mu[0].dtype == after.nu[0].dtype == moments
        assert u[0].dtype == moments


@pytest.mark.parametrize(("name", "value"), [("b1", 1.0), ("b1", -0.1), ("b2", 1.0), ("b2", -0.5), ("eps", -1e-8)])
def test_arguments_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name}: .*got {value}"):
        fn.scale_by_adam(**{name: value})
    with pytest.raises(ValueError, match=rf"{name}: .*got {value}"):
        fn.onebit_adam(axis="data", **{name: value})
