"""A rank whose data ends earlier than the others' takes fewer steps: the others say so, not only that it is gone."""

from __future__ import annotations

from functools import partial

import ranks
import torch
import torch.distributed as dist

import fn


def uneven() -> str:
    p = torch.nn.Parameter(torch.ones(3))
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([p], partial(fn.adamw, axis="data"))
    for _ in range(3 + dist.get_rank()):
        p.grad = torch.ones(3)
        opt.step()
    return "all steps were taken"


def test_a_last_batch_that_only_some_ranks_have_is_named_as_a_cause():
    first, second = ranks.outcomes(2, uneven, group_timeout=3.0)
    assert first == "all steps were taken"
    assert second.kind == "PeerLost"
    assert "if no rank failed, some had fewer batches: drop the last ones" in second.text


def phases_by_rank() -> str:
    """The compressed phase begins on each rank when it likes."""
    p, begun = torch.nn.Parameter(torch.ones(3)), {"step": 3 + dist.get_rank()}
    schedule = lambda step: fn.Phase.WARMUP if step < begun["step"] else fn.Phase.COMPRESSED  # noqa: E731
    first, begun["step"] = begun["step"], 9  # at construction, where they are compared, they are alike
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([p], partial(fn.onebit_adam, axis="data"), schedule=schedule)
    begun["step"] = first
    for step in range(5):
        p.grad = torch.full((3,), 1.0 + step + dist.get_rank())
        opt.step()
    return "all steps were taken"


def test_phases_that_differ_between_ranks_are_named_as_a_cause():
    for outcome in ranks.outcomes(2, phases_by_rank, group_timeout=3.0):
        assert outcome.kind == "PeerLost"
        assert "or they were in other phases: a schedule may depend on the step only" in outcome.text
