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
