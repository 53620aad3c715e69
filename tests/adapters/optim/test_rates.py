"""What scripts and warm-up libraries do with the numbers of param groups, and what a restart has of them."""

from __future__ import annotations

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch

import fn
from fn import tree


def twins() -> list[torch.optim.Optimizer]:
    """Return an optimizer of ours and torch's, each over a parameter of its own."""
    ours = fn.Optimizer([torch.nn.Parameter(torch.ones(3))], fn.adamw, lr=0.01, weight_decay=0.01)
    return [ours, torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.01, weight_decay=0.01)]


def step(opt: torch.optim.Optimizer, t: int) -> None:
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.linspace(-1, 1, p.numel()) + 0.1 * t
    opt.step()


def test_a_warm_up_by_hand_multiplies_the_rate_that_it_read_at_the_start():
    rates = []
    for opt in twins():
        base = [group["lr"] for group in opt.param_groups]
        for t in range(1, 7):
            for group, lr in zip(opt.param_groups, base, strict=True):
                group["lr"] = lr * min(1.0, t / 5)
            step(opt, t)
            rates.append(float(opt.param_groups[0]["lr"]))
    assert rates[:6] == rates[6:]


def test_what_is_put_back_after_it_was_refused_counts_again():
    opt, _ = twins()
    step(opt, 1)
    group = opt.param_groups[0]
    kept = dict(group)
    group.update(lr=0.5, eps=-1.0)
    with pytest.raises(ValueError, match="eps"):
        step(opt, 2)
    group.update(kept)
    before = group["params"][0].detach().clone()
    step(opt, 2)
    assert float((group["params"][0].detach() - before).abs().max()) < 0.02


def test_a_warm_up_that_dampens_in_place_the_rate_of_a_scheduler():
    """As the library pytorch_warmup does: it puts the rates back before the scheduler, and dampens them after it."""
    ends = []
    for opt in twins():
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
        kept = [group["lr"] for group in opt.param_groups]
        for t in range(8):
            for group in opt.param_groups:
                group["lr"] *= min(1.0, (t + 1) / 5)
            step(opt, t)
            for group, lr in zip(opt.param_groups, kept, strict=True):
                group["lr"] = lr
            scheduler.step()
            kept = [group["lr"] for group in opt.param_groups]
        ends.append((float(opt.param_groups[0]["lr"]), opt.param_groups[0]["params"][0].detach()))
    assert ends[0][0] == ends[1][0]
    torch.testing.assert_close(ends[0][1], ends[1][1])


@pytest.mark.parametrize("given", [{"betas": (0.9, 0.999)}, {}])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR", "StepLR"])
def test_a_restart_has_the_numbers_that_were_written_into_the_groups(scheduler, given):
    options = {"OneCycleLR": {"max_lr": 0.1, "total_steps": 30}, "StepLR": {"step_size": 1, "gamma": 0.9}}
    options["CyclicLR"] = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 6}
    if not given and scheduler != "StepLR":
        options[scheduler]["cycle_momentum"] = False

    def build():
        p = torch.nn.Parameter(torch.ones(3))
        make = partial(fn.onebit_adam, axis="data")
        opt = fn.Optimizer([p], make, schedule=fn.freeze_after(4), lr=0.01, **given)
        return opt, getattr(torch.optim.lr_scheduler, scheduler)(opt, **options[scheduler])

    def go(pair, start, end):
        for t in range(start, end):
            step(pair[0], t)
            pair[1].step()

    once, again = build(), build()
    once[0].param_groups[0]["weight_decay"] = 0.5
    go(once, 0, 9)
    file = io.BytesIO()
    torch.save((once[0].state_dict(), once[1].state_dict()), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again[0].param_groups[0]["params"][0].data.copy_(once[0].param_groups[0]["params"][0])
    again[0].load_state_dict(saved[0])
    again[1].load_state_dict(saved[1])

    def numbers(opt):
        return {k: v for k, v in copy.copy(opt.param_groups[0]).items() if k != "params"}

    assert numbers(again[0]) == numbers(once[0])
    for pair in (once, again):
        go(pair, 9, 14)
    assert torch.equal(again[0].param_groups[0]["params"][0], once[0].param_groups[0]["params"][0])
    assert all(map(torch.equal, tree.leaves(again[0].states), tree.leaves(once[0].states)))


def test_numbers_that_are_whole_stay_whole_and_flags_are_not_loaded():
    """A flag says what the state holds; a count of bits, say, is no float."""

    def make(lr, decay=0, bits=4, flag=True):
        assert isinstance(bits, int)
        return fn.adamw(lr, weight_decay=decay)

    saved, opt = (fn.Optimizer([torch.nn.Parameter(torch.ones(3))], make) for _ in range(2))
    saved.param_groups[0].update(decay=0.25, bits=8, flag=False)
    opt.load_state_dict(saved.state_dict())
    step(opt, 0)
    assert {k: opt.param_groups[0][k] for k in ("decay", "bits", "flag")} == {"decay": 0.25, "bits": 8, "flag": True}


OTHER_NUMBERS = [
    {"weight_decay": np.float32(0.25)},
    {"betas": (np.float32(0.5), 0.99)},
    {"weight_decay": torch.tensor(0.25)},
]


@pytest.mark.parametrize("given", OTHER_NUMBERS, ids=["numpy", "betas", "tensor"])
def test_numbers_of_numpy_and_0d_tensors_are_saved_and_loaded(given):
    def build(**hypers):
        p = torch.nn.Parameter(torch.ones(3))
        return fn.Optimizer([p], partial(fn.onebit_adam, axis="data"), lr=0.01, **{"betas": (0.9, 0.999), **hypers})

    saved, opt = build(**given), build()
    step(saved, 0)
    opt.load_state_dict(saved.state_dict())
    step(opt, 1)
    assert {name: opt.param_groups[0][name] for name in given} == given


def test_betas_of_a_transform_of_ones_own_are_its_own_and_are_all_restored():
    seen = []

    def make(lr, betas=(0.98, 0.92, 0.99)):
        seen.append(betas)
        return fn.adamw(lr, b1=betas[0], b2=betas[-1])

    given = (0.9, 0.8, 0.7), (0, 0, 0)
    saved, opt = (fn.Optimizer([torch.nn.Parameter(torch.ones(3))], make, betas=betas) for betas in given)
    opt.load_state_dict(saved.state_dict())
    step(opt, 0)
    assert opt.param_groups[0]["betas"] == seen[-1] == (0.9, 0.8, 0.7)


def test_a_scheduler_that_is_made_for_a_loaded_optimizer_finds_its_numbers_as_in_torch():
    def rates(make):
        found, saved = [], None
        for last in (-1, 4):
            opt = make()
            if saved is not None:
                opt.load_state_dict(saved)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=20, last_epoch=last)
            for t in range(5):
                step(opt, t)
                scheduler.step()
            saved = opt.state_dict()
            found.append((scheduler.get_last_lr(), opt.param_groups[0]["betas"]))
        return found

    make = partial(fn.onebit_adam, axis="data")
    ours = rates(lambda: fn.Optimizer([torch.nn.Parameter(torch.ones(3))], make, lr=0.3, betas=(0.9, 0.999)))
    assert ours == rates(lambda: torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.3))


@pytest.mark.parametrize("make", [fn.adamw, fn.lamb])
def test_hyper_parameters_may_be_0d_tensors(make):
    def trained(number) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(8))
        hyper = {"b1": number(0.9), "b2": number(0.99), "eps": number(1e-6), "weight_decay": number(0.1)}
        opt = fn.Optimizer([p], make, lr=0.1, **hyper)
        for i in range(3):
            p.grad = torch.full((8,), i + 1.0)
            opt.step()
        return p.detach()

    torch.testing.assert_close(trained(torch.tensor), trained(float), rtol=1e-6, atol=0.0)
