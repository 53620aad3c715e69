"""The drop-ins inside a real DeepSpeed: client optimizers of its engine, two ranks, CPU, gloo.

`make deepspeed-test` runs this in an environment of its own; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn

from fn import ledger
from fn.adapters.deepspeed import OnebitAdam, OnebitLamb, ZeroOneAdam
from fn.adapters.deepspeed.optimizers import DeepSpeedOptimizer
from fn.base import Phase


def is_installed(package: str) -> bool:
    """Tell whether a package is: a folder of these tests may have its name, which an import would find."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(not is_installed("deepspeed"), reason="DeepSpeed is not installed"),
]

STEPS, WORLD = 24, 2
KINDS = {
    "OnebitAdam": (OnebitAdam, {"lr": 0.01, "freeze_step": 9}),
    "OnebitLamb": (OnebitLamb, {"lr": 0.05, "freeze_step": 9}),
    "ZeroOneAdam": (
        ZeroOneAdam,
        {"lr": 0.01, "var_freeze_step": 9, "var_update_scaler": 4, "local_step_scaler": 4, "local_step_clipper": 4},
    ),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's own batches of one regression that all ranks share."""
    truth = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2 + rank)
    inputs = [torch.randn(32, 12, generator=generator) for _ in range(STEPS)]
    return [(x, torch.tanh(x @ truth)) for x in inputs]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


class Trace:
    """What happened, step by step: loss, parameters, phase, whether the engine averaged, bytes that we sent."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.params: list[Tensor] = []
        self.phases: list[Phase] = []
        self.averaged: list[bool] = []
        self.sent: list[int] = []


def start(name: str, config: dict[str, Any], attach: bool = True) -> tuple[Any, DeepSpeedOptimizer]:
    """Return an engine with one of our optimizers as its client optimizer."""
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())})
    import deepspeed

    model = network()
    kind, arguments = KINDS[name]
    optimizer = kind(model.parameters(), **arguments)
    base = {"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**base, **config})
    if attach:
        optimizer.attach(engine)
    return engine, optimizer


def train(engine: Any, optimizer: DeepSpeedOptimizer, steps: slice = slice(None)) -> Trace:
    trace = Trace()
    for x, y in batches(dist.get_rank())[steps]:
        trace.phases.append(optimizer.phase)
        trace.averaged.append(engine.enable_backward_allreduce)
        loss = nn.functional.mse_loss(engine(x.to(next(engine.module.parameters()).dtype)).float(), y)
        engine.backward(loss)
        with ledger() as sent:
            engine.step()
        trace.losses.append(loss.item())
        trace.params.append(flat(engine.module))
        trace.sent.append(sent.total)
    return trace


def with_engine(name: str, config: dict[str, Any], attach: bool = True) -> Trace:
    return train(*start(name, config, attach))


def without_engine(name: str) -> Trace:
    model, trace = network(), Trace()
    kind, arguments = KINDS[name]
    optimizer = kind(model.parameters(), **arguments)
    for x, y in batches(dist.get_rank()):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        trace.losses.append(loss.item())
        trace.params.append(flat(model))
    return trace


def falls(losses: list[float]) -> bool:
    return sum(losses[-4:]) < 0.5 * sum(losses[:4])


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def attached(name: str) -> list[Trace]:
    return run(WORLD, with_engine, name, {}, timeout=300)


def test_it_trains_through_all_its_phases(attached: list[Trace], name: str) -> None:
    phases = {"ZeroOneAdam": set(Phase)}.get(name, {Phase.WARMUP, Phase.COMPRESSED})
    for trace in attached:
        assert falls(trace.losses)
        assert set(trace.phases) == phases


def test_the_engine_averages_in_warm_up_steps_only(attached: list[Trace]) -> None:
    for trace in attached:
        assert trace.averaged == [phase is Phase.WARMUP for phase in trace.phases]


def test_few_bytes_are_sent_after_the_warm_up_and_none_in_local_steps(attached: list[Trace]) -> None:
    warm = attached[0].sent[0]
    for phase, sent in zip(attached[0].phases, attached[0].sent, strict=True):
        assert sent == {Phase.WARMUP: warm, Phase.LOCAL: 0}.get(phase, sent)
        assert phase is not Phase.COMPRESSED or 0 < sent < warm / 10


def test_ranks_hold_the_same_parameters_after_every_step_that_is_not_local(attached: list[Trace], name: str) -> None:
    for phase, ours, theirs in zip(attached[0].phases, attached[0].params, attached[1].params, strict=True):
        if phase is Phase.LOCAL:
            assert not torch.equal(ours, theirs)
        else:  # 0/1 Adam takes its local steps back in floating point, as DeepSpeed's does
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if name == "ZeroOneAdam" else 0)


def test_it_is_what_the_drop_in_does_without_the_engine(attached: list[Trace], name: str) -> None:
    for ours, alone in zip(attached, run(WORLD, without_engine, name), strict=True):
        assert ours.losses == alone.losses
        assert all(torch.equal(a, b) for a, b in zip(ours.params, alone.params, strict=True))


def test_without_attach_the_engine_goes_on_averaging(attached: list[Trace], name: str) -> None:
    traces = run(WORLD, with_engine, name, {}, False, timeout=300)
    frozen = next(i for i, phase in enumerate(traces[0].phases) if phase is not Phase.WARMUP)
    for trace, other in zip(traces, attached, strict=True):
        assert all(trace.averaged)
        assert falls(trace.losses)
        assert all(torch.equal(a, b) for a, b in zip(trace.params[:frozen], other.params, strict=False))
        assert not torch.equal(trace.params[frozen], other.params[frozen])


CONFIGS = {
    "bf16": {"bf16": {"enabled": True}},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"gradient_clipping": 0.5},
    "scheduler": {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 6},
        }
    },
}


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations_that_the_engine_adds(name: str, config: str) -> None:
    first, second = run(WORLD, with_engine, name, CONFIGS[config], timeout=300)
    assert sum(first.losses[-4:]) < sum(first.losses[:4])
    assert Phase.COMPRESSED in first.phases
    for phase, ours, theirs in zip(first.phases, first.params, second.params, strict=True):
        if phase is Phase.WARMUP or (phase is Phase.COMPRESSED and name != "ZeroOneAdam"):
            assert torch.equal(ours, theirs)


def stages() -> str:
    try:
        start("OnebitAdam", {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True})
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_zero_is_refused_with_the_reason() -> None:
    for text in run(WORLD, stages, timeout=300):
        assert "ZeRO stage 1" in text


def save_and_load(name: str, folder: str) -> tuple[list[str], bool, Trace]:
    """Restart from the engine's checkpoint.

    Returns: what then differs from the saved state; whether training goes on exactly once this rank's own state is
    loaded; what follows with `reset_errors` instead.
    """
    engine, optimizer = start(name, {})
    train(engine, optimizer, slice(0, 11))
    engine.save_checkpoint(folder, tag="here")
    own = {path: leaf.clone() for path, leaf in optimizer.state_dict().items()}
    went_on = train(engine, optimizer, slice(11, None))

    engine, optimizer = start(name, {})
    engine.load_checkpoint(folder, tag="here")
    found = optimizer.state_dict()
    differing = [path for path in own if not torch.equal(own[path], found[path])]
    optimizer.load_state_dict(own)
    again = train(engine, optimizer, slice(11, None))
    exact = all(torch.equal(a, b) for a, b in zip(went_on.params, again.params, strict=True))

    engine.load_checkpoint(folder, tag="here")
    optimizer.reset_errors()
    return differing, exact, train(engine, optimizer, slice(11, None))


def test_the_engines_checkpoint_holds_the_errors_of_one_rank(name: str, tmp_path: Path) -> None:
    """As documented: after `load_checkpoint` every rank loads its own state, or the errors start from zero."""
    found = run(WORLD, save_and_load, name, str(tmp_path), timeout=300)
    assert found[0][0] == []
    assert {path.split(".")[-2] for path in found[1][0]} >= {"worker", "server"}
    for _, exact, reset in found:
        assert exact or name == "ZeroOneAdam"  # the engine saved the parameters of one rank, too
        assert Phase.WARMUP not in reset.phases
        assert sum(reset.losses[-4:]) < sum(reset.losses[:4])
