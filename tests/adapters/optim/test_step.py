"""Steps that are staged group by group and written together, or not at all."""

from __future__ import annotations

import pytest
import torch

import fn
from fn.adapters.optim.gradients import Kept
from fn.adapters.optim.step import commit, stage
from fn.adapters.optim.training import Training
from fn.collectives.axis import Binding
from fn.inplace.match import in_place
from fn.inplace.protocol import settled

KINDS = {"in place where there is a kernel": torch.float32, "pure": torch.float64}


def groups(dtype: torch.dtype, bad: bool = False):
    """Return two param groups after a step each, the second one from a gradient that may be NaN."""
    tx = fn.adamw(0.1)
    params = [[torch.ones(5, dtype=dtype), torch.ones(2, 3, dtype=dtype)], [torch.ones(4, dtype=dtype)]]
    states = tuple(tx.init(p) for p in params)
    grads = [[torch.full_like(x, 0.5) for x in p] for p in params]
    if bad:
        grads[1][0][2] = float("nan")
    update = tx.update(fn.Phase.WARMUP)
    return update, grads, states, params


def training_of(states) -> Training:
    return Training(fn.adamw, fn.freeze_after(9), Binding({}), [], states=states)


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
def test_a_staged_step_changes_nothing_until_it_is_written_and_is_then_the_pure_one(dtype):
    update, grads, states, params = groups(dtype)
    expected = [[p + u for p, u in zip(ps, update(g, s, ps)[0], strict=True)]
                for g, s, ps in zip(grads, states, params, strict=True)]  # fmt: skip
    steps = [stage(in_place(update), *arguments) for arguments in zip(grads, states, params, strict=True)]
    assert all(bool((p == 1).all()) for ps in params for p in ps)
    commit(training_of(states), settled(steps), [Kept(params[0][1], params[0][1].clone(), None)])
    torch.testing.assert_close(params[0][0], expected[0][0])
    torch.testing.assert_close(params[1][0], expected[1][0])
    assert bool((params[0][1] == 1).all())  # it is not to be moved
    assert [int(state.skipped) for state in states] == [0, 0]


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
def test_a_group_that_is_not_finite_stops_all_of_them(dtype):
    update, grads, states, params = groups(dtype, bad=True)
    steps = [stage(in_place(update), *arguments) for arguments in zip(grads, states, params, strict=True)]
    steps = settled(steps)
    assert [step.ok for step in steps] == [True, False]
    commit(training_of(states), steps)
    assert all(bool((p == 1).all()) for ps in params for p in ps)
    assert [int(state.skipped) for state in states] == [1, 1]


BROADCAST = {
    "smaller": (
        lambda g: g.sum(),
        r"updates: expected leaf '(0\.)?0' to have the shape of its parameter, \(3,\), but got \(\)",
    ),
    "larger": (lambda g: g.expand(2, -1), r"updates: expected leaf '(0\.)?0' .*, but got \(2, 3\)"),
    "fewer": (None, "updates: expected 1, one for each parameter, but got 0"),
}


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("case", BROADCAST)
def test_an_update_that_would_be_broadcast_is_refused_and_nothing_moves(case, by_group):
    f, said = BROADCAST[case]
    counting = fn.lift(lambda p: torch.zeros(()), lambda u, s, p: (u, s + 1))
    tx = fn.chain(counting, fn.stateless(lambda u, p: [f(g) for g in u] if f else []))
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], lambda lr: tx, lr=0.1)
    p.grad = torch.arange(3.0)
    with pytest.raises(ValueError, match=said):
        opt.stage_group(0, fn.Phase.WARMUP, [p.grad]) if by_group else opt.step()
    assert p.tolist() == [1, 1, 1]
    assert opt.states[0].inner[0] == 0
