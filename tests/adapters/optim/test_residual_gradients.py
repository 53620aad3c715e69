"""What is carried over a change of the number of ranks is added to gradients once, by a step in which ranks meet."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_transactions import bits, build, same, set_gradients

import fn
from fn.adapters.optim.gradients import restored
from fn.adapters.optim.step import commit

STEPS = 3


def trained(
    carries: bool, freeze_step: int = STEPS
) -> tuple[list[torch.nn.Parameter], fn.Optimizer, list[torch.Tensor]]:
    """Return an optimizer after a few steps, and what it carries, or what another one does."""
    params, opt = build("loco_adamw", 1, fn.freeze_after(freeze_step))
    generator = torch.Generator().manual_seed(9)
    rest = [torch.randn(p.shape, generator=generator) for p in params]
    for t in range(STEPS):
        set_gradients(params, t)
        opt.step()
    opt.residual_gradients = ([r.clone() for r in rest],) if carries else ()
    return params, opt, rest


def delivered(freeze_step: int) -> dict[str, Any]:
    params, opt, rest = trained(True, freeze_step)
    others, by_hand, _ = trained(False, freeze_step)
    residuals_in = opt.training.residuals_in
    found = {"a local step leaves it": residuals_in(fn.Phase.LOCAL) == () != residuals_in(opt.phase)}
    set_gradients(params, 50)
    if dist.get_rank() == 0:
        params[0].grad[0, 0] = float("nan")
    opt.step()
    by_hand.steps += 1
    found["a skipped step keeps it"] = opt.skipped == 1 and same(bits(opt.residual_gradients), bits((rest,)))
    again = build("loco_adamw", 1, fn.freeze_after(freeze_step))[1]
    again.load_state_dict(opt.state_dict())
    found["a state dict keeps it"] = same(bits(again.residual_gradients), bits((rest,)))
    again.load_state_dict(by_hand.state_dict())
    found["one without it removes it"] = again.residual_gradients == ()
    set_gradients(params, 51)
    set_gradients(others, 51)
    for p, r in zip(others, rest, strict=True):
        p.grad += r
    opt.step()
    by_hand.step()
    found["it is delivered"] = same(bits(params), bits(others)) and opt.residual_gradients == ()
    set_gradients(params, 52)
    set_gradients(others, 52)
    opt.step()
    by_hand.step()
    found["once"] = same(bits(params), bits(others))
    return found


def staged_ahead() -> bool:
    """Take the step as `fn.adapters.ddp.overlap` does."""
    params, opt, rest = trained(True)
    others, by_hand, _ = trained(False)
    set_gradients(params, 51)
    opt.ahead = lambda phase: ([opt.stage_group(0, phase, [p.grad for p in params])], None)
    opt.step()
    set_gradients(others, 51)
    with torch.no_grad(), by_hand.training.binding:
        grads = [p.grad + r for p, r in zip(others, rest, strict=True)]
        commit([by_hand.stage_group(0, fn.Phase.COMPRESSED, grads)], by_hand.states, [])
    return same(bits((params, opt.states)), bits((others, by_hand.states))) and opt.residual_gradients == ()


@pytest.mark.parametrize("freeze_step", [STEPS, 2 * STEPS], ids=["compressed", "warm-up"])
def test_it_waits_for_a_step_that_succeeds_and_is_delivered_once(freeze_step):
    for found in ranks.run(2, delivered, freeze_step):
        assert all(found.values()), found


def test_a_step_that_was_taken_ahead_delivers_it_too():
    assert all(ranks.run(2, staged_ahead))


def test_what_is_not_like_the_parameters_is_refused():
    groups = [{"params": [torch.ones(3), torch.ones(2)]}]
    assert restored({"carried.0.0": torch.ones(3), "carried.0.1": torch.ones(2)}, groups)[0][1].shape == (2,)
    for bad in ({"carried.0.0": torch.ones(3)}, {"carried.0.0": torch.ones(2), "carried.0.1": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"carried\.0"):
            restored(bad, groups)
