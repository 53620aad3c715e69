"""`torch.distributed.checkpoint` with an optimizer as it is: every rank gets its own errors and shards back."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from test_transactions import bits, build, phases_until, same, set_gradients
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

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


def test_the_state_dicts_of_torchs_own_optimizers_are_not_to_be_had_as_the_documentation_says():
    """It also says that a step is taken where there are no gradients."""
    model = torch.nn.Linear(2, 2)
    opt = fn.Optimizer(model.parameters(), fn.adamw)
    for _ in range(2):
        with pytest.raises(KeyError, match="state"):
            get_optimizer_state_dict(model, opt)
        assert opt.steps == 1
        for p in model.parameters():
            p.grad = torch.ones_like(p)
