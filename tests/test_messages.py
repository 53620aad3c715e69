"""Whole messages: the argument, what was expected, what came, and the cure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ddp_cases import Net, backward, train, wrapped
from ranks import run
from torch import Tensor

import fn
from fn import Phase
from fn.adapters import ddp
from fn.adapters.ddp.overlapped import Changes
from fn.adapters.optim.gradients import check_max_grad_norm

PARAMS = {"w": torch.ones(3), "b": torch.ones(2)}
FLOAT8 = torch.float8_e4m3fn


def parameter(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3).to(dtype))]


def ambiguous(params: Any) -> dict[Any, Tensor]:
    return {1: torch.zeros(3), "1": torch.zeros(3)}


MAKES = "make: expected a function that makes a transform, such as partial(fn.onebit_adam, axis='data'), but got "
SWAPPED = "; write missing(Phase.LOCAL, 'my method')"
STRUCTURE = "updates: has another structure, expected a dict with the leaves ['w', 'b'], but got "
FIRST = "; give what an update returned first, of (updates, state)"
BITS = "expected numbers of 16 bits or more, with which torch can calculate, but got torch.float8_e4m3fn at leaf "

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a transform as make": (
        lambda: fn.Optimizer(parameter(), fn.onebit_adam(axis="data")),
        TypeError,
        f"{MAKES}a transform that is made already; give the function itself, which is called for each param group with "
        "its learning rate",
    ),
    "a transform as make of ddp": (
        lambda: ddp.optimizer(torch.nn.Linear(3, 1), fn.onebit_adam(axis="data")),
        TypeError,
        "make: expected a function that makes a transform, such as fn.onebit_adam, but got a transform that is made "
        "already; give the function itself, which is called for each param group with its learning rate",
    ),
    "AdamW as make": (
        lambda: fn.Optimizer(parameter(), torch.optim.AdamW, lr=0.1),
        TypeError,
        f"{MAKES}AdamW, an optimizer of torch; any optimizer of torch goes with fn.adapters.ddp.average_gradients, "
        "which averages gradients in codes",
    ),
    "AdamW in a partial as make of ddp": (
        lambda: ddp.optimizer(torch.nn.Linear(3, 1), partial(torch.optim.AdamW, fused=True)),
        TypeError,
        "make: expected a function that makes a transform, such as fn.onebit_adam, but got AdamW, an optimizer of "
        "torch; any optimizer of torch goes with fn.adapters.ddp.average_gradients, which averages gradients in codes",
    ),
    "a link as make": (
        lambda: fn.Optimizer(parameter(), fn.scale_by_adam),
        TypeError,
        "make: expected a function that takes lr, but got scale_by_adam, which takes b1, b2, eps; give one that does: "
        "lambda lr: fn.chain(..., fn.scale_by_learning_rate(lr))",
    ),
    "updates without a leaf": (
        lambda: fn.apply_updates(PARAMS, {"w": torch.ones(3)}),
        ValueError,
        f"{STRUCTURE}a dict with the leaves ['w']{FIRST}",
    ),
    "updates with the state": (
        lambda: fn.apply_updates(PARAMS, (PARAMS, ())),
        ValueError,
        f"{STRUCTURE}a tuple with the leaves ['0.w', '0.b']{FIRST}",
    ),
    "updates that go deeper": (
        lambda: fn.apply_updates(PARAMS, {"w": {"x": torch.ones(3)}, "b": torch.ones(2)}),
        ValueError,
        f"{STRUCTURE}a dict with the leaves ['w.x', 'b']{FIRST}",
    ),
    "missing, swapped": (
        lambda: fn.base.missing("my method", Phase.LOCAL),  # type: ignore[arg-type]
        TypeError,
        f"phase, owner: expected a phase and a name, but got missing('my method', {Phase.LOCAL!r}){SWAPPED}",
    ),
    "missing, of text": (
        lambda: fn.base.missing("local", "my method"),  # type: ignore[arg-type]
        TypeError,
        f"phase, owner: expected a phase and a name, but got missing('local', 'my method'){SWAPPED}",
    ),
    "params of 8 bits": (
        lambda: fn.Optimizer(parameter(FLOAT8), fn.adamw),
        TypeError,
        f"params: {BITS}'0'; convert it, with x.to(torch.bfloat16) for one",
    ),
    "updates of 8 bits": (
        lambda: fn.apply_updates({"w": torch.ones(3)}, {"w": torch.ones(3).to(FLOAT8)}),
        TypeError,
        f"updates: {BITS}'w'; convert it, with x.to(torch.bfloat16) for one",
    ),
    "gradients of 8 bits": (
        lambda: fn.scale_by_adam().warmup_update(
            [torch.ones(3).to(FLOAT8)], fn.scale_by_adam().init([torch.ones(3)]), [torch.ones(3)]
        ),
        TypeError,
        f"updates: {BITS}'0'; convert it, with x.to(torch.bfloat16) for one",
    ),
    "a state with two leaves of one path": (
        lambda: fn.Optimizer(parameter(), lambda lr: fn.lift(ambiguous, fn.base.unchanged)),
        ValueError,
        "state: expected a path of its own for every leaf, but got two leaves at 'inner.1'; let init return dicts with "
        "strings without dots as keys",
    ),
    "the norm of a trainer": (
        lambda: check_max_grad_norm(1.0),
        ValueError,
        "max_grad_norm: expected 0, for a trainer clips the gradients of each rank by a norm of their own, but got "
        "1.0; set it to 0, and clip by the norm of all ranks: fn.Optimizer(..., max_norm=1.0) with keep_local(model) "
        "in the place of overlap",
    ),
}


@pytest.mark.parametrize(("use", "kind", "message"), CASES.values(), ids=CASES)
def test_a_message_says_what_was_expected_what_came_and_the_cure(use, kind, message):
    with pytest.raises(kind) as said:
        use()
    assert type(said.value) is kind
    assert str(said.value) == message


def test_a_trainer_that_does_not_clip_is_fine():
    check_max_grad_norm(0.0)
    check_max_grad_norm(None)


def clipped(who: tuple[int, ...], by_overlap: bool, wire: float) -> str:
    """Clip on some ranks between backward and step, as a trainer does; return what the step says."""
    model = Net() if by_overlap else wrapped()
    if by_overlap:
        with fn.bind({"data": torch.distributed.group.WORLD}):
            opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"), lr=0.1)
        ddp.overlap(model, opt, least_wire_seconds=wire)
    else:
        opt = ddp.optimizer(model, fn.onebit_adam, lr=0.1, least_wire_seconds=wire)
    train(model, opt, range(2))
    backward(model, 2)
    if torch.distributed.get_rank() in who:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    try:
        opt.step()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


CHANGED = (
    "ValueError: gradients of param group 0: expected those that backward left, from which the step is taken, but they "
    "were changed between backward and step; leave out what changes them, clip_grad_norm_ or a trainer's max_grad_norm "
    "perhaps, and clip with {}; torch.nn.utils.get_total_norm only reads"
)
BY = {
    True: "fn.Optimizer(..., max_norm=...) and keep_local(model) in the place of overlap",
    False: "fn.adapters.ddp.optimizer(..., max_norm=...)",
}


@pytest.mark.parametrize("by_overlap", [True, False], ids=["overlap", "ddp.optimizer"])
def test_clipping_behind_backward_is_one_error_whose_cure_is_of_the_function_that_was_called(by_overlap):
    message = CHANGED.format(BY[by_overlap])
    assert run(2, clipped, (0, 1), by_overlap, 0.0) == [message, message]
    assert run(2, clipped, (0, 1), by_overlap, 3600.0) == [message, message]  # where steps are not overlapped


def test_clipping_on_one_rank_is_one_error_on_all_where_steps_are_not_overlapped():
    message = CHANGED.format(BY[False])
    text = f"RanksDisagree: this step cannot be taken on rank 1 of axis 'data': {message}; nothing has moved"
    assert run(2, clipped, (1,), False, 3600.0) == [text, text]


def test_a_scaler_that_nobody_was_told_of_is_told_to_the_function_that_was_called():
    for maker in ("overlap", "fn.adapters.ddp.optimizer"):
        opt = fn.Optimizer(parameter(), fn.adamw)
        opt.found_inf = torch.zeros(())  # as a scaler leaves it
        changes = Changes(opt, None)
        changes.note_settings()
        expected = f"scaler: scales the loss, but {maker} does not know it; pass {maker}(..., scaler=scaler)"
        assert str(changes.of_settings(maker)) == expected


def refused_on_one_of_a_grid(what: str) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    params, last = parameter(), torch.distributed.get_rank() == 3
    with fn.bind(mesh):
        opt = fn.Optimizer(params, partial(fn.onebit_adam, axis=("local", "node")), schedule=fn.freeze_after(9))
    params[0].grad = None if last and what == "absent" else torch.ones(3)
    if last and what == "b1":
        opt.param_groups[0]["b1"] = 7.0
    try:
        opt.step()
    except fn.RanksDisagree as error:
        return str(error)
    return "nothing"


def test_what_one_rank_of_a_grid_cannot_take_is_said_on_all_of_them():
    """A rank of neither its row nor its column waited on the second axis for those that had raised on the first."""
    text = "this step cannot be taken on rank 1 of axis 'node', rank 1 of axis 'local': "
    text += "ValueError: b1: expected a number in [0, 1), but got 7.0; nothing has moved"
    assert {*run(4, refused_on_one_of_a_grid, "b1")} == {text}
    differ = "the gradient of param group 0, parameter 0 is absent on rank 1 and present on rank 0"
    assert all(differ in said for said in run(4, refused_on_one_of_a_grid, "absent"))
