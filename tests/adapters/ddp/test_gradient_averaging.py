"""What fails behind the backward pass of `average_gradients` comes out of `backward` as what it is, and DDP goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_cases import arrays, backward, same, train, wrapped

import fn
from fn.adapters.ddp import average_gradients, keep_local

pytestmark = pytest.mark.slow

OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
}

case = ranks.Cases(2)


class Flaky:
    """A codec that does something, once it is told to, when it encodes the fifth tensor of a pass: amid its buckets."""

    def __init__(self) -> None:
        self.inner = fn.sign()
        self.act: Callable[[], Any] | None = None
        self.left = 0

    def codec(self) -> fn.Codec:
        return self.inner._replace(encode=self.encode, fused=None, segmented=None)

    def arm(self, act: Callable[[], Any]) -> None:
        self.act, self.left = act, 4

    def encode(self, *args: Any) -> Any:
        if self.act is not None:
            self.left -= 1
            if self.left < 0:
                act, self.act = self.act, None
                act()
        return self.inner.encode(*args)


def refuse() -> None:
    raise fn.RanksDisagree("made up", rank=1, field="a field")


def start(option: str, flaky: Flaky, **more: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = wrapped(**OPTIONS[option])
    model.module.skip_last = option == "unused"
    mean = average_gradients(model, flaky.codec(), elements=100, **more)
    return model, mean, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def caught(option: str, at: int, calm: Any, undisturbed: Any) -> dict[str, Any]:
    """Fail in a pass, catch it, and take the pass again; beside a training in which nothing failed."""
    flaky = Flaky()
    model, mean, second = start(option, flaky)
    train(model, second, range(at))
    before = arrays(mean.states), mean.steps, mean.skipped
    flaky.arm(refuse)
    found: Any = None
    try:
        backward(model, at)
    except Exception as error:
        found = error
    after = arrays(mean.states), mean.steps, mean.skipped
    second.zero_grad()
    train(model, second, range(at, 5))
    return {
        "kind": type(found).__name__,
        "what": (str(found), getattr(found, "rank", None), getattr(found, "field", None)),
        "unchanged": same(before[0], after[0]) and before[1:] == after[1:] == (at, 0),
        "ends": [arrays(list(m.parameters()), a.states) for m, a in ((calm, undisturbed), (model, mean))],
        "steps": (undisturbed.steps, mean.steps, mean.skipped),
    }


@case
def all_caught() -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for option in OPTIONS:
        calm, undisturbed, opt = start(option, Flaky())
        train(calm, opt, range(5))
        found |= {(option, at): caught(option, at, calm, undisturbed) for at in (0, 1, 3)}
    return found


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_an_error_of_all_ranks_is_raised_by_backward_as_it_is_and_the_pass_can_be_taken_again(option, at):
    for answers in case.answer("all_caught"):
        found = answers[option, at]
        assert (found["kind"], found["what"]) == ("RanksDisagree", ("made up", 1, "a field"))
        assert found["unchanged"]
        assert found["steps"] == (5, 5, 0)
        assert same(*found["ends"])


def killed(option: str, at: int) -> tuple[str, Any, bool, str]:
    """Kill rank 1 while it encodes, in a pass."""
    flaky = Flaky()
    model, mean, opt = start(option, flaky)
    train(model, opt, range(at))
    dist.barrier()
    before = arrays(mean.states), mean.steps, mean.skipped
    if dist.get_rank() == 1:
        flaky.arm(lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        backward(model, at)
    except Exception as error:
        after = arrays(mean.states), mean.steps, mean.skipped
        unchanged = same(before[0], after[0]) and before[1:] == after[1:]
        return type(error).__name__, getattr(error, "lost", None), unchanged, str(error)
    return "nothing", None, False, ""


@pytest.mark.parametrize(("option", "at"), [("plain", 0), ("unused", 2), ("static", 0), ("static", 2)])
def test_backward_names_the_rank_that_is_lost_in_it(option, at):
    found = ranks.outcomes(3, killed, option, at)
    assert found[1] == ranks.Died(-signal.SIGKILL)
    for outcome in (found[0], found[2]):
        assert isinstance(outcome, tuple), outcome
        kind, lost, unchanged, text = outcome
        assert (kind, lost, unchanged) == ("PeerLost", (1,), True), text


@case
def joined() -> tuple[int, list, list]:
    """Rank 0 has no third batch: it sends zeros, in no backward pass."""
    model = wrapped()
    mean = average_gradients(model, fn.sign(), elements=100, schedule=fn.freeze_after(9))
    with model.join():
        for t in range(2 + dist.get_rank()):
            model.zero_grad()
            backward(model, t)
    alone = keep_local(wrapped())
    backward(alone, 2)
    return mean.steps, arrays([p.grad for p in model.parameters()]), arrays([p.grad / 2 for p in alone.parameters()])


def test_a_rank_that_has_joined_takes_part_with_zeros():
    (shorter, _, _), (longer, found, expected) = case.answer("joined")
    assert (shorter, longer) == (3, 3)
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(found, expected, strict=True))


class Stuck(torch.futures.Future):
    """A future that cannot be completed, as on a device whose events fail."""

    def set_result(self, result: Any) -> None:
        raise OSError("no event")


@case
def left_open() -> str:
    model, _, opt = start("plain", Flaky())
    train(model, opt, range(1))
    plain, torch.futures.Future = torch.futures.Future, Stuck
    try:
        backward(model, 1)
    except OSError as error:
        return str(error)
    finally:
        torch.futures.Future = plain
    return "nothing"


def test_nobody_waits_for_a_bucket_that_is_left_open():
    assert case.answer("left_open") == ["no event"] * 2
