"""The drop-ins in real gloo processes follow what DeepSpeed's optimizers did, and take what DeepSpeed took."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from deepspeed_replay import KINDS, build, replay
from golden_cases import load_cases, record
from ranks import run
from torch import Tensor

import fn
from fn import tree
from fn.adapters.deepspeed.optimizers import NAMES, DeepSpeedOptimizer, OnebitAdam, OnebitLamb, ZeroOneAdam, from_config

WORLDS = sorted({case.world for case in load_cases(*KINDS)})
EXTRA = {
    "momentum_accumulator",
    "exp_avg_sq_fresh",
    "scaling_coeff",
    "lamb_coeff_freeze",
    "last_factor",
    "worker_error",
    "server_error",
    "exp_avg",
    "exp_avg_sq",
    "param",
}


def replay_all(world: int) -> list[str]:
    failures = []
    for case in load_cases(*KINDS):
        if case.world == world:
            try:
                replay(case, torch.distributed.get_rank())
            except AssertionError as error:
                failures.append(str(error))
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("world", [*WORLDS[:-1], pytest.param(WORLDS[-1], marks=pytest.mark.reliability)])
def test_every_recording_is_followed_in_real_processes(world: int) -> None:
    """The largest world takes as long as all others, and is replayed in simulated ranks by `test_golden`, too."""
    for rank, failures in enumerate(run(world, replay_all, world)):
        assert not failures, f"rank {rank}: " + "\n".join(failures)


def test_the_replay_compares_every_recorded_array_of_the_state() -> None:
    for case in load_cases(*KINDS):
        params = case.params()
        found = record(build(case, params).states, params, case.row["optimizer"], 1)
        recorded = {name for name in case.arrays if name.split(".")[-1] in EXTRA and name != "flat.exp_avg"}
        assert recorded <= set(found), f"{case.row['name']}: {sorted(recorded - set(found))} are not compared"


def quadratic(kind: type[DeepSpeedOptimizer], **arguments: Any) -> tuple[Tensor, DeepSpeedOptimizer]:
    p = torch.full((4,), 2.0, requires_grad=True)
    return p, kind([p], **arguments)


def take(p: Tensor, optimizer: DeepSpeedOptimizer, steps: int) -> None:
    for _ in range(steps):
        p.grad = p.detach().clone()
        optimizer.step()


@pytest.mark.parametrize("kind", NAMES.values())
def test_amsgrad_is_refused_and_arguments_without_effect_warn(kind: type[DeepSpeedOptimizer]) -> None:
    with pytest.raises(RuntimeError, match="amsgrad"):
        quadratic(kind, amsgrad=True)
    idle = {"eps_inside_sqrt": True, "max_grad_norm": 1.0, "cuda_aware": True, "bias_correction": False}
    for name, value in idle.items():
        with pytest.warns(UserWarning, match=name):
            quadratic(kind, **{name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quadratic(kind)


def test_freeze_step_counts_the_initialising_call_that_is_not_made() -> None:
    p, optimizer = quadratic(OnebitAdam, freeze_step=4, lr=0.1)
    take(p, optimizer, 1)
    assert not torch.equal(p, torch.full((4,), 2.0)), "the first batch was dropped"
    take(p, optimizer, 1)
    assert not optimizer.adam_freeze_key
    take(p, optimizer, 1)
    assert optimizer.adam_freeze_key, "freeze_step=4 is three warm-up updates"


def test_the_initialising_call_drops_a_batch_when_asked_for() -> None:
    p, optimizer = quadratic(OnebitAdam, lr=0.1, initialising_call=True)
    take(p, optimizer, 1)
    assert torch.equal(p, torch.full((4,), 2.0))
    assert optimizer.steps == 0


def test_the_variance_rests_behind_a_restart_in_the_frozen_phase() -> None:
    """DeepSpeed's takes 0.9 nu + 0.1 g^2 there, of gradients that are each rank's own.

    Differs: fn.adapters.deepspeed.optimizers.ZeroOneAdam: a restart in the frozen phase continues; there it updates the
        variance with local gradients.
    """
    arguments = {"var_freeze_step": 3, "betas": (0.9, 0.9), "lr": 0.05}
    p, optimizer = quadratic(ZeroOneAdam, **arguments)
    take(p, optimizer, 5)
    (nu,) = tree.leaves(tree.fields(optimizer.states, "nu"))
    q, fresh = quadratic(ZeroOneAdam, **arguments)
    q.data.copy_(p.data)
    fresh.load_state_dict(optimizer.state_dict())
    theirs = [0.9 * nu + 0.1 * (q.detach() + own) ** 2 for own in (-0.5, 0.5)]  # two ranks, whose gradients differ
    assert (theirs[0] - theirs[1]).abs().min() > 0.1
    take(q, fresh, 1)
    assert torch.equal(tree.leaves(tree.fields(fresh.states, "nu"))[0], nu)


def test_a_step_that_is_not_finite_is_skipped_where_deepspeeds_ends_in_nan() -> None:
    """Differs: fn.adapters.deepspeed.optimizers.OnebitAdam: Non-finite steps are skipped on all ranks."""
    p, optimizer = quadratic(OnebitAdam, lr=0.1)
    theirs = fn.chain(fn.scale_by_onebit_adam(sync=fn.chain()), fn.scale_by_learning_rate(0.1))
    q = [p.detach().clone()]
    state = theirs.init(q)
    for value in (1.0, float("nan"), 1.0):
        p.grad = torch.full((4,), value)
        optimizer.step()
        updates, state = theirs.warmup_update([p.grad], state, q)
        q = fn.apply_updates(q, updates)
    assert q[0].isnan().all()
    assert p.isfinite().all()
    assert optimizer.skipped == 1


@pytest.mark.parametrize("kind", NAMES.values())
def test_the_engine_averages_in_the_warm_up_only(kind: type[DeepSpeedOptimizer]) -> None:
    class Engine:
        enable_backward_allreduce = False

    arguments = {"var_freeze_step": 2, "local_step_scaler": 1} if kind is ZeroOneAdam else {"freeze_step": 3}
    engine = Engine()
    p, optimizer = quadratic(kind, deepspeed=engine, **arguments)
    assert engine.enable_backward_allreduce
    take(p, optimizer, 2)
    assert not engine.enable_backward_allreduce


def test_lamb_tells_its_coefficients_and_refuses_groups_that_come_late() -> None:
    p, optimizer = quadratic(OnebitLamb, lr=0.01, max_coeff=0.5, min_coeff=0.1)
    take(p, optimizer, 1)
    assert optimizer.get_lamb_coeffs() == [0.5]
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})


def test_a_group_can_be_added_to_one_bit_adam() -> None:
    p, optimizer = quadratic(OnebitAdam, lr=0.1)
    take(p, optimizer, 2)
    before = [leaf.clone() for leaf in tree.leaves(optimizer.states)]
    q = torch.zeros(2, requires_grad=True)
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(optimizer.states), strict=False))
    q.grad = torch.ones(2)
    take(p, optimizer, 1)
    assert float(q[0].detach()) == pytest.approx(-0.5 * 0.1 / 0.001**0.5, rel=1e-3)  # no bias correction


@pytest.mark.parametrize("kind", NAMES.values())
def test_numbers_that_are_written_into_a_group_are_those_of_the_next_step(kind: type[DeepSpeedOptimizer]) -> None:
    ends = []
    for given, written in ((0.3, 0.3), (0.0, 0.3), (0.0, 0.0)):
        params = [torch.full((4,), 2.0, requires_grad=True) for _ in range(2)]
        optimizer = kind([{"params": params[:1]}, {"params": params[1:], "weight_decay": given}], lr=0.1)
        optimizer.param_groups[1]["weight_decay"] = written
        for p in params:
            p.grad = torch.arange(4.0)
        optimizer.step()
        ends.append(torch.stack([p.detach() for p in params]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0][0], ends[2][0])
    assert not torch.equal(ends[0][1], ends[2][1])


@pytest.mark.parametrize("kind", NAMES.values())
def test_hooks_run_once_in_a_step(kind: type[DeepSpeedOptimizer]) -> None:
    """Torch wraps `step` of each class of which there is an optimizer."""
    fn.Optimizer([torch.zeros(1, requires_grad=True)], fn.adamw)
    p, optimizer = quadratic(kind)
    ran = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    take(p, optimizer, 1)
    assert ran == ["before", "after"]


@pytest.mark.parametrize("name", NAMES)
def test_a_deepspeed_configuration_makes_the_drop_in(name: str) -> None:
    p = torch.zeros(3, requires_grad=True)
    block = {"type": name, "params": {"lr": 0.25, "weight_decay": 0.1, "comm_backend_name": "compressed"}}
    for config in (block, {"optimizer": block, "train_batch_size": 8}):
        optimizer = from_config([p], config)
        assert type(optimizer) is NAMES[name]
        assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_a_configuration_that_is_not_known_is_refused() -> None:
    p = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="type"):
        from_config([p], {"type": "Adam", "params": {}})
    with pytest.raises(ValueError, match="comm_backend_name"):
        from_config([p], {"type": "OneBitAdam", "params": {"comm_backend_name": "carrier pigeon"}})


def deepspeed_checkpoint(p: Tensor) -> dict[str, Any]:
    row = {"step": 9, "exp_avg": torch.full_like(p, 0.5), "exp_avg_sq": torch.full_like(p, 0.25)}
    lamb = {"scaling_coeff": 2.0, "lamb_coeff_freeze": 0.75, "last_factor": 1.5, "exp_avg_sq_fresh": torch.ones_like(p)}
    return {"state": {0: {**row, **lamb}}, "param_groups": [{"lr": 0.125, "params": [0]}]}


@pytest.mark.parametrize("kind", NAMES.values())
def test_a_deepspeed_checkpoint_is_loaded(kind: type[DeepSpeedOptimizer]) -> None:
    p, optimizer = quadratic(kind)
    optimizer.load_checkpoint(deepspeed_checkpoint(p.detach()))
    found = record(optimizer.states, ([p],), {v: k for k, v in KINDS.items()}[kind], 1)
    assert torch.equal(found["p0.exp_avg"], torch.full((4,), 0.5))
    assert torch.equal(found["p0.exp_avg_sq"], torch.full((4,), 0.25))
    assert optimizer.steps == 8
    assert float(optimizer.param_groups[0]["lr"]) == 0.125
    if kind is OnebitLamb:
        assert float(found["p0.lamb_coeff_freeze"]) == 0.75
        assert float(found["p0.last_factor"]) == 1.5


def test_a_checkpoint_that_does_not_fit_loads_nothing() -> None:
    _p, optimizer = quadratic(OnebitAdam)
    before = {k: v.clone() for k, v in optimizer.state_dict().items()}
    with pytest.raises(ValueError, match="checkpoint"):
        optimizer.load_checkpoint(deepspeed_checkpoint(torch.zeros(5)))
    assert all(torch.equal(v, before[k]) for k, v in optimizer.state_dict().items())
