"""Messages: the argument, what was expected, what came, and the cure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fn
from fn import Phase
from fn.adapters import ddp

PARAMS = {"w": torch.ones(3), "b": torch.ones(2)}
FLOAT8 = torch.float8_e4m3fn


def parameter(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3).to(dtype))]


def ambiguous(params: Any) -> dict[Any, Tensor]:
    return {1: torch.zeros(3), "1": torch.zeros(3)}


MADE = "the function itself"
CONVERTED = "x.to(torch.bfloat16)"
FIRST = "what an update returned first"


class Case(NamedTuple):
    """A misuse, and what its message has to say: the argument, what came, and the cure. The rest may be reworded."""

    use: Callable[[], Any]
    kind: type[Exception]
    argument: str
    came: str
    cure: str


CASES = {
    "a transform as make": Case(
        lambda: fn.Optimizer(parameter(), fn.onebit_adam(axis="data")),
        TypeError, "make", "a transform that is made already", MADE,
    ),
    "a transform as make of ddp": Case(
        lambda: ddp.optimizer(torch.nn.Linear(3, 1), fn.onebit_adam(axis="data")),
        TypeError, "make", "a transform that is made already", MADE,
    ),
    "AdamW as make": Case(
        lambda: fn.Optimizer(parameter(), torch.optim.AdamW, lr=0.1),
        TypeError, "make", "AdamW, an optimizer of torch", "fn.adapters.ddp.average_gradients",
    ),
    "AdamW in a partial as make of ddp": Case(
        lambda: ddp.optimizer(torch.nn.Linear(3, 1), partial(torch.optim.AdamW, fused=True)),
        TypeError, "make", "AdamW, an optimizer of torch", "fn.adapters.ddp.average_gradients",
    ),
    "a link as make": Case(
        lambda: fn.Optimizer(parameter(), fn.scale_by_adam),
        TypeError, "make", "scale_by_adam, which takes b1, b2, eps",
        "lambda lr: fn.chain(..., fn.scale_by_learning_rate(lr))",
    ),
    "updates without a leaf": Case(
        lambda: fn.apply_updates(PARAMS, {"w": torch.ones(3)}),
        ValueError, "updates", "a dict with the leaves ['w']", FIRST,
    ),
    "updates with the state": Case(
        lambda: fn.apply_updates(PARAMS, (PARAMS, ())),
        ValueError, "updates", "a tuple with the leaves ['0.w', '0.b']", FIRST,
    ),
    "updates that go deeper": Case(
        lambda: fn.apply_updates(PARAMS, {"w": {"x": torch.ones(3)}, "b": torch.ones(2)}),
        ValueError, "updates", "a dict with the leaves ['w.x', 'b']", FIRST,
    ),
    "missing, swapped": Case(
        lambda: fn.base.missing("my method", Phase.LOCAL),  # type: ignore[arg-type]
        TypeError, "phase, owner", f"missing('my method', {Phase.LOCAL!r})", "missing(Phase.LOCAL, 'my method')",
    ),
    "missing, of text": Case(
        lambda: fn.base.missing("local", "my method"),  # type: ignore[arg-type]
        TypeError, "phase, owner", "missing('local', 'my method')", "missing(Phase.LOCAL, 'my method')",
    ),
    "params of 8 bits": Case(
        lambda: fn.Optimizer(parameter(FLOAT8), fn.adamw),
        TypeError, "params", "torch.float8_e4m3fn at leaf '0'", CONVERTED,
    ),
    "updates of 8 bits": Case(
        lambda: fn.apply_updates({"w": torch.ones(3)}, {"w": torch.ones(3).to(FLOAT8)}),
        TypeError, "updates", "torch.float8_e4m3fn at leaf 'w'", CONVERTED,
    ),
    "gradients of 8 bits": Case(
        lambda: fn.scale_by_adam().warmup_update(
            [torch.ones(3).to(FLOAT8)], fn.scale_by_adam().init([torch.ones(3)]), [torch.ones(3)]
        ),
        TypeError, "updates", "torch.float8_e4m3fn at leaf '0'", CONVERTED,
    ),
    "a state with two leaves of one path": Case(
        lambda: fn.Optimizer(parameter(), lambda lr: fn.lift(ambiguous, fn.base.unchanged)),
        ValueError, "state", "two leaves at 'inner.1'", "strings without dots as keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_message_names_the_argument_what_came_and_the_cure(case: Case) -> None:
    with pytest.raises(case.kind) as said:
        case.use()
    assert type(said.value) is case.kind
    before, came, after = str(said.value).partition(f"but got {case.came}")
    assert before.startswith(f"{case.argument}: ")
    assert came
    assert case.cure in after
