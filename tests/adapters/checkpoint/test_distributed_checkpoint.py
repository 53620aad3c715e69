"""`torch.distributed.checkpoint` with an optimizer as it is: every rank gets its own errors and shards back.

Torch's readers of optimizers, `get_optimizer_state_dict` say, are for `fn.adapters.torch_optimizer`: its tests are in
test_torch_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from test_transactions import bits, build, phases_until, same, set_gradients
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import fn
from fn import Phase


def continued(folder: str, name: str, phase: Phase) -> list[str]:
    """Save before a step of a phase, go on, load into another optimizer, go on; return what differs."""
    asked = [*phases_until(phase)[:3], *[phase] * 2, *phases_until(phase)[-1:] * 2]
    params, opt = build(name, 2, asked.__getitem__)
    for t in range(3):
        set_gradients(params, t)
        opt.step()
    dcp.save({"opt": opt, "params": dict(enumerate(params))}, checkpoint_id=f"{folder}/{name}-{phase.value}")
    others, again = build(name, 2, asked.__getitem__)
    set_gradients(others, 50)
    again.step()  # a state that is nowhere near
    read: dict[str, Any] = {"opt": again, "params": {i: torch.zeros_like(p) for i, p in enumerate(params)}}
    dcp.load(read, checkpoint_id=f"{folder}/{name}-{phase.value}")
    for i, p in enumerate(others):
        p.data.copy_(read["params"][i])
    wrong = []
    for t in range(3, len(asked)):
        if not same(bits(opt.states), bits(again.states)) or opt.steps != again.steps:
            wrong.append(f"before step {t} it differs")
        for own, o in ((params, opt), (others, again)):
            set_gradients(own, t)
            o.step()
    return wrong


def everything(folder: str) -> dict[str, list[str]]:
    return {name: continued(folder, name, Phase.COMPRESSED) for name in ("zero_one_adam", "sharded_onebit_adam")}


@pytest.mark.slow
def test_every_rank_gets_its_own_errors_back(tmp_path):
    for found in ranks.run(2, everything, str(tmp_path)):
        assert found == {"zero_one_adam": [], "sharded_onebit_adam": []}


def written(folder: str) -> None:
    params, opt = build("onebit_adam", 1, fn.freeze_after(1))
    for t in range(3):
        set_gradients(params, t)
        opt.step()
    dcp.save({"opt": opt}, checkpoint_id=folder)


def read_elsewhere(folder: str) -> str:
    _, opt = build("onebit_adam", 1, fn.freeze_after(1))
    try:
        dcp.load({"opt": opt}, checkpoint_id=folder)
    except BaseException as error:  # torch's is no Exception
        return str(error)
    return "nothing raised"


def test_another_number_of_ranks_misses_its_errors_by_name(tmp_path):
    ranks.run(2, written, str(tmp_path))
    for text in ranks.run(3, read_elsewhere, str(tmp_path)):
        assert "Missing key in checkpoint state_dict: opt.rank 0 of 3.state.0" in text


def two_ranks_in_one() -> str:
    _, opt = build("onebit_adam", 1, fn.freeze_after(1))
    saved = opt.state_dict()
    own = next(iter(path for path in saved if path.startswith("rank 0 of 1.")))
    try:
        opt.load_state_dict({**saved, own.replace("rank 0 of 1", "rank 1 of 2"): saved[own]})
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_what_several_ranks_own_is_refused():
    (text,) = ranks.run(1, two_ranks_in_one)
    assert "expected the errors of one rank, or of one world, but got those of rank 0 of 1, rank 1 of 2" in text


def readers(model: torch.nn.Module, opt: fn.Optimizer) -> dict[str, Callable[[], Any]]:
    """Torch's functions that want "state" and "param_groups", with what they would be given."""
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adamw.step()
    adamw.zero_grad()
    flat, layout = opt.state_dict(), state_dict.get_optimizer_state_dict(model, adamw)
    flattened = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    of_model = model.state_dict()
    return {
        "get_optimizer_state_dict": lambda: state_dict.get_optimizer_state_dict(model, opt),
        "flattened": lambda: state_dict.get_optimizer_state_dict(model, opt, options=flattened),
        "get_state_dict": lambda: state_dict.get_state_dict(model, opt),
        "of two": lambda: state_dict.get_state_dict(model, [opt, adamw]),
        "set_optimizer_state_dict": lambda: state_dict.set_optimizer_state_dict(model, opt, optim_state_dict=layout),
        "flat": lambda: state_dict.set_optimizer_state_dict(model, opt, optim_state_dict=flat),
        "set_state_dict": lambda: state_dict.set_state_dict(
            model, opt, model_state_dict=of_model, optim_state_dict=layout
        ),
        "FSDP": lambda: FullyShardedDataParallel.optim_state_dict(model, opt),
        "load_state_dict": lambda: opt.load_state_dict(layout),
    }


NAMES = [*readers(torch.nn.Linear(2, 2), fn.Optimizer([torch.nn.Parameter(torch.ones(1))], fn.adamw))]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_readers_of_optimizers_are_refused_with_the_cure_and_take_no_step(name, stepped):
    model = torch.nn.Linear(2, 2)
    opt = fn.Optimizer(model.parameters(), fn.adamw)
    reader = readers(model, opt)[name]
    if stepped:
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
    before = bits(opt.states), [p.detach().clone() for p in model.parameters()], opt.steps
    with pytest.raises((NotImplementedError, ValueError), match=r"fn\.adapters\.checkpoint"):
        reader()
    assert same(bits(opt.states), before[0])
    assert all(map(torch.equal, model.parameters(), before[1]))
    assert opt.steps == before[2] == stepped
    assert len(opt.state) == 0
    assert not opt.state
    assert type(opt.state_dict()) is dict
