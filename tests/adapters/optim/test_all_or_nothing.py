"""What cannot be done is refused before anything is written: a constructor, a load and a step do all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fn
from fn import tree

MAKES = {"adamw": fn.adamw, "lamb": fn.lamb, "onebit_adam": partial(fn.onebit_adam, axis="data")}


def expanded() -> Tensor:
    return torch.ones(1).expand(3)


def overlapping() -> tuple[Tensor, Tensor]:
    whole = torch.ones(6)
    return whole[:4], whole[2:]


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(3))


REFUSED: dict[str, tuple[Callable[[], list[Tensor]], str]] = {
    "expanded": (
        lambda: [torch.ones(3), expanded()],
        "params: expected elements of their own, but those of parameter second of group 0, of the shape (3,) and the "
        "strides (0,), share memory, as expand makes them; clone it",
    ),
    "folded": (
        lambda: [torch.ones(3), torch.ones(9).as_strided((3, 4), (2, 1))],
        "params: expected elements of their own, but those of parameter second of group 0, of the shape (3, 4) and the "
        "strides (2, 1), share memory, as expand makes them; clone it",
    ),
    "overlapping": (
        lambda: [*overlapping()],
        "params: expected each parameter to have memory of its own, but parameter second of group 0 shares memory with "
        "parameter first of group 0; clone one of them, or make them one torch.nn.Parameter, which modules may share",
    ),
    "columns of one matrix": (
        lambda: [*torch.ones(4, 2).unbind(1)],
        "params: expected each parameter to have memory of its own, but parameter second of group 0 shares memory with "
        "parameter first of group 0; clone one of them, or make them one torch.nn.Parameter, which modules may share",
    ),
    "of inference": (
        lambda: [torch.ones(3), made_in_inference_mode()],
        "params: expected tensors that can be written, but parameter second of group 0 was made under "
        "torch.inference_mode(); make it outside, or clone it there",
    ),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_parameters_that_a_step_cannot_write_are_refused_by_name_at_construction(given, message, make):
    """A step raised once the first had moved, or wrote what lies in two of them twice."""
    params = [x if isinstance(x, torch.nn.Parameter) else torch.nn.Parameter(x) for x in given()]
    with pytest.raises(ValueError) as said:  # noqa: PT011, the whole message is compared
        fn.Optimizer(zip(("first", "second"), params, strict=True), make, lr=0.1)
    assert str(said.value) == message


def test_a_parameter_in_the_memory_of_another_group_is_refused_and_the_optimizer_is_as_it_was():
    one, other = (torch.nn.Parameter(x) for x in overlapping())
    opt = fn.Optimizer([one], fn.adamw, lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 .*memory.* parameter 0 of group 0"):
        opt.add_param_group({"params": [other]})
    assert len(opt.param_groups) == 1
    one.grad = torch.ones(4)
    opt.step()


def test_halves_of_one_buffer_are_accepted():
    buffer = torch.ones(8)
    views = [buffer[:4], buffer[4:], torch.ones(0), torch.ones(3, 2).t()]
    params = [torch.nn.Parameter(x) for x in views]
    opt = fn.Optimizer(params, fn.adamw, lr=0.1, weight_decay=0.0)
    for p in params:
        p.grad = torch.ones(p.shape)
    opt.step()
    assert all(torch.allclose(p.detach(), torch.tensor(0.9)) for p in params)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_parameter_that_is_expanded_between_steps_is_refused_before_anything_moves(make):
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = fn.Optimizer([first, second], make, lr=0.1)
    for t in range(2):
        first.grad, second.grad = torch.ones(3), torch.ones(3)
        before = [x.clone() for x in (first.detach(), *tree.leaves(opt.states))]
        if t:
            second.data = expanded()
            with pytest.raises(ValueError, match="parameter 1 of group 0, of the shape"):
                opt.step()
            assert opt.steps == 1
            assert all(map(torch.equal, before, (first.detach(), *tree.leaves(opt.states))))
        else:
            opt.step()


def test_donate_refuses_a_state_that_cannot_be_written_before_any_of_it_is():
    state = (torch.zeros(3), torch.zeros(1).expand(3))
    step = fn.donate(lambda u, s, p: (u, (s[0] + 1, s[1] + 1)))
    with pytest.raises(ValueError) as said:  # noqa: PT011
        step([], state, [])
    assert str(said.value) == (
        "state: expected leaf '1' to have elements of its own, but those of the shape (3,) and the strides (0,) share "
        "memory, as expand makes them; clone it in init"
    )
    assert state[0].tolist() == [0, 0, 0]


# Loading.


def trained(make: Any, steps: int, **kwargs: Any) -> fn.Optimizer:
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], make, **{"lr": 0.1, **kwargs})
    for t in range(steps):
        p.grad = torch.ones(3) + t
        opt.step()
    return opt


def everything(opt: fn.Optimizer) -> tuple[list[list[float]], int, dict[str, Any]]:
    group = opt.param_groups[0].items()
    numbers = {key: x if isinstance(x, tuple) else float(x) for key, x in group if key != "params"}
    return [x.tolist() for x in tree.leaves(opt.states)], opt.steps, numbers


def double(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


MU, GROUP = "state.0.inner.1.mu.0", "state_dict: expected numbers of param group 0 that its transform takes, but got "
DENSE = f"state_dict: expected {MU!r} to be a dense tensor with numbers, but got one that is "

BAD: dict[str, tuple[dict[Any, Any], str]] = {
    "sparse": ({MU: torch.ones(3).to_sparse()}, f"{DENSE}of layout torch.sparse_coo"),
    "on the meta device": ({MU: torch.ones(3, device="meta")}, f"{DENSE}on the meta device"),
    "nested": ({MU: torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged)}, f"{DENSE}nested"),
    "lr below 0": (
        {"groups.0.lr": double(-1)},
        f"{GROUP}lr: expected a finite number or a 0-d tensor, of at least 0, but got -1.0",
    ),
    "lr NaN": (
        {"groups.0.lr": double(float("nan"))},
        "state_dict: expected 'groups.0.lr' to be a real number, a 0-d tensor, but got nan",
    ),
    "lr complex": (
        {"groups.0.lr": torch.tensor(1j)},
        "state_dict: expected 'groups.0.lr' to be a real number, a 0-d tensor, but got torch.complex64 ()",
    ),
    "b1 out of range": ({"groups.0.b1": double(7)}, f"{GROUP}b1: expected a number in [0, 1), but got 7.0"),
    "several numbers": (
        {"groups.0.initial_lr": torch.ones(2)},
        "state_dict: expected 'groups.0.initial_lr' to be a real number, a 0-d tensor, but got torch.float32 (2,)",
    ),
    "of another group": (
        {"groups.7.b1": double(0.9)},
        "state_dict: 'groups.7.b1' is unexpected; it was saved with other param groups: those of ddp.optimizer and "
        "bucketed belong to their `elements`",
    ),
    "text": ({"steps": "text"}, "state_dict: 'steps' is str, not a tensor"),
    "a key that is no string": (
        {3: torch.ones(3)},
        "state_dict: expected keys to be strings, such as 'steps', but got 3, of type int; load what state_dict() "
        "returned",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("make", [MAKES["adamw"], MAKES["onebit_adam"]], ids=["adamw", "onebit_adam"])
def test_what_cannot_be_loaded_is_refused_by_name_and_nothing_of_it_is_written(make, change, message):
    opt, saved = trained(make, 2), trained(make, 5, lr=0.3).state_dict()
    before = everything(opt)
    with pytest.raises((ValueError, TypeError)) as said:
        opt.load_state_dict({**saved, **change})
    assert str(said.value) == message
    assert everything(opt) == before
    opt.load_state_dict(saved)
    assert opt.steps == 5
    assert opt.param_groups[0]["lr"] == 0.3


def test_norms_of_a_schedule_that_are_no_list_are_refused_and_nothing_is_written():
    make, schedule = MAKES["onebit_adam"], fn.freeze_when_stable
    opt, saved = trained(make, 2, schedule=schedule()), trained(make, 5, schedule=schedule()).state_dict()
    before = everything(opt)
    with pytest.raises(ValueError, match=r"'schedule.norms' is torch.float64 \(\)"):
        opt.load_state_dict({**saved, "schedule.norms": double(1)})
    assert everything(opt) == before


def test_a_learning_rate_that_a_scheduler_left_below_zero_by_rounding_is_loaded():
    opt, saved = trained(fn.adamw, 2), trained(fn.adamw, 5).state_dict()
    opt.load_state_dict({**saved, "groups.0.lr": double(-1e-20)})
    assert opt.param_groups[0]["lr"] == -1e-20
