"""`average_gradients` with an average in place of a codec: PowerSGD behind the backward pass of DDP."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_cases import arrays, backward, same, train, wrapped
from torch import Tensor

import fn
from fn.adapters.ddp import average_gradients

pytestmark = pytest.mark.slow

case = ranks.Cases(2)
LOW_RANK = partial(fn.low_rank_average, rank=2)


@case
def refused() -> list[str]:
    model, found = wrapped(), []
    transform = fn.low_rank_average("data", 2)
    for options in (
        {},
        {"codec": fn.int4(), "average": LOW_RANK},
        {"feedback": fn.off(), "average": LOW_RANK},
        {"servers": False, "average": LOW_RANK},
        {"average": transform},
        {"average": lambda axis: fn.sign()},
    ):
        try:
            average_gradients(model, **options)
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_one_of_codec_and_average_is_demanded_by_name():
    for neither, both, feedback, servers, made, other in case.answer("refused"):
        assert neither.startswith("ValueError codec, average: expected one of both")
        assert neither.endswith("but got neither")
        assert both.endswith("but got both")
        assert feedback.startswith("ValueError feedback: ")
        assert servers.startswith("ValueError servers: ")
        assert made.startswith("TypeError average: expected a function that makes a transform")
        assert other.startswith("TypeError average: expected a transform")


def gradients(model: Any) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@case
def averaged() -> dict[str, Any]:
    """Train, save on each rank, go on; load that into another model's, which goes on alike."""
    model = wrapped()
    mean = average_gradients(model, average=LOW_RANK, schedule=fn.freeze_after(2), elements=10_000)
    own = copy.deepcopy(model.module)
    plain = torch.nn.parallel.DistributedDataParallel(own)
    backward(plain, 0)
    backward(model, 0)
    exact = max(float((a - b).abs().max()) for a, b in zip(gradients(model), gradients(plain), strict=True))
    with fn.bind({"data": dist.group.WORLD}):
        spread = [float((fn.pmean(g, "data") - g).abs().max()) for g in gradients(model)]
    model.zero_grad()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    train(model, opt, range(1, 5))
    with fn.bind({"data": dist.group.WORLD}):
        spread += [float((fn.pmean(p.detach(), "data") - p).abs().max()) for p in model.parameters()]
    other = wrapped()
    again = average_gradients(other, average=LOW_RANK, schedule=fn.freeze_after(2), elements=10_000)
    other.module.load_state_dict(model.module.state_dict())
    again.load_state_dict(mean.state_dict())
    errors = float(sum(e.abs().sum() for e in fn.tree.leaves(fn.tree.fields(mean.states, "errors"))))
    train(model, opt, range(5, 8))
    train(other, torch.optim.SGD(other.parameters(), 0.1), range(5, 8))
    ends = [arrays(list(m.parameters()), a.states) for m, a in ((model, mean), (other, again))]
    return {"exact": exact, "spread": max(spread), "ends": ends, "errors": errors, "bytes": mean.bytes}


def test_ranks_agree_and_a_saved_state_continues_bit_for_bit():
    for found in case.answer("averaged"):
        assert found["exact"] < 1e-6
        assert found["spread"] < 1e-6
        assert found["errors"] > 0
        assert found["bytes"][fn.Phase.COMPRESSED] < found["bytes"][fn.Phase.WARMUP]
        assert same(*found["ends"])
