"""Gradients that are not each rank's own, or not any more: noticed in the first warm-up step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ddp_cases import Net, backward, build, wrapped
from ranks import Cases

import fn
from fn.adapters.ddp import keep_local

case = Cases(2)


def said(make: Callable[[], torch.nn.Module], clip: float | None = None, of=build, **options) -> list[list[str]]:
    """Take two warm-up steps; return what each warned of."""
    model, found = make(), []
    opt = of(model, **options)
    for t in range(2):
        backward(model, t, scale=100.0)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        opt.zero_grad()
        found.append([str(w.message) for w in caught if str(w.message).startswith("gradients: ")])
        assert all(w.filename == __file__ for w in caught)
    return found


@case
def warned() -> dict[str, list[list[str]]]:
    return {
        "plain DDP": said(wrapped),
        "on purpose": said(wrapped, refuse_averaged=False),
        "local": said(lambda: keep_local(wrapped())),
        "no DDP": said(Net),
        "clipped": said(Net, 1.0),
        "clipped, by DDP's mean": said(wrapped, 1.0),
        "clipped in vain": said(Net, 1e9),
        "max_norm": said(Net, max_norm=1.0),
    }


@case
def exact() -> dict[str, list[list[str]]]:
    """What optimizers say that average exactly in every step, or, without an axis, not at all."""
    found = {}
    for name, method in {"adamw": fn.adamw, "muon": fn.muon, "lamb": fn.lamb}.items():
        found[f"averaged, {name}"] = said(wrapped, of=exactly(method))
        found[f"clipped, {name}"] = said(lambda: keep_local(wrapped()), 1.0, of=exactly(method))
        found[f"local, {name}"] = said(lambda: keep_local(wrapped()), of=exactly(method))
        found[f"no axis, {name}"] = said(wrapped, of=exactly(method, axis=None))
    # A step late, rounds average gradients.
    of = exactly(fn.late(fn.adamw), schedule=fn.every(1, delay=1))
    found["clipped, late"] = said(lambda: keep_local(wrapped()), 1.0, of=of)
    found["local, late"] = said(lambda: keep_local(wrapped()), of=of)
    return found


def exactly(method: Callable[..., fn.Transform], axis: str | None = "data", **options) -> Callable[..., fn.Optimizer]:
    def make(model: torch.nn.Module) -> fn.Optimizer:
        with fn.bind({"data": torch.distributed.group.WORLD}):
            return fn.Optimizer(model.parameters(), partial(method, axis=axis), **options)

    return make


@pytest.mark.parametrize("what", ["plain DDP", "clipped, by DDP's mean"])
def test_a_ddp_that_was_not_kept_local_is_warned_of_in_the_first_warm_up_step(what):
    """It was noticed at the first compressed step only, which may be days later."""
    for found in case.answer("warned"):
        ((first,), second) = found[what]
        assert "averaged already" in first
        assert "keep_local" in first
        assert second == []


def test_clipping_by_the_norm_of_one_rank_is_warned_of():
    """Nobody said so: the mean was that of vectors which all had the norm that was asked for."""
    for found in case.answer("warned"):
        ((first,), second) = found["clipped"]
        assert first.startswith("gradients: have the norm 1 on all ranks of 'data', although they differ")
        assert "max_norm" in first
        assert second == []


@pytest.mark.parametrize("what", ["on purpose", "local", "no DDP", "clipped in vain", "max_norm"])
def test_what_is_as_it_should_be_says_nothing(what):
    assert all(found[what] == [[], []] for found in case.answer("warned"))


@pytest.mark.parametrize("name", ["adamw", "muon", "lamb"])
def test_an_exact_optimizer_says_so_too(name):
    """The bytes of a second mean are lost, and a clip by each rank's own norm gives another mean."""
    for found in case.answer("exact"):
        ((averaged,), second), ((clipped,), _) = found[f"averaged, {name}"], found[f"clipped, {name}"]
        assert "averaged already" in averaged
        assert "compressed step" not in averaged
        assert second == []
        assert "clipped by a norm of its own" in clipped
        assert "max_norm" in clipped
        assert found[f"local, {name}"] == found[f"no axis, {name}"] == [[], []]


def test_clipping_by_the_norm_of_one_rank_is_warned_of_a_step_late():
    for found in case.answer("exact"):
        (clipped,), second = found["clipped, late"]
        assert "clipped by a norm of its own" in clipped
        assert second == []
        assert found["local, late"] == [[], []]
