"""torch.compile gives up after 8 compilations of a code object: each update of ours has one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fn
from fn import Phase, tree

UPDATES = 9


def own_link(key: str) -> fn.Transform:
    """Return a chain with a link of the caller's own."""
    add = fn.stateless(lambda updates, params: {key: updates[key] + params[key]})
    return fn.chain(add, fn.scale_by_learning_rate(0.1))


def adamw(key: str) -> Callable[..., Any]:
    return fn.adamw(0.1).update(Phase.WARMUP)


def chain(key: str) -> Callable[..., Any]:
    return own_link(key).update(Phase.LOCAL)


def link(key: str) -> Callable[..., Any]:
    return fn.scale_by_adam().update(Phase.WARMUP)


def stateless(key: str) -> Callable[..., Any]:
    return fn.stateless(lambda updates, params: {key: updates[key] * 2}).update(Phase.WARMUP)


def masked(key: str) -> Callable[..., Any]:
    return fn.mask(fn.scale_by_learning_rate(0.1), lambda params: {key: True}).update(Phase.WARMUP)


def donated(key: str) -> Callable[..., Any]:
    return fn.donate(own_link(key).update(Phase.LOCAL))


def simulated(key: str) -> Callable[..., Any]:
    return fn.simulate(lambda updates, state, params: ({key: updates[key] * 2}, state), "data", 2, out_dims=(0, None))


OTHERS = (adamw, link, stateless, masked, donated, simulated)

INITS = {
    adamw: fn.adamw(0.1).init,
    link: fn.scale_by_adam().init,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [chain, *(pytest.param(f, marks=pytest.mark.reliability) for f in OTHERS)])
def test_a_process_may_compile_nine_updates_of_a_kind_on_params_of_their_own(make):
    torch._dynamo.reset()
    for i in range(UPDATES):
        key = f"w{i}"
        params, grads = {key: torch.ones(2)}, {key: torch.full((2,), 0.5)}
        state = INITS[make](params) if make in INITS else ((), ())
        expected = make(key)(grads, tree.map(torch.clone, state), params)[0]
        updates, _ = torch.compile(make(key), fullgraph=True, backend="eager")(grads, state, params)
        torch.testing.assert_close(updates, expected)


def test_an_update_that_is_asked_for_again_is_not_compiled_again(graphs):
    tx, params = fn.adamw(0.1), [torch.ones(2)]
    state = tx.init(params)
    for _ in range(5):
        assert tx.update(Phase.WARMUP) is tx.update(Phase.WARMUP)
        torch.compile(tx.update(Phase.WARMUP), fullgraph=True, backend=graphs)(params, state, params)
    assert graphs.count == 1


def test_a_round_inside_of_a_compiled_function_compiles_without_a_warning(graphs):
    """Warnings are errors here: torch warns of `functools.cache`, through which it looks."""
    tx = fn.outer(fn.scale_by_learning_rate(0.1), fn.scale_by_learning_rate(1.0), fn.chain())
    params = {"w": torch.ones(4)}
    state = tx.init(params)

    def step(grads, state, params):
        return tx.update(fn.Round(0, 0))(grads, state, params)

    found, _ = torch.compile(step, backend=graphs)({"w": torch.ones(4)}, state, params)
    wanted, _ = step({"w": torch.ones(4)}, state, params)
    assert torch.equal(found.params["w"], wanted.params["w"])
