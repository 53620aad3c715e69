"""What has no gradient stays, in the parameters and in what the state keeps of them, and the ranks stay alike."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn import Phase
from fn.adapters.ddp import overlap

STEPS = [Phase.WARMUP] * 4 + [Phase.LOCAL, Phase.LOCAL, Phase.COMPRESSED] * 6
"""A step of these synchronises if its number is divisible by three."""


def train(make: Any, schedule: Any, out: range, ahead: bool = False, dtype: torch.dtype = torch.float32) -> list:
    """Train three parameters, the second without gradients in steps `out`, the last in all up to their end.

    Returns: the parameters after every step.
    """
    params = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in (5, 6, 3)]
    model = torch.nn.ParameterList(params)
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, partial(make, axis="data"), schedule=schedule, lr=0.05, weight_decay=0.1)
    if ahead:
        overlap(model, opt, least_wire_seconds=0.0)
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for t in range(len(STEPS)):
        noise = [torch.randn(p.shape, generator=generator).to(dtype) for p in params]
        absent = {1} if t in out else set()
        absent |= {2} if t < out.stop else set()
        sum((p * g).sum() for i, (p, g) in enumerate(zip(params, noise, strict=True)) if i not in absent).backward()
        opt.step()
        opt.zero_grad()
        found.append([p.detach().clone() for p in params])
    return found


LOCO = partial(fn.loco_adamw, codec=fn.identity(), feedback=fn.off())


def cases() -> dict[Any, list]:
    schedule, after = STEPS.__getitem__, fn.freeze_after(2)
    found: dict[Any, list] = {
        (first, ahead): train(fn.zero_one_adam, schedule, range(first, 16), ahead)
        for first in (5, 6, 7, 8)
        for ahead in (False, True)
    }
    for name, make in {"loco": LOCO, "onebit": fn.sharded_onebit_adam}.items():
        for layout in ("flat", "fused", "per_tensor"):
            for master in (True, False):
                kind = partial(make, master=master, layout=layout)
                found[name, layout, master] = train(kind, after, range(4, 16))
    found["loco", "bf16"] = train(LOCO, after, range(4, 16), dtype=torch.bfloat16)
    return found


@cache
def answers() -> list[dict[Any, list]]:
    return ranks.run(2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("first", [5, 6, 7, 8])
def test_ranks_of_zero_one_adam_agree_on_what_lost_its_gradient_between_synchronisations(first, ahead):
    """It moved alone in local steps, and was then held in the synchronising one: the ranks differed for good."""
    one, other = (rank[first, ahead] for rank in answers())
    for t in (6, 9, 12, 15, 18, 21):
        torch.testing.assert_close(one[t], other[t], rtol=1e-6, atol=1e-6)
    assert not torch.equal(one[5][0], other[5][0])
    assert torch.equal(one[9][1], one[15][1])  # from the synchronisation after the last gradient on
    assert not torch.equal(one[15][1], one[18][1])


def test_weight_decay_does_not_wait_in_the_anchor_for_the_first_gradient():
    """The anchor shrank under the parameter that stayed, which then jumped to it by 12 local steps' decay at once."""
    (rank, _) = answers()
    for found in (rank[8, False], rank[8, True]):
        assert torch.equal(found[15][2], torch.ones(3))
        assert (found[18][2] > 1 - 0.05 * 0.1 * 3.01).all()  # the decay of the steps since the last synchronisation


@pytest.mark.parametrize("layout", ["flat", "fused", "per_tensor"])
@pytest.mark.parametrize("name", ["loco", "onebit"])
def test_a_master_copy_stays_with_its_parameter(name, layout):
    """It went on by its momentum and decay: with one, parameters jumped at their first gradient, without one not."""
    for rank in answers():
        for with_master, without in zip(rank[name, layout, True], rank[name, layout, False], strict=True):
            torch.testing.assert_close(with_master, without, rtol=1e-5, atol=1e-6)


def test_in_half_precision_too_where_a_master_copy_is_the_default():
    for rank in answers():
        before, after = (rank["loco", "bf16"][t][2].float() for t in (15, 16))
        assert torch.equal(before, torch.ones(3))
        assert (after - before).abs().max() < 4 * 0.05
        stayed, moved = (rank["loco", "bf16"][t][1].float() for t in (15, 16))
        assert (moved - stayed).abs().max() < 0.06


def test_a_step_stays_in_place_and_leaves_what_has_no_gradient():
    """One parameter without a gradient took the whole step out of place, at several times its time."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (5, 6)]
    opt = fn.Optimizer(params, fn.adamw, lr=0.1, weight_decay=0.1)
    with in_place_steps.listed() as in_place:
        for _ in range(3):
            params[0].grad = torch.ones(5)
            opt.step()
    assert all(in_place)
    assert torch.equal(params[1], torch.ones(6))
    assert (params[0] < 1).all()
