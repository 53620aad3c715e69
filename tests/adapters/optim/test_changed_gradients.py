"""Gradients that somebody changes between backward and an overlapped step: seen on the rank, and ranks stay alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_cases import Net, arrays, backward, build, same, train, wrapped
from ranks import Cases

import fn
from fn.adapters.ddp import keep_local, overlap

pytestmark = pytest.mark.slow

case = Cases(2)

MODELS: dict[str, Callable[[], Any]] = {
    "a plain module": Net,
    "DDP": wrapped,
    "DDP, buckets apart": lambda: wrapped(gradient_as_bucket_view=False),
    "DDP, views of buckets": lambda: wrapped(gradient_as_bucket_view=True),
}


def weight(model: Any) -> torch.nn.Parameter:
    return next(p for p in model.parameters() if p.ndim == 2)


@torch.no_grad()
def mask(model: Any) -> None:
    """Leave the first element as it is."""
    grad = weight(model).grad
    grad.mul_(torch.arange(grad.numel()).view_as(grad) % 2 == 0)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def of_data(model: Any) -> None:
    """As old scripts do it, behind the back of autograd's versions."""
    weight(model).grad.data.mul_(0.5)


def read(model: Any) -> None:
    """As transformers' Trainer reads the norm: by clipping to infinity, which writes what was there."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def break_it(model: Any) -> None:
    weight(model).grad.fill_(float("nan"))


CHANGES = {f.__name__: f for f in (mask, clip, of_data, break_it)}


def said(step: Callable[[], Any]) -> str:
    try:
        step()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@case
def on_one_rank() -> dict[tuple[str, str], tuple[str, bool, list]]:
    """Rank 1 changes gradients; return what was said, whether that step is the serial one, and where training ends."""
    found = {}
    for name, make in MODELS.items():
        for what, change in {**CHANGES, "read": read}.items():
            serial, ahead = make(), make()
            first, second = build(serial if name == "a plain module" else keep_local(serial)), build(ahead)
            overlap(ahead, second, least_wire_seconds=0.0)
            train(serial, first, range(5))
            train(ahead, second, range(4))
            backward(ahead, 4)
            if dist.get_rank() == 1:
                change(ahead)
            text = said(second.step)
            alike = same(*(arrays(list(m.parameters())) for m in (serial, ahead)))
            second.zero_grad()
            train(ahead, second, range(5, 8))
            found[name, what] = text, alike, [*arrays(list(ahead.parameters())), np.array(second.skipped)]
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", [*CHANGES, "read"])
def test_a_change_behind_backward_is_named_and_the_step_is_that_of_all_ranks(name, what):
    """The others have written theirs: the step is taken without the change, and the rank hears of it.

    Backward passes of a plain module do not wait for the wire. There the last codes may be of changed gradients; if
    these are not finite, all ranks refuse the step.
    """
    answers = [answer[name, what] for answer in case.answer("on_one_rank")]
    (others, own), ends = [text for text, _, _ in answers], [end for _, _, end in answers]
    assert same(*ends)
    assert all(np.isfinite(x).all() for x in ends[0])
    if what == "read":
        assert others == own == "nothing"
    else:
        assert "changed between backward and step" in own
        assert others == "nothing" or own.startswith("RanksDisagree: ")
    if name != "a plain module":
        assert all(alike for _, alike, _ in answers)
        assert others == "nothing"


@case
def where_overlap_is_off() -> dict[tuple[str, str], tuple[str, bool, list]]:
    found = {}
    for name, make in MODELS.items():
        for what in ("mask", "clip"):
            model = make()
            opt = build(model)
            running = overlap(model, opt, least_wire_seconds=3600.0)
            train(model, opt, range(4))
            before = arrays(list(model.parameters()), opt.states)
            backward(model, 4)
            if dist.get_rank() == 1:
                CHANGES[what](model)
            text = said(opt.step)
            after = arrays(list(model.parameters()), opt.states)
            opt.zero_grad()
            train(model, opt, range(5, 7))
            off = not running.is_on(fn.Phase.WARMUP) and opt.steps == 6
            found[name, what] = text, same(before, after) and off, arrays(list(model.parameters()))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["mask", "clip"])
def test_where_overlap_is_off_all_ranks_refuse_what_one_changed_and_go_on(name, what):
    answers = [answer[name, what] for answer in case.answer("where_overlap_is_off")]
    for text, unchanged, _ in answers:
        assert text.startswith("RanksDisagree: ")
        assert "changed between backward and step" in text
        assert unchanged
    assert same(answers[0][2], answers[1][2])


@case
def a_group_in_between() -> tuple[str, list]:
    model, late = Net(), torch.nn.Parameter(torch.ones(3))
    optimizer = build(model)
    overlap(model, optimizer, least_wire_seconds=0.0)
    train(model, optimizer, range(1))
    backward(model, 1)
    late.grad = torch.full((3,), 1.0 + dist.get_rank())
    optimizer.add_param_group({"params": [late]})
    return said(optimizer.step), arrays([*model.parameters(), late])


def test_a_group_that_comes_behind_backward_is_in_the_step_which_is_then_sent_as_a_whole():
    answers = case.answer("a_group_in_between")
    assert [text for text, _ in answers] == ["nothing", "nothing"]
    assert same(*(numbers for _, numbers in answers))
    assert all((numbers[-1] < 1.0).all() for _, numbers in answers)
