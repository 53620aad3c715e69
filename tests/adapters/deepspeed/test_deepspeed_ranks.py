"""The drop-ins on two real ranks: restarts in every phase, DeepSpeed's restart, masks and full-precision groups."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from golden_cases import record
from ranks import Cases
from torch import Tensor

from fn import ledger, tree
from fn.adapters.deepspeed import OnebitAdam, OnebitLamb, ZeroOneAdam
from fn.adapters.deepspeed.optimizers import DeepSpeedOptimizer
from fn.base import Phase

STEPS = 16
KINDS: dict[str, tuple[type[DeepSpeedOptimizer], dict[str, Any]]] = {
    "onebit_adam": (OnebitAdam, {"lr": 0.01, "freeze_step": 6, "weight_decay": 0.01}),
    "onebit_lamb": (OnebitLamb, {"lr": 0.01, "freeze_step": 6, "weight_decay": 0.01}),
    "zero_one_adam": (
        ZeroOneAdam,
        {"lr": 0.01, "var_freeze_step": 7, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    ),
}
SHAPES = ((5, 3), (7,))
two = Cases(2)


@two
def restarts() -> dict[str, list[str]]:
    return {name: restart_after_steps(name) for name in KINDS}


@two
def restarts_both_ways() -> dict[str, tuple[list[str], int]]:
    return {name: restart_both_ways(name) for name in KINDS}


@two
def collectives() -> dict[str, int]:
    return {name: collectives_of_a_compressed_step(name) for name in KINDS}


def fresh(name: str, **group: Any) -> tuple[list[Tensor], DeepSpeedOptimizer]:
    generator = torch.Generator().manual_seed(5)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    kind, arguments = KINDS[name]
    return params, kind([{"params": params[:1]}, {"params": params[1:], **group}], **arguments)


def step(params: list[Tensor], optimizer: DeepSpeedOptimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    for p in params:
        p.grad = p.detach() + torch.randn(p.shape, generator=generator)
    optimizer.step()


def copy_of(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def put(params: list[Tensor], values: list[Tensor]) -> None:
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def restart_after_steps(name: str) -> list[str]:
    """Return the phases in which a restart, of every third step, did not continue bit for bit, for four steps."""
    params, optimizer = fresh(name)
    saved, phases = [], []
    for number in range(STEPS):
        saved.append((through_a_file(optimizer.state_dict()), copy_of(params)))
        phases.append(optimizer.phase)
        step(params, optimizer, number)
    assert set(phases[::3]) == (set(Phase) if name == "zero_one_adam" else {Phase.WARMUP, Phase.COMPRESSED})
    saved.append((through_a_file(optimizer.state_dict()), copy_of(params)))
    wrong = []
    for cut, (state, values) in [*enumerate(saved[:-1])][::3]:
        again, restarted = fresh(name)
        put(again, values)
        restarted.load_state_dict(state)
        end = min(cut + 4, STEPS)
        for number in range(cut, end):
            step(again, restarted, number)
        pairs = zip(tree.leaves(restarted.state_dict()), tree.leaves(saved[end][0]), strict=True)
        same = all(torch.equal(a, b) for a, b in zip(again, saved[end][1], strict=True))
        if not same or not all(torch.equal(a, b) for a, b in pairs):
            wrong.append(f"restart before step {cut}, {phases[cut]}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_restart_in_any_phase_continues_bit_for_bit(name: str) -> None:
    assert [found[name] for found in two.answer("restarts")] == [[], []]


def as_deepspeed_saves(name: str, optimizer: DeepSpeedOptimizer, params: list[Tensor]) -> dict[str, Any]:
    """Return what DeepSpeed's optimizer would save in the state that ours is in."""
    arrays = record(optimizer.states, params, name, 2)
    elapsed = tree.fields(optimizer.states, "elapsed") or [torch.zeros(())] * len(params)
    rows = {}
    for i in range(len(params)):
        mine = {k.split(".")[1]: v for k, v in arrays.items() if k.startswith(f"p{i}.") and not k.endswith("param")}
        rows[i] = {**mine, "step": optimizer.steps + 1, "lrs": float(elapsed[i])}
    groups = [{"lr": float(g["lr"]), "params": [i]} for i, g in enumerate(optimizer.param_groups)]
    return {"state": rows, "param_groups": groups}


def restart_both_ways(name: str) -> tuple[list[str], int]:
    """Compare DeepSpeed's restart, from its checkpoint, with ours and `reset_errors`, at every third step.

    Returns: where they differ, and at how many steps they differ from a restart that keeps the errors.
    """
    params, optimizer = fresh(name)
    wrong, others = [], 0
    for number in range(STEPS):
        values = copy_of(params)
        ends = []
        for load in (load_ours, load_theirs, load_with_errors) if number % 3 == 0 else ():
            again, restarted = fresh(name)
            put(again, values)
            load(name, restarted, optimizer, params)
            for n in range(number, number + 3):
                step(again, restarted, n)
            ends.append(copy_of(again))
        if ends:
            wrong += [] if same(ends[0], ends[1]) else [f"before step {number}, {optimizer.phase}"]
            others += not same(ends[1], ends[2])
        step(params, optimizer, number)
    return wrong, others


def load_ours(name: str, to: DeepSpeedOptimizer, optimizer: DeepSpeedOptimizer, params: list[Tensor]) -> None:
    to.load_state_dict(optimizer.state_dict())
    to.reset_errors()


def load_with_errors(name: str, to: DeepSpeedOptimizer, optimizer: DeepSpeedOptimizer, params: list[Tensor]) -> None:
    to.load_state_dict(optimizer.state_dict())


def load_theirs(name: str, to: DeepSpeedOptimizer, optimizer: DeepSpeedOptimizer, params: list[Tensor]) -> None:
    to.load_checkpoint({"optimizer": as_deepspeed_saves(name, optimizer, params), "global_steps": 3})


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_deepspeeds_checkpoint_is_our_state_without_errors(name: str) -> None:
    """And leads elsewhere than the state with its errors, with which a restart is none.

    Differs: fn.adapters.deepspeed.optimizers.OnebitAdam: errors are saved by `state_dict` and continue;
        `reset_errors()` gives DeepSpeed's restart.
    """
    for wrong, others in (found[name] for found in two.answer("restarts_both_ways")):
        assert wrong == []
        assert others >= 2


def collectives_of_a_compressed_step(name: str) -> int:
    params, optimizer = fresh(name)
    while optimizer.phase is not Phase.COMPRESSED:
        step(params, optimizer, optimizer.steps)
    with ledger() as sent:
        step(params, optimizer, optimizer.steps)
    return sum(sent.messages.values())


@pytest.mark.parametrize(("name", "expected"), [("onebit_adam", 4), ("zero_one_adam", 4), ("onebit_lamb", 2)])
def test_two_messages_for_each_tensor_and_two_in_all_for_lamb(name: str, expected: int) -> None:
    assert [found[name] for found in two.answer("collectives")] == [expected] * 2


def test_a_momentum_that_is_zero_at_lambs_switch_divides_nothing_by_zero() -> None:
    """DeepSpeed's scaling would be 0 / 0 for a model of zeros; ours is 1.

    Differs: fn.adapters.deepspeed.optimizers.OnebitLamb: a momentum that is zero at the switch is no division by zero.
    """
    params, optimizer = fresh("onebit_lamb")
    for number in range(STEPS):
        for p in params:
            p.grad = torch.zeros_like(p) if number < 8 else torch.ones_like(p)
        optimizer.step()
    assert optimizer.frozen
    assert [float(s) for s in tree.leaves(tree.fields(optimizer.states, "scaling"))] == [1.0, 1.0]
    norms = torch.zeros(2)
    assert (norms.mean() / norms).isnan().all()
    assert all(p.isfinite().all() for p in params)


def test_the_flat_groups_of_the_fp16_wrapper_are_split() -> None:
    p, q = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = OnebitAdam([p, q])
    row = {"step": 9, "exp_avg": torch.arange(10.0), "exp_avg_sq": torch.ones(10), "worker_error": torch.ones(16)}
    saved = {"state": {0: row}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    optimizer.load_checkpoint({"optimizer": {"optimizer_state_dict": saved}})
    mu = tree.leaves(tree.fields(optimizer.states, "mu")[0])
    assert torch.equal(mu[0], torch.arange(6.0).view(2, 3))
    assert torch.equal(mu[1], torch.arange(6.0, 10.0))
    assert optimizer.steps == 8


def test_a_checkpoint_of_other_groups_loads_nothing() -> None:
    p, q = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = OnebitAdam([{"params": [p]}, {"params": [q]}])
    rows = {i: {"step": 3, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)} for i in range(2)}
    with pytest.raises(ValueError, match="1 param groups"):
        optimizer.load_checkpoint({"state": rows, "param_groups": [{"lr": 1.0, "params": [0, 1]}]})
    assert not any(leaf.any() for leaf in tree.leaves(optimizer.states))


def test_a_pipeline_engine_has_a_switch_of_its_own() -> None:
    class Engine:
        enable_backward_allreduce = False
        pipeline_enable_backward_allreduce = False

    p = torch.ones(3, requires_grad=True)
    optimizer = OnebitAdam([p], freeze_step=2)
    engine = Engine()
    optimizer.attach(engine)
    assert engine.pipeline_enable_backward_allreduce
    p.grad = torch.ones(3)
    optimizer.step()
    assert not engine.pipeline_enable_backward_allreduce
    assert not engine.enable_backward_allreduce


def test_an_engine_with_zero_is_refused() -> None:
    class Engine:
        def zero_optimization_stage(self) -> int:
            return 2

    with pytest.raises(ValueError, match="ZeRO stage 2"):
        OnebitAdam([torch.ones(3, requires_grad=True)], deepspeed=Engine())
