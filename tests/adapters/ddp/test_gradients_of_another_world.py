"""The errors of `average_gradients` on another number of ranks: what was not delivered is delivered there."""

from __future__ import annotations

import logging
import tracemalloc
from functools import partial
from typing import Any

import pytest
import ranks
import torch
from ddp_cases import backward, wrapped

import fn
from fn.adapters.ddp import average_gradients

pytestmark = pytest.mark.slow

AVERAGES: dict[str, dict[str, Any]] = {
    "int8": {"codec": fn.int8(), "feedback": fn.classic()},
    "signs": {"codec": fn.sign(16), "feedback": fn.classic()},
    "no servers": {"codec": fn.int8(), "feedback": fn.classic(), "servers": False},
    "low rank": {"average": partial(fn.low_rank_average, rank=2)},
}
SILENT = {"int8": 8, "signs": 120, "no servers": 8, "low rank": 40}
"""Backward passes with gradients of zero, in which what is left of the errors is delivered."""


def delivered(model: Any, name: str) -> list[float]:
    """Return the sum of what zero gradients deliver, number by number."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(SILENT[name]):
        model.zero_grad()
        (model(torch.ones(2, 12)) * 0.0).sum().backward()
        for t, p in zip(total, model.parameters(), strict=True):
            t += p.grad
    return torch.cat([t.flatten() for t in total]).tolist()


def trained_with(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model after four backward passes, its average, and what that saves."""
    model = wrapped()
    mean = average_gradients(model, **AVERAGES[name], elements=300)
    for step in range(4):
        backward(model, step)
    return model, mean, {path: x.numpy() for path, x in mean.state_dict().items()}


def save(name: str) -> dict[str, Any]:
    return trained_with(name)[2]


def train(name: str) -> tuple[dict[str, Any], list[float]]:
    model, _mean, saved = trained_with(name)  # the average lives on while its model is asked
    return saved, delivered(model, name)


def resume(name: str, saved: dict[str, Any]) -> tuple[int, list[float]]:
    model = wrapped()
    mean = average_gradients(model, **AVERAGES[name], elements=300)
    mean.load_state_dict({path: torch.as_tensor(x) for path, x in saved.items()})
    return mean.steps, delivered(model, name)


def all_trained(names: list[str]) -> dict[str, Any]:
    return {name: train(name) for name in names}


def all_resumed(saved: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: resume(name, each) for name, each in saved.items()}


@pytest.mark.parametrize(("before", "after"), [(3, 2), pytest.param(2, 3, marks=pytest.mark.reliability)])
def test_what_was_not_delivered_is_delivered_by_another_number_of_ranks(before: int, after: int) -> None:
    trained = ranks.run(before, all_trained, list(AVERAGES))
    merged = {name: {k: v for each in trained for k, v in each[name][0].items()} for name in AVERAGES}
    resumed = ranks.run(after, all_resumed, merged)
    for name in AVERAGES:
        wanted = torch.tensor(trained[0][name][1])
        assert wanted.abs().max() > 1e-3  # there was something to deliver
        for each in resumed:
            steps, got = each[name]
            assert steps == 4
            torch.testing.assert_close(torch.tensor(got), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=2e-3)


def alone(saved: dict[str, Any]) -> tuple[list[float], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        texts: list[str] = []
        patch.setattr(logging.getLogger("fn"), "warning", lambda text, *args: texts.append(text % args))
        return resume("int8", saved)[1], texts


def test_a_single_rank_says_that_it_delivers_nothing() -> None:
    trained = ranks.run(2, save, "int8")
    ((got, texts),) = ranks.run(1, alone, {k: v for saved in trained for k, v in saved.items()})
    assert not any(got)
    assert texts == ["average_gradients: a single rank encodes nothing; what 2 ranks had not delivered is lost"]


def incomplete(saved: dict[str, Any]) -> tuple[str, int]:
    mean = average_gradients(wrapped(), **AVERAGES["int8"], elements=300)
    try:
        mean.load_state_dict({path: torch.as_tensor(x) for path, x in saved.items()})
    except ValueError as error:
        return str(error), mean.steps
    raise AssertionError("loaded")


def test_a_dict_that_lacks_ranks_is_refused_with_the_cure() -> None:
    saved = ranks.run(3, save, "int8")[1]
    for rank, (text, steps) in enumerate(ranks.run(2, incomplete, saved)):
        assert f"expected the state of rank {rank} of 2, but got the state of rank 1 of 3" in text
        assert "merge what all 3 ranks saved into one dict" in text
        assert steps == 0


def without_errors() -> int:
    mean = average_gradients(wrapped(), fn.int8(), fn.off(), elements=300)
    mean.steps = 7
    saved, mean.steps = mean.state_dict(), 0
    mean.load_state_dict(saved)
    return mean.steps


def test_an_average_without_errors_loads_what_it_saved() -> None:
    assert ranks.run(1, without_errors) == [7]


def spoiled(saved: dict[str, Any]) -> list[str]:
    mean, found = average_gradients(wrapped(), **AVERAGES["int8"], elements=300), []
    whole = {path: torch.as_tensor(x) for path, x in saved.items()}
    key = next(path for path in whole if path.startswith("state of rank 1 of 3."))
    for change in (
        {"foo": torch.zeros(())},
        {"state of rank 1 of 3.9.worker.0": torch.zeros(3)},
        {key: whole[key].long()},
        {key: whole[key][:-1]},
        {key: "nothing"},
        {key: None},
        {"skipped": None},
        {"state of rank 0 of 5.0": torch.zeros(3)},
    ):
        changed = {path: x for path, x in {**whole, **change}.items() if x is not None}
        try:
            mean.load_state_dict(changed)
        except ValueError as error:
            found.append(str(error))
    assert mean.steps == 0
    return found


def test_a_merged_dict_that_does_not_fit_is_refused_by_path_and_nothing_is_loaded() -> None:
    trained = ranks.run(3, save, "int8")
    merged = {k: v for saved in trained for k, v in saved.items()}
    for unknown, more, dtype, shape, text, missing, count, worlds in ranks.run(2, spoiled, merged):
        assert unknown == "state_dict: 'foo' is unexpected"
        assert more == "state_dict: 'state of rank 1 of 3.9.worker.0' is unexpected"
        assert "state of rank 1 of 3." in dtype
        assert "torch.int64" in dtype
        assert "state of rank 1 of 3." in shape
        assert "state of rank 1 of 3." in text
        assert "not a tensor" in text
        assert missing.startswith("state_dict: 'state of rank 1 of 3.")
        assert missing.endswith("is missing")
        assert count == "state_dict: 'skipped' is missing"
        assert "it holds states of 3 and of 5 ranks; load those of one run" in worlds


def refused() -> tuple[list[str], int]:
    """Return what is said of dicts that nobody saved, and the most bytes that looking at them took."""
    mean, said = average_gradients(wrapped(), **AVERAGES["int8"], elements=300), []
    one, absurd = torch.zeros(3), "9" * 5000
    tracemalloc.start()
    for saved in (
        [],
        None,
        {"state of rank 0 of 3000000.0": one},
        {"state of rank 0 of 3000000.0": one, "state of rank 1 of 3000000.0": one},
        {"state of rank 7 of 1.0": one, "state of rank 0 of 1.0": one},
        {f"state of rank {absurd} of {absurd}.0": one},
    ):
        try:
            mean.load_state_dict(saved)
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert mean.steps == 0
    return said, peak


def test_a_dict_that_nobody_saved_is_refused_at_no_cost() -> None:
    for (no_list, nothing, first, two, beyond, long), peak in ranks.run(2, refused):
        text = "TypeError: state_dict: expected what GradientAverage.state_dict returned, but got "
        assert (no_list, nothing) == (f"{text}list", f"{text}NoneType")
        assert "merge what all 3000000 ranks saved into one dict" in first
        assert "the state of rank 2 is missing; merge what all 3000000 ranks saved" in two
        assert "but got the state of rank 0 of 1" in beyond
        assert long.startswith("ValueError: state_dict: ")
        assert peak < 1 << 20
