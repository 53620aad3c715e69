"""The recipe of docs/reliability.md: a model's state dict in `extra`, loaded into the model behind the optimizer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from test_transactions import bits, same
from torch.utils._python_dispatch import TorchDispatchMode

import fn
from fn import Phase
from fn.adapters import checkpoint

LOCALLY = [Phase.WARMUP, Phase.COMPRESSED, *[Phase.LOCAL] * 9].__getitem__
METHODS: dict[str, tuple[Any, Any]] = {
    "diloco": (partial(fn.diloco, axis="data", codec=fn.int8()), fn.every(8, start=1)),
    "zero_one_adam": (partial(fn.zero_one_adam, axis="data"), LOCALLY),
    "onebit_adam": (partial(fn.onebit_adam, axis="data"), fn.freeze_after(1)),
    "adamw without an axis": (fn.adamw, None),
}
STEPS = 5  # of every method, whose params differ between ranks behind it if the method lets them


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))


def optimizer(model: torch.nn.Module, method: str) -> fn.Optimizer:
    make, schedule = METHODS[method]
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(model.parameters(), make, schedule=schedule, lr=0.02)


def trained(method: str, steps: int = STEPS) -> tuple[torch.nn.Module, fn.Optimizer]:
    """Train a model on data of each rank's own; without an axis on the same data, with other running statistics."""
    model = network()
    opt = optimizer(model, method)
    rank = 0 if method.startswith("adamw") else dist.get_rank()
    for step in range(steps):
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        model[1].running_mean += dist.get_rank()  # type: ignore[operator]
    return model, opt


def saved(folder: str) -> dict[str, Any]:
    """Save by the recipe."""
    found = {}
    for method in METHODS:
        model, opt = trained(method)
        checkpoint.save(f"{folder}/{method}", opt, {"model": model.state_dict()})
        found[method] = {name: x.clone() for name, x in model.state_dict().items()}
    return found


def loaded(folder: str) -> dict[str, Any]:
    """Load by the recipe; also return what the optimizer alone had loaded."""
    found = {}
    for method in METHODS:
        model = network()
        opt = optimizer(model, method)
        extra = checkpoint.load(f"{folder}/{method}", opt, {"model": model.state_dict()})
        alone = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(extra["model"])
        found[method] = alone, dict(model.state_dict())
    return found


@pytest.mark.slow
def test_what_the_recipe_loads_last_agrees_with_the_optimizer_on_any_number_of_ranks(tmp_path):
    before = run(2, saved, str(tmp_path))
    for name in ("diloco", "zero_one_adam"):
        assert not torch.equal(before[0][name]["0.weight"], before[1][name]["0.weight"])
    for world in (1, 2, 3):
        for rank, found in enumerate(run(world, loaded, str(tmp_path))):
            for method, (alone, whole) in found.items():
                assert all(torch.equal(whole[name], p) for name, p in alone.items()), (world, method)
                for name, x in whole.items():
                    rows = torch.stack([ranks[method][name] for ranks in before])
                    want = rows[rank] if world == 2 else rows.double().mean(0).to(x.dtype)
                    assert torch.equal(x, want), (world, method, name)


def gathered(method: str, steps: int) -> str:
    _, opt = trained(method, steps)
    try:
        checkpoint.gather(opt)
    except fn.RanksDisagree as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "synchronised"), [("diloco", 9), ("zero_one_adam", 2)])
def test_gather_refuses_params_of_each_ranks_own_which_the_model_of_rank_0_does_not_have(method, synchronised):
    first, second = run(2, gathered, method, STEPS)
    assert first == second
    assert first.startswith("ranks disagree: params.0.0 is torch.float32 (5, 6) with checksum ")
    assert "; gather behind a step that makes them the same, if the method has one, or call checkpoint.save" in first
    assert run(2, gathered, method, synchronised) == ["", ""]


def test_leaves_of_one_path_are_refused_instead_of_saved_once_for_both(tmp_path):
    opt = fn.Optimizer([torch.nn.Parameter(torch.ones(3))], fn.adamw)
    x, y = torch.zeros(2), torch.ones(2)
    text = "extra: expected a path of its own for every leaf, but got two leaves at {}; give it dicts with strings"
    trees: dict[str, Any] = {"'a.b'": {"a.b": x, "a": {"b": y}}, "'1'": {"1": x, 1: y}, "'a.0'": {"a": [x], "a.0": y}}
    for path, extra in trees.items():
        for act in (checkpoint.save, checkpoint.save_async, checkpoint.load):
            with pytest.raises(ValueError, match=text.format(path)):
                act(tmp_path, opt, extra)
    assert list(tmp_path.iterdir()) == []


class Interrupts(TorchDispatchMode):
    """Send Ctrl-C before an operation of torch, counted from 0."""

    def __init__(self, number: int):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            signal.raise_signal(signal.SIGINT)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs in the background ignore it
    yield
    signal.signal(signal.SIGINT, before)


def alone(steps: int) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
    opt = fn.Optimizer(params, fn.adamw, lr=0.1)
    for _ in range(steps):
        for p in params:
            p.grad = p.detach() * 0.5
        opt.step()
    return params, opt


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_load_leaves_one_checkpoint_or_the_other_or_an_optimizer_that_refuses_until_it_is_loaded(tmp_path):
    params, opt = alone(2)
    checkpoint.save(tmp_path, opt)
    new = bits((params, opt.states))
    ends = []
    while not ends or ends[-1] != "whole":
        params, opt = alone(5)
        old = bits((params, opt.states))
        interrupts = Interrupts(len(ends))
        try:
            with interrupts:
                checkpoint.load(tmp_path, opt)
        except KeyboardInterrupt:
            pass
        if opt.refused:
            for act in (opt.step, partial(checkpoint.save, tmp_path, opt)):
                with pytest.raises(RuntimeError, match="half of one step"):
                    act()
            checkpoint.load(tmp_path, opt)
            ends.append("torn")
        else:
            ends.append("old" if opt.steps == 5 else "whole" if interrupts.left >= 0 else "new")
        assert same(bits((params, opt.states)), old if ends[-1] == "old" else new), f"operation {len(ends) - 1}"
    assert {"old", "torn", "whole"} <= {*ends}


def from_another_folder(folder: str) -> str:
    """Save in the background under a relative path, and leave the folder before all ranks save."""
    os.chdir(folder)
    params = [torch.nn.Parameter(torch.ones(3))]
    group = dist.new_group(backend="gloo")
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, partial(fn.adamw, axis="data"))
    save: Callable[[], Any] = partial(checkpoint.save_async, "run", opt, group=group)
    if dist.get_rank() == 0:
        future = save()  # waits for the other rank
        os.chdir("/")
        dist.barrier()
    else:
        dist.barrier()
        future = save()
    return str(future.result())


def test_a_relative_folder_of_an_async_save_is_where_the_process_was(tmp_path: Path):
    done = str(tmp_path / "run" / "step-000000000000-0")
    assert run(2, from_another_folder, str(tmp_path)) == [done, done]
