"""A rank that is lost while an optimizer communicates behind the backward pass."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from ddp_cases import arrays, backward, build, same, train, wrapped

import fn
from fn.adapters.ddp import overlap, overlapped


def failed(how: str, at: int) -> tuple[str, Any, bool]:
    """Let rank 1 die, or only give up and stay, when it is to take the step `at` of the second unit."""
    model = wrapped()
    opt = build(model)
    overlap(model, opt, least_wire_seconds=0.0)
    train(model, opt, range(at))
    before = arrays([*model.parameters()], opt.states)
    stage = overlapped.stage_group

    def fail(core: Any, unit: int, *args: Any) -> Any:
        if unit != 1:
            return stage(core, unit, *args)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise fn.PeerLost("made up", rank=1, axis="data", lost=())

    if dist.get_rank() == 1:
        overlapped.stage_group = fail
    dist.barrier()
    try:
        backward(model, at)
        opt.step()
    except Exception as error:
        unchanged = same(before, arrays([*model.parameters()], opt.states))
        ranks.stay(2 if how == "dies" else 3)  # who noticed only the end of rank 1 would name it
        return type(error).__name__, getattr(error, "lost", None), unchanged
    return "nothing", None, False


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 4])  # while connections open; in the compressed phase
@pytest.mark.parametrize("how", ["dies", "stays"])
def test_all_others_hear_of_it_and_nothing_moves(how, at):
    found = ranks.outcomes(3, failed, how, at)
    if how == "dies":
        assert found.pop(1) == ranks.Died(-signal.SIGKILL)
    for outcome in found:
        assert isinstance(outcome, tuple), outcome
        assert outcome == ("PeerLost", (1,) if how == "dies" else (), True)
