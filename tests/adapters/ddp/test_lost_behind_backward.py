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
from fn.adapters.ddp import overlap


def failed(how: str, bucket: int, at: int) -> tuple[str, Any, bool]:
    """Let rank 1 die, or only give up and stay, when it is to take the step `at` of a bucket."""
    model = wrapped()
    opt = build(model)
    overlap(model, opt, least_wire_seconds=0.0)
    train(model, opt, range(at))
    before = arrays([*model.parameters()], opt.states)
    stage = opt.stage_group

    def fail(group: int, *args: Any) -> Any:
        if group != bucket:
            return stage(group, *args)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise fn.PeerLost("made up", rank=1, axis="data", lost=())

    if dist.get_rank() == 1:
        opt.stage_group = fail
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
@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("how", ["dies", "stays"])
def test_all_others_hear_of_it_and_nothing_moves(how, bucket, at):
    found = ranks.outcomes(3, failed, how, bucket, at)
    if how == "dies":
        assert found.pop(1) == ranks.Died(-signal.SIGKILL)
    for outcome in found:
        assert isinstance(outcome, tuple), outcome
        assert outcome == ("PeerLost", (1,) if how == "dies" else (), True)
