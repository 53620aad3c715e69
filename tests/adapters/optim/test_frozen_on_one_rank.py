"""A parameter that is frozen on one rank behind DDP's back: all ranks refuse the step, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch.distributed as dist
from ddp_cases import Net, arrays, backward, build, same, train, wrapped
from torch.nn.parallel import DistributedDataParallel

import fn
from fn.adapters.ddp import overlap

PLACES = {  # parameter, and whether there is one bucket for all
    "the last bucket": ("layers.0.weight", False),
    "the first bucket": ("layers.4.bias", False),
    "the only bucket": ("layers.2.weight", True),
}


def frozen(name: str, one_bucket: bool, at: int) -> tuple[str, Any, str, bool]:
    """Freeze a parameter on rank 1 before the step `at`; return what the step said, and whether it moved anything."""
    model = DistributedDataParallel(Net()) if one_bucket else wrapped()
    opt = build(model)
    overlap(model, opt, least_wire_seconds=0.0)
    train(model, opt, range(at))
    before = arrays(list(model.parameters()), opt.states)
    if dist.get_rank() == 1:
        model.module.get_parameter(name).requires_grad_(False)
    backward(model, at)
    try:
        opt.step()
    except fn.RanksDisagree as error:
        unchanged = same(before, arrays(list(model.parameters()), opt.states))
        return str(error), error.rank, error.field, unchanged
    return "nothing", None, "", False


@pytest.mark.parametrize("at", [0, 5])  # buckets as they were made; rearranged, in the compressed phase
@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_name_the_rank_and_the_parameter(place, at):
    """The other ranks waited for its messages until the group's timeout."""
    found = ranks.outcomes(2, frozen, *PLACES[place], at)
    for outcome in found:
        assert isinstance(outcome, tuple), outcome
        assert len(outcome) == 4, outcome
        text, rank, field, unchanged = outcome
        assert rank == 1, text
        assert field.startswith("the gradient of param group ")
        assert "absent on rank 1 and present on rank 0" in text
        assert unchanged
