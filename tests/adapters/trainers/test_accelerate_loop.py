"""`fn.adapters.trainers.accelerate` in loops of accelerate, on two ranks."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_torchrun import as_started_by_torchrun, same_on_all_ranks, shared_folder
from ranks import Cases
from torch.utils.data import DataLoader, TensorDataset

import fn
from fn.adapters.trainers import accelerate, hf

HERE = importlib.util.find_spec("accelerate") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="accelerate is not installed")
two = Cases(2)
STEPS, SAVED, ACCUMULATE = 6, 3, 2


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))


def examples() -> DataLoader:
    """A number of examples that ranks and batches do not divide."""
    x = torch.randn(101, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def new_accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    as_started_by_torchrun()
    return Accelerator(cpu=True, **options)


PAIRS = {
    "muloco": hf.factory(fn.muloco, lr=0.02, schedule=fn.every(2), codec=fn.int8()),
    "muon": hf.factory(fn.muon, lr=0.02),
}


def trained(folder: str, method: str, *, resume: bool) -> Any:
    """Train, and save behind step 3; or go on from there, with a model that starts elsewhere."""
    accelerator = new_accelerator(gradient_accumulation_steps=ACCUMULATE)
    model, opt = accelerate.prepare(accelerator, network(seed=5 if resume else dist.get_rank()), PAIRS[method])
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(opt.optimizer, 1.0, 0.1, 12))
    loader, agreed = accelerator.prepare(examples()), None
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, SAVED * ACCUMULATE)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            opt.step()
            scheduler.step()
            opt.zero_grad()
        if accelerator.sync_gradients and opt.optimizer.steps == SAVED and not resume:
            accelerator.save_state(folder)
            with fn.adapters.agreed_params(opt.optimizer):
                agreed = [p.detach().clone() for p in model.module.parameters()]
        if opt.optimizer.steps == STEPS:
            break
    dist.barrier()
    state = {"lr": torch.tensor(scheduler.get_last_lr()), **opt.optimizer.state_dict()}
    return SimpleNamespace(model=model.module, state=state, agreed=agreed)


def resumed_beside_whole(method: str) -> tuple[bool, list[str], bool]:
    from safetensors.torch import load_file

    folder = shared_folder()
    whole, again = trained(folder, method, resume=False), trained(folder, method, resume=True)
    differing = [name for name, x in whole.state.items() if not torch.equal(x, again.state[name])]
    ends = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    saved = load_file(f"{folder}/model.safetensors")
    names = [name for name, _ in whole.model.named_parameters()]
    of_file = all(torch.equal(saved[name], x) for name, x in zip(names, whole.agreed, strict=True))
    return all(torch.equal(a, b) for a, b in ends), differing, of_file


@two
def muloco():
    return resumed_beside_whole("muloco")


@two
def muon():
    return resumed_beside_whole("muon")


@pytest.mark.parametrize("method", sorted(PAIRS))
def test_save_state_and_load_state_continue_bit_for_bit_and_the_model_of_the_file_is_the_agreed_one(method):
    for alike, differing, of_file in two.answer(method):
        assert (alike, differing, of_file) == (True, [], True)


def learning_rates(method: str) -> tuple[list[bool], list[float], int, int]:
    """Take four steps, the second with a NaN on rank 1; return what accelerate says of each, and the rates."""
    accelerator = new_accelerator()
    model, opt = accelerate.prepare(accelerator, network(), PAIRS[method])
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(opt.optimizer, 1.0, 0.1, 12))
    skipped, rates = [opt.step_was_skipped], []
    for t in range(4):
        loss = model(torch.ones(2, 8)).square().mean()
        accelerator.backward(loss * float("nan") if t == 1 and dist.get_rank() == 1 else loss)
        opt.step()
        scheduler.step()
        opt.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    return skipped, rates, opt.optimizer.skipped, opt.optimizer.dropped


@two
def skips() -> list[Any]:
    return [learning_rates(method) for method in ("muon", "muloco")]


def test_behind_a_step_that_all_ranks_leave_out_the_scheduler_rests():
    for found in two.answer("skips"):
        skipped, rates, count, _ = found[0]
        assert skipped == [False, False, True, False, False]
        assert count == 1
        assert rates[0] == rates[1] > rates[2] > rates[3]


def test_behind_a_local_step_that_one_rank_leaves_out_learning_rates_stay_alike():
    answers = [found[1] for found in two.answer("skips")]
    assert [dropped for *_, dropped in answers] == [0, 1]
    for skipped, rates, _, _ in answers:
        assert not any(skipped)
        assert rates == answers[0][1] == sorted(set(rates), reverse=True)


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    x, y = examples().dataset.tensors
    return float((model(x) - y).square().mean())


def local_sgd(kind: Any, **options: Any) -> tuple[list[torch.Tensor], float]:
    """A loop of accelerate's LocalSGD: ten steps, averages behind every fourth and at the end."""
    accelerator = new_accelerator()
    model = network()
    loss_at_first = loss_of(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, opt, loader = accelerator.prepare(model, opt, examples())
    with kind(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True, **options) as local:
        for x, y in list(loader)[:10]:
            accelerator.backward((model(x) - y).square().mean())
            opt.step()
            opt.zero_grad()
            local.step()
    params = [p.detach().clone() for p in model.module.parameters()]
    return params, loss_of(model.module) / loss_at_first


@two
def beside_accelerates_own() -> dict[str, Any]:
    from accelerate.local_sgd import LocalSGD as Theirs

    theirs, _ = local_sgd(Theirs)
    ours, _ = local_sgd(accelerate.LocalSGD)
    nesterov = fn.chain(fn.trace(0.6, nesterov=True), fn.scale_by_learning_rate(0.9))
    with fn.ledger() as sent:
        coded, loss = local_sgd(accelerate.LocalSGD, codec=fn.int8())
    outer, loss_of_outer = local_sgd(accelerate.LocalSGD, codec=fn.int8(), outer=nesterov)
    exact, _ = local_sgd(accelerate.LocalSGD, outer=fn.scale_by_learning_rate(1.0))
    far = lambda x: max(float((a - b).abs().max()) for a, b in zip(x, theirs, strict=True))  # noqa: E731
    return {
        "same": all(map(torch.equal, theirs, ours)),
        "exact": far(exact),
        "coded": far(coded),
        "outer": far(outer),
        "loss": (loss, loss_of_outer),
        "alike": same_on_all_ranks([x.tolist() for x in (*coded, *outer, *exact)]),
        "bytes": sent.total,
    }


def test_local_sgd_is_bit_for_bit_accelerates_own_and_takes_codes_and_an_outer_optimizer():
    numbers = sum(p.numel() for p in network().parameters())
    for found in two.answer("beside_accelerates_own"):
        assert found["same"]
        assert found["alike"]
        assert found["exact"] < 1e-6
        assert 0 < found["coded"] < 0.01
        assert found["outer"] > 0.001
        assert max(found["loss"]) < 0.8
        # Three averages of a byte a number; scales and padding add less than as much again.
        assert 3 * numbers < found["bytes"] < 6 * numbers


@two
def refusals() -> dict[str, str]:
    from accelerate.utils import DistributedDataParallelKwargs

    def refused(f: Any, *args: Any, **options: Any) -> str:
        try:
            f(*args, **options)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    found = {}
    kinds = {"deepspeed": ("DEEPSPEED", "no"), "fsdp": ("FSDP", "no"), "fp16": ("MULTI_CPU", "fp16")}
    for name, (kind, precision) in kinds.items():
        stub = SimpleNamespace(distributed_type=kind, ddp_handler=None, mixed_precision=precision, device="cpu")
        found[name] = refused(accelerate.prepare, stub, network(), PAIRS["muloco"])
        found[f"local {name}"] = refused(accelerate.LocalSGD, stub, network(), 4) if name == "fp16" else ""
    accelerator = new_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    found["unused"] = refused(accelerate.prepare, accelerator, network(), PAIRS["muloco"])
    plain, model = new_accelerator(), network()
    found["torch"] = refused(accelerate.prepare, plain, model, torch.optim.SGD(model.parameters(), 0.1))
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(model.parameters(), partial(fn.muon, axis="data"), labels=fn.labels_of(model), lr=0.02)
    found["fn.Optimizer"] = refused(accelerate.prepare, plain, model, opt)
    return found


def test_what_does_not_fit_is_refused_by_name_with_the_cure():
    for found in two.answer("refusals"):
        assert found["deepspeed"].startswith("ValueError: deepspeed_plugin: expected None where fn communicates")
        assert found["fsdp"].startswith("ValueError: fsdp_plugin: expected None where fn communicates, but got FSDP")
        assert Path(__file__).parents[3].joinpath("examples", "fsdp2_muon.py").exists()
        assert "examples/fsdp2_muon.py" in found["fsdp"]
        for name in ("fp16", "local fp16"):
            assert found[name].startswith("ValueError: mixed_precision: expected 'bf16' or 'no' with local steps")
        assert found["unused"].startswith("ValueError: find_unused_parameters: expected False")
        assert found["torch"].startswith("TypeError: opt: expected an fn.Optimizer or hf.factory(...), but got SGD")
        assert found["fn.Optimizer"] == "accepted"
