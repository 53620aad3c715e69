"""A run that begins with torch's AdamW and goes on with an optimizer of fn, from AdamW's moments."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp
from fn import Phase, tree
from fn.adapters import from_adamw

SHAPES = [(5, 3), (7,), ()]
HYPER = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def network() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(params: list[torch.nn.Parameter], opt: Any, first: int, last: int, idle: int | None = None) -> None:
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 + t)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator)
            if i == idle:
                p.grad = None
        opt.step()


def distance(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


WARM = partial(fn.onebit_adam, axis="data")


@pytest.mark.parametrize("make", [fn.adamw, WARM], ids=["adamw", "warm-up of 1-bit Adam"])
@pytest.mark.parametrize("split", [False, True], ids=["one group", "other groups"])
def test_a_run_that_switches_follows_adamw(make, split):
    """In the third of the steps, when bias correction is large."""
    theirs, ours = network(), network()
    alone = torch.optim.AdamW(theirs, **HYPER)
    train(theirs, alone, 0, 12)
    adamw = torch.optim.AdamW(ours, **HYPER)
    train(ours, adamw, 0, 3)
    groups = [{"params": ours[1:][::-1]}, {"params": ours[:1]}] if split else ours
    opt = fn.Optimizer(groups, make, schedule=None if make is fn.adamw else fn.freeze_after(100), **HYPER)
    from_adamw(adamw, opt)
    assert opt.steps == 3
    train(ours, opt, 3, 12)
    assert distance(theirs, ours) < 1e-6
    assert distance(ours, network()) > 0.05


def test_a_parameter_that_began_later_takes_adamws_next_step_to_rounding():
    """torch counts its steps alone; here they are counted once, and each moment is corrected by its own count."""
    theirs, ours = network(), network()
    runs = []
    for params in (theirs, ours):
        runs.append(torch.optim.AdamW(params, **{**HYPER, "weight_decay": 0.0, "eps": 1e-12}))
        train(params, runs[-1], 0, 4, idle=1)
        train(params, runs[-1], 4, 6)
    opt = fn.Optimizer(ours, fn.adamw, **{**HYPER, "weight_decay": 0.0, "eps": 1e-12})
    from_adamw(runs[1], opt)
    (mu,) = tree.fields(opt.states, "mu")
    torch.testing.assert_close(mu[1], runs[0].state[theirs[1]]["exp_avg"] / (1 - 0.8**2))
    torch.testing.assert_close(mu[0], runs[0].state[theirs[0]]["exp_avg"] / (1 - 0.8**6))


def switched() -> dict[str, Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(6, 4))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []

    def step(opt: Any, t: int) -> None:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * t + dist.get_rank()))
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss))

    for t in range(60):
        step(adamw, t)
    opt = fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(60), lr=0.01, weight_decay=0.01)
    from_adamw(adamw, opt)
    phase = opt.phase
    for t in range(60, 120):
        step(opt, t)
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"phase": phase, "losses": losses, "params": params.tolist()}


def test_a_run_on_two_ranks_switches_to_codes_at_once():
    first, second = ranks.run(2, switched)
    assert first["phase"] is Phase.COMPRESSED
    assert first["params"] == second["params"]
    for found in (first, second):
        parts = [sum(found["losses"][i : i + 20]) / 20 for i in (0, 40, 60, 100)]
        assert parts[0] > parts[1] > parts[3]
        assert parts[2] < parts[0]


# What is refused.


def refused(build: Any, **hyper: Any) -> tuple[type, str]:
    params = network()
    adamw, opt = build(params)
    if hyper.get("steps", 1):
        train(params, adamw, 0, 1)
    before = [x.clone() for x in tree.leaves(opt.states)]
    with pytest.raises((TypeError, ValueError)) as caught:
        from_adamw(adamw, opt)
    assert all(map(torch.equal, before, tree.leaves(opt.states)))
    assert opt.steps == 0
    return caught.type, str(caught.value)


def test_what_does_not_fit_is_refused_and_nothing_is_changed():
    def of_fn(params: Any) -> fn.Optimizer:
        return fn.Optimizer(params, fn.adamw)

    def adamw(params: Any, **more: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, **more)

    kind, text = refused(lambda ps: (torch.optim.SGD(ps), of_fn(ps)))
    assert (kind, text) == (TypeError, "expected adamw to be a torch.optim.AdamW, but got SGD")
    _, text = refused(lambda ps: (adamw(ps, amsgrad=True), of_fn(ps)))
    assert text == "expected adamw without amsgrad, which no optimizer of fn has, but got amsgrad=True"
    _, text = refused(lambda ps: (adamw(ps), of_fn(ps)), steps=0)
    assert text == "expected adamw to have taken a step, but its state is empty; there is nothing to take over"
    _, text = refused(lambda ps: (adamw(ps), of_fn(ps[:2])))
    assert text.startswith("expected adamw to have the parameters of the optimizer, but 1 of its 3 with moments are no")
    _, text = refused(lambda ps: (adamw(ps), fn.Optimizer(ps, partial(fn.loco_adamw, axis="data"))))
    assert text.startswith("expected the state of param group 0 to hold one mu, nu and age of each over all param")
    assert text.endswith("run a warm-up instead, in which its moments build up")
    _, text = refused(lambda ps: (adamw(ps), fn.Optimizer(ps, partial(fn.zero_one_adam, axis="data"))))
    assert "it holds 1 first moments and 1 pairs of ages, or parts of tensors, or each rank's own" in text
    several = lambda ps: [{"params": ps[:1], "betas": (0.5, 0.9)}, {"params": ps[1:]}]  # noqa: E731
    _, text = refused(lambda ps: (adamw(several(ps)), of_fn(ps)))
    assert text == "expected adamw to have the same betas for all of param group 0, but got several"
