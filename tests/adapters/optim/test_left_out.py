"""Exchanges and local steps that are left out again and again: counted, and warned of now and then."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import chains
import pytest
import torch

import fn
from fn import tree


def step(opt: fn.Optimizer, params: list[Any], value: float = 1.0) -> list[str]:
    """Take a step from gradients of one value; return the warnings."""
    for p in params:
        p.grad = torch.full_like(p, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return [str(w.message) for w in caught]


def never_exchanging(h: int, delay: int = 0, **hyper: Any) -> tuple[fn.Optimizer, list[Any]]:
    """Return an optimizer whose outer steps overflow."""
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    make = partial(chains.diloco, axis="data", outer_lr=3e38, outer_momentum=0.0, weight_decay=0.0, **hyper)
    parts = hyper.get("fragments", 1)
    return fn.Optimizer(params, make, schedule=fn.every(h, delay=delay, fragments=parts), lr=100.0), params


@pytest.mark.parametrize(("h", "delay", "on_skip"), [(1, 0, "keep"), (2, 1, "keep"), (2, 0, "anchor")])
def test_exchanges_that_are_left_out_are_counted_and_warned_of(h, delay, on_skip):
    opt, params = never_exchanging(h, delay, on_skip=on_skip)
    found = [(n, *texts) for n in range(1, 17 * h) if (texts := step(opt, params))]
    assert [n for n, *_ in found] == [5 * h, 16 * h]
    assert found[0][1].startswith("exchanges: the last 5 of fragment 0 were left out, and its anchor rests")
    assert (opt.skipped, opt.dropped) == (16, 0)
    (anchor,) = tree.fields(opt.states, "anchor")
    assert all(bool((x == 1).all()) for x in anchor)


def test_a_fragment_that_is_never_exchanged_is_warned_of_beside_one_that_is():
    opt, params = never_exchanging(2, fragments=2)
    with torch.no_grad():
        params[1].fill_(0.0)
    texts = []
    for _ in range(10):
        for p, value in zip(params, (1.0, 0.0), strict=True):
            p.grad = torch.full_like(p, value)
        with torch.no_grad():
            params[1].data.fill_(1.0)  # where its anchor is: no difference
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        texts += [str(w.message) for w in caught]
    assert [text.partition(" were")[0] for text in texts] == ["exchanges: the last 5 of fragment 0"]
    assert opt.skipped == 5


@pytest.mark.parametrize("make", [fn.diloco, fn.muloco])
def test_local_steps_that_are_all_dropped_are_counted_and_warned_of(make):
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    opt = fn.Optimizer(params, partial(make, axis="data"), schedule=fn.every(4), lr=0.01)
    found = [(n, *texts) for n in range(1, 17) if (texts := step(opt, params, math.nan))]
    assert [n for n, *_ in found] == [8, 16]  # the exchanges that follow the fifth and the sixteenth of them
    wanted = "local steps: the last 8 were left out by rank 0, which moves in exchanges only; not finite: the gradient"
    assert found[0][1].startswith(wanted)
    assert (opt.skipped, opt.dropped) == (0, 16)
    assert not step(opt, params)
    assert not any(step(opt, params, math.nan) for _ in range(6))


def test_a_store_that_does_not_hold_the_params_is_refused_at_init():
    tx = partial(chains.diloco, axis="data", store=torch.float16)
    with pytest.raises(ValueError, match=r"^store: expected a dtype that holds the params, .* leaf '1' overflows"):
        fn.Optimizer([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.full((2,), 1e5))], tx)
    tx().init([torch.full((2,), 6e4)])


def test_an_anchor_that_overflows_later_is_left_out_and_stays_finite():
    for warm in (0, 100):
        param = torch.nn.Parameter(torch.full((4,), 6.5e4))
        given = {"outer_lr": 1.0, "outer_momentum": 0.0, "weight_decay": 0.0, "store": torch.float16}
        make = partial(chains.diloco, axis="data", **given)
        opt = fn.Optimizer([param], make, schedule=fn.every(1, start=warm), lr=1e3)
        texts = [text for _ in range(5) for text in step(opt, [param], -1.0)]
        assert len(texts) == 1
        assert opt.skipped == 5
        (anchor,) = tree.fields(opt.states, "anchor")
        assert all(bool(x.isfinite().all()) for x in anchor)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_param_group_that_joins_between_begin_and_end_keeps_its_local_steps(alpha):
    param, late = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    make = partial(chains.diloco, axis="data", alpha=alpha)
    opt = fn.Optimizer([param], make, schedule=fn.every(4, delay=2), lr=0.1)
    for _ in range(2):
        step(opt, [param])
    opt.add_param_group({"params": [late]})
    for n in range(2, 8):
        before = late.detach().clone()
        step(opt, [param, late])
        anchors = tree.fields(opt.states, "anchor")
        if n == 3:
            assert bool((late < before).all())
            assert bool((anchors[1][0] == 1).all())
    assert bool((anchors[1][0] < 1).all())
