"""Elements that rounding alone moves, as the biases of keys: one bit gives them the scale of their tensor."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn.adapters import ddp

WARM_UP = 20
case = ranks.Cases(2)


def trained(take, **options) -> tuple[list[str], float, float]:
    """Train torch's own attention; return what was warned of, its largest step in learning rates, and the last loss."""
    torch.manual_seed(0)
    attention = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opt, bias, most = take(attention, **options), attention.self_attn.in_proj_bias, 0.0
        for t in range(WARM_UP + 20):
            x = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(2 * t + dist.get_rank()))
            loss = (attention(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            before = bias.detach().clone()
            opt.step()
            most = max(most, float((bias.detach() - before).abs().max()) / opt.param_groups[0]["lr"])
            opt.zero_grad()
    return [str(w.message) for w in said if str(w.message).startswith("eps: ")], most, float(loss)


def serial(model: torch.nn.Module, **options) -> fn.Optimizer:
    with fn.bind({"data": dist.group.WORLD}):
        make = partial(fn.onebit_adam, axis="data", max_step=None)
        return fn.Optimizer(model.named_parameters(), make, schedule=fn.freeze_after(WARM_UP), **options)


def overlapped(model: torch.nn.Module, **options) -> fn.Optimizer:
    opt = serial(model, **options)
    ddp.overlap(model, opt, least_wire_seconds=0.0)
    return opt


@case
def by_default():
    return trained(serial)


@case
def behind_backward():
    return trained(overlapped)


@case
def with_the_eps_that_is_named():
    said, _, _ = trained(serial)
    eps = float(said[0].split("eps=")[1].split(",")[0]) if said else 0.0  # rank 0 has been told
    told = torch.tensor(eps)
    dist.broadcast(told, 0)
    return trained(serial, eps=float(told))


@case
def clamped():
    return trained(lambda model: serial_with(model, fn.freeze_after(WARM_UP)))


@case
def in_the_warm_up_only():
    return trained(lambda model: serial_with(model, fn.freeze_after(1000)))


def serial_with(model: torch.nn.Module, schedule: fn.Schedule) -> fn.Optimizer:
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"), schedule=schedule)


@pytest.mark.parametrize("how", ["by_default", "behind_backward"])
def test_biases_of_keys_are_warned_of_once_on_rank_0(how):
    """They moved by thousands of learning rates in a step, and nobody said so: the loss hardly sees them."""
    (said, far, _), (said_on_1, _, _) = case.answer(how)
    assert len(said) == 1, said
    assert "elements of parameter self_attn.in_proj_bias" in said[0]
    assert "eps=" in said[0]
    assert said_on_1 == []
    assert far > 1000.0


def test_the_eps_that_is_named_keeps_its_word():
    (said, far, _), _ = case.answer("with_the_eps_that_is_named")
    assert said == []
    assert far < 300.0


def test_what_is_clamped_does_not_jump_and_says_nothing():
    (said, far, _), _ = case.answer("clamped")
    assert said == []
    assert far < 100.0


def test_a_warm_up_says_nothing():
    (said, far, _), _ = case.answer("in_the_warm_up_only")
    assert said == []
    assert far < 100.0


def test_a_state_of_the_warm_up_that_is_loaded_after_it_is_looked_at_in_its_turn():
    p = torch.nn.Parameter(torch.zeros(4))
    make = partial(fn.onebit_adam, axis="data", max_step=None)
    opt = fn.Optimizer([p], make, schedule=fn.freeze_after(2))
    p.grad = torch.ones(4)
    for _ in range(2):
        opt.step()
    saved = {path: x.clone() for path, x in opt.state_dict().items()}
    opt.step()
    saved["state.0.inner.1.nu.0"][0] = 1e-20
    opt.load_state_dict(saved)
    with pytest.warns(UserWarning, match="eps: too small for the second moment of 1 of 4 elements"):
        opt.step()
