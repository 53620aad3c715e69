"""An exchange is three functions: a round is the local step and these, by hand; also one of the user's own."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import chains
import pytest
import registry
import torch

import fn
from fn import Phase, Round, tree

PARAMS = {"w": torch.linspace(-1, 1, 12).view(4, 3), "b": torch.tensor([0.5, -0.25])}
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[2] / "docs" / "adding.md").read_text(), re.MULTILINE | re.DOTALL
)


def of_the_docs() -> fn.Transform:
    """Return the method that docs/adding.md shows."""
    (block,) = (block for block in BLOCKS if "fn.Exchange(" in block)
    assert len([line for line in block.splitlines() if line.strip()]) <= 25
    names: dict[str, Any] = {}
    exec("import torch, fn\nfrom typing import NamedTuple\n" + block, names)
    made: fn.Transform = names["meet"](fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1)), "data")
    return made


def inside(exchanging: fn.Transform) -> fn.Transform:
    """Return a transform of one label's params in a chain inside of a guard, beside one without an exchange."""
    labels = {"w": "meets", "b": "stays"}
    parts = {"meets": exchanging, "stays": fn.scale_by_learning_rate(0.1)}
    return fn.skip_nonfinite(fn.chain(fn.scale(0.5), fn.partition(parts, labels), fn.chain()))


def masked(exchanging: fn.Transform) -> fn.Transform:
    return fn.chain(fn.mask(exchanging, {"w": False, "b": True}))


def averaged() -> fn.Transform:
    inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1))
    return fn.average_params(inner, fn.compressed_average("data", fn.identity(), fn.off()))


METHODS = {
    "of the docs": of_the_docs,
    "inside": lambda: inside(of_the_docs()),
    "masked": lambda: masked(of_the_docs()),
    "diloco": lambda: chains.diloco(0.1, axis="data", fragments=2, alpha=0.5, codec=fn.int8()),
    "average_params": averaged,
    **{method.name: partial(method.make, 0.1, axis="data") for method in registry.CONTRIB_ROUNDS},
}


def step_of(tx: fn.Transform, when: Phase | Round) -> Any:
    def step(g: Any, state: Any, params: Any) -> Any:
        moves, state = tx.update(when)(g, state, params)
        return fn.apply_updates(params, moves), state

    return step


def by_hand(tx: fn.Transform, order: list[tuple[str, int]]) -> Any:
    def step(g: Any, state: Any, params: Any) -> Any:
        moves, state = tx.local_update(g, state, params)
        params = fn.apply_updates(params, moves)
        for part, number in order:
            params, state = getattr(tx.exchange, part)(number, state, params)
        return tree.map(lambda new, p: new.to(p.dtype), params, PARAMS), state

    return step


ORDERS = {
    Round(): [],
    Round(0, 0): [("difference", 0), ("mean", 0), ("outer", 0)],
    Round(0, None): [("difference", 0), ("mean", 0)],
    Round(None, 0): [("outer", 0)],
    Round(1, 0): [("difference", 1), ("outer", 0), ("mean", 1)],
}
"""What follows the local step of each kind of round, in its order."""
AS_ONE = [method.name for method in registry.CONTRIB_ROUNDS]  # they are made without fragments
KINDS = [(name, when) for name in METHODS for when in ORDERS if name not in AS_ONE or when.begin in (None, 0)]


@pytest.mark.parametrize(("name", "when"), KINDS, ids=[f"{name} {tuple(when)}" for name, when in KINDS])
def test_a_round_is_the_local_step_and_the_functions_one_after_the_other(name, when):
    tx = METHODS[name]()
    state = fn.simulate(tx.init, "data", 2, in_dims=None)(PARAMS)
    params = tree.map(lambda p: torch.stack([p, p]), PARAMS)
    assert tx.exchange is not None
    for t, before in enumerate([Round(), Round(0, None), Round(), when]):
        torch.manual_seed(t)
        g = tree.map(lambda p: torch.randn(2, *p.shape), PARAMS)
        found, wanted = (
            fn.simulate(way, "data", 2)(g, state, params) for way in (step_of(tx, before), by_hand(tx, ORDERS[before]))
        )
        for x, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
            assert torch.equal(x, y)
        params, state = found


def test_the_compressed_phase_is_the_whole_exchange_of_number_0():
    tx = of_the_docs()
    found, wanted = (tx.update(when)(PARAMS, tx.init(PARAMS), PARAMS) for when in (Phase.COMPRESSED, Round(0, 0)))
    assert all(map(torch.equal, tree.leaves(found), tree.leaves(wanted)))


def refusing() -> fn.Transform:
    def refuse(schedule: Any) -> None:
        raise ValueError(f"schedule: expected no schedule, but got {schedule}")

    tx = of_the_docs()
    return tx._replace(exchange=tx.exchange._replace(check=refuse))


@pytest.mark.parametrize("around", [lambda tx: tx, inside, masked, fn.skip_nonfinite])
def test_what_combines_hands_on_the_check_of_a_schedule(around):
    with pytest.raises(ValueError, match="schedule: expected no schedule, but got 3"):
        around(refusing()).exchange.check(3)


def test_an_optimizer_asks_once_whether_the_schedule_fits():
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="schedule: expected no schedule, but got Every"):
        fn.Optimizer(params, lambda lr: refusing(), schedule=fn.every(3), lr=0.1)


def test_an_average_of_the_params_takes_no_delay():
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"schedule: expected an average that begins and ends .* got delay=1; leave"):
        fn.Optimizer(params, lambda lr: averaged(), schedule=fn.every(3, delay=1), lr=0.1)
