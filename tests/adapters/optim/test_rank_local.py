"""State classes of one's own say what is one rank's own; what they call replicated is compared, never guessed."""

from __future__ import annotations

import io
import warnings
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import Cases

import fn
from fn import tree
from fn.adapters import checkpoint

case = Cases(2)


class OwnError(NamedTuple):
    """What a mean in whole numbers has not delivered yet."""

    error: Any
    rank_local = ("error",)


class WrongName(NamedTuple):
    error: Any
    rank_local = ("errors",)


class PlainString(NamedTuple):
    errors: Any
    rank_local = "errors"


class Silent(NamedTuple):
    error: Any


def coarse_mean(kind: Any, start: Any = torch.zeros_like, axis: str = "data") -> fn.Transform:
    """Average what is rounded to tenths, with error feedback in a state class of one's own."""

    def init(params: Any) -> Any:
        return kind(tree.map(start, params))

    def update(updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        total = tree.map(torch.add, updates, state.error)
        sent = tree.map(lambda x: (x * 10).round() / 10, total)
        return fn.pmean(sent, axis), kind(tree.map(torch.sub, total, sent))

    return fn.lift(init, update)


def trained(kind: Any, steps: int, start: Any = torch.zeros_like) -> tuple[torch.nn.Parameter, fn.Optimizer]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([p], lambda lr: fn.chain(coarse_mean(kind, start), fn.scale_by_learning_rate(lr)), lr=0.1)
    for _ in range(steps):
        step(p, opt)
    return p, opt


def step(p: torch.nn.Parameter, opt: fn.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + opt.steps)
    p.grad = torch.randn(6, generator=generator)
    opt.step()


def error_of(opt: fn.Optimizer) -> torch.Tensor:
    return tree.leaves(tree.fields(opt.states, "error"))[0].clone()


# Names that are no fields.


@pytest.mark.parametrize(
    "start",
    [
        lambda kind: fn.chain(coarse_mean(kind)).init([torch.ones(2)]),
        lambda kind: fn.skip_nonfinite(coarse_mean(kind)).init([torch.ones(2)]),
        lambda kind: fn.rank_dims(coarse_mean(kind).init([torch.ones(2)])),
        lambda kind: fn.Optimizer([torch.nn.Parameter(torch.ones(2))], lambda lr: coarse_mean(kind)),
    ],
    ids=["chain", "skip_nonfinite", "rank_dims", "Optimizer"],
)
def test_a_name_that_is_no_field_is_refused_with_the_first_state(start):
    text = r"^expected WrongName.rank_local to name fields of WrongName \(error\), but got 'errors'$"
    with pytest.raises(ValueError, match=text):
        start(WrongName)
    text = (
        r"^expected PlainString.rank_local to be a set or tuple of names, but got the string 'errors'; write "
        r"PlainString.rank_local = \('errors',\)$"
    )
    with pytest.raises(TypeError, match=text):
        start(PlainString)
    start(OwnError)


# What is called replicated.


def refusal(f: Any) -> str:
    try:
        f()
    except fn.RanksDisagree as error:
        return str(error)
    return ""


@case
def different_from_the_start() -> str:
    return refusal(lambda: trained(Silent, 0, lambda p: torch.full_like(p, dist.get_rank() + 1.0)))


def test_replicated_state_that_differs_is_refused_at_construction():
    first, second = case.answer("different_from_the_start")
    assert first == second
    assert "inner.0.error.0 of the state, which rank_local does not name, is torch.float32 (6,)" in first
    assert "on rank 1 and" in first


@case
def own_from_the_start() -> str:
    return refusal(lambda: trained(OwnError, 0, lambda p: torch.full_like(p, dist.get_rank() + 1.0)))


def test_what_is_one_ranks_own_may_start_apart():
    assert case.answer("own_from_the_start") == ["", ""]


def saved_and_loaded(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _, silent = trained(Silent, 3)
    found["differs"] = error_of(silent)
    found["refusal"] = refusal(lambda: checkpoint.save(f"{folder}/silent", silent))
    p, opt = trained(OwnError, 3)
    checkpoint.save(f"{folder}/own", opt)
    q, again = trained(OwnError, 0)
    checkpoint.load(f"{folder}/own", again)
    found["error"] = torch.equal(error_of(opt), error_of(again))
    for params, each in ((p, opt), (q, again)):
        step(params, each)
    found["went on"] = torch.equal(p, q)
    if dist.get_rank():
        with torch.no_grad():
            q.add_(1)
    found["drifted"] = refusal(lambda: checkpoint.save(f"{folder}/own", again))
    again.steps += dist.get_rank()
    found["steps"] = refusal(lambda: checkpoint.save(f"{folder}/own", again))
    return found


def test_a_checkpoint_of_what_differs_but_is_called_replicated_is_refused_on_all_ranks(tmp_path):
    first, second = ranks.run(2, saved_and_loaded, str(tmp_path))
    assert not torch.equal(first["differs"], second["differs"])
    said = {"refusal": "state.0.inner.0.error.0 is torch.", "drifted": "params.0.0 is torch.", "steps": "steps is"}
    for key, text in said.items():
        assert first[key] == second[key]
        assert first[key].startswith(f"ranks disagree: {text}")
        assert first[key].endswith("nothing was saved")
    assert "name its field in rank_local of the state's class" in first["refusal"]
    assert not (tmp_path / "silent").exists()
    for found in (first, second):
        assert found["error"]
        assert found["went on"]
    assert len(list((tmp_path / "own").glob("step-*"))) == 1


# One rank's state_dict on another.


@case
def anothers_state_dict() -> dict[str, Any]:
    _, opt = trained(OwnError, 3)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box, src=0)
    _, again = trained(OwnError, 1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        again.load_state_dict(torch.load(io.BytesIO(box[0]), weights_only=True))
    return {"heard": [str(w.message) for w in heard], "error": error_of(again), "own": error_of(opt)}


def test_errors_of_ones_own_class_start_from_zero_on_another_rank_with_a_warning():
    first, second = case.answer("anothers_state_dict")
    assert first["heard"] == []
    assert torch.equal(first["error"], first["own"])
    assert first["own"].any()
    (text,) = second["heard"]
    assert "is of rank 0 of 2, but this is rank 1 of 2: its own errors" in text
    assert "start from zero" in text
    assert not second["error"].any()
