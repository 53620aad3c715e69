"""The order of a dict's keys means nothing: gradients, masks and labels may come in another one than params."""

from __future__ import annotations

import pytest
import ranks
import torch
from registry import each_optimizer
from test_ranks import bound

import fn
from fn import Phase

SHAPES = {"a": (6, 4), "b": (24,), "c": (2, 12)}
"""Of as many elements each, so that nothing else tells one from the other."""


def start(*, turned: bool = False) -> dict[str, torch.Tensor]:
    keys = sorted(SHAPES, reverse=turned)
    return {key: torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(ord(key))) for key in keys}


def gradients(step: int, *, turned: bool) -> dict[str, torch.Tensor]:
    """Return those of 4 ranks, of sizes that differ by tensor."""
    generator = torch.Generator().manual_seed(step)
    found = {key: torch.randn(4, *SHAPES[key], generator=generator) * (ord(key) - 96) for key in sorted(SHAPES)}
    return {key: found[key] for key in sorted(found, reverse=turned)}


def trained(tx: fn.Transform, phases: list[Phase], dims, *, gradients_turned=False, params_turned=False):
    """Return params, in the order of their keys, after steps on 4 ranks; every second step has its keys turned."""
    state, params = tx.init(start()), start(turned=params_turned)
    of_state = fn.rank_dims(state)
    state = fn.simulate(tx.init, "data", 4, in_dims=None, out_dims=of_state)(start())
    if dims == 0:
        params = {key: p.expand(4, *p.shape) for key, p in params.items()}
    for t, phase in enumerate(phases):

        def step(grads, state, params, phase=phase):
            updates, state = tx.update(phase)(grads, state, params)
            return fn.apply_updates(params, updates), state

        each = fn.simulate(step, "data", 4, in_dims=(0, of_state, dims), out_dims=(dims, of_state))
        params, state = each(gradients(t, turned=gradients_turned and t % 2 == 1), state, params)
    return {key: params[key] for key in sorted(params)}


@each_optimizer
def test_gradients_in_another_order_train_the_same(optimizer):
    tx, phases = optimizer.make(lr=0.1, axis="data"), [p for p in optimizer.phases[:2] for _ in range(3)]
    dims = None if optimizer.replicated else 0
    expected = trained(tx, phases, dims)
    torch.testing.assert_close(trained(tx, phases, dims, gradients_turned=True), expected)


LINKS = {
    "coded mean": lambda: fn.compressed_average("data", fn.sign()),
    "shards by tensor": lambda: fn.loco_adamw(0.1, axis="data", layout="per_tensor"),
    "shards of params": lambda: fn.loco_adamw(0.1, axis="data", master=True),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_keep_what_was_not_delivered_by_key(name):
    phases = [Phase.WARMUP, *[Phase.COMPRESSED] * 3] if name != "coded mean" else [Phase.COMPRESSED] * 3
    expected = trained(LINKS[name](), phases, None)
    torch.testing.assert_close(trained(LINKS[name](), phases, None, gradients_turned=True), expected)


@pytest.mark.parametrize("make", [fn.onebit_adam, fn.onebit_lamb])
def test_params_in_another_order_than_at_init_train_the_same(make):
    """As those of a file that sorts its keys."""
    tx, phases = make(0.1, axis="data"), [Phase.WARMUP, *[Phase.COMPRESSED] * 3]
    torch.testing.assert_close(trained(tx, phases, None, params_turned=True), trained(tx, phases, None))


HALVES = {
    "mask": lambda chosen: fn.mask(fn.scale_by_learning_rate(1.0), {key: key == chosen for key in "cab"}),
    "partition": lambda chosen: fn.partition(
        {"move": fn.scale_by_learning_rate(1.0), "stay": fn.chain()},
        {key: "move" if key == chosen else "stay" for key in "cab"},
    ),
}


@pytest.mark.parametrize("chosen", "abc")
@pytest.mark.parametrize("name", HALVES)
def test_leaves_are_chosen_by_key(name, chosen):
    tx, params = HALVES[name](chosen), start()
    updates = {key: torch.ones(SHAPES[key]) for key in "bca"}
    found, _ = tx.update(Phase.WARMUP)(updates, tx.init(params), params)
    assert {key: float(u.mean()) for key, u in found.items()} == {key: -1.0 if key == chosen else 1.0 for key in "abc"}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("keys", ["bcd", "ab", "abcd"])
def test_updates_with_other_keys_are_refused(name, keys):
    """The first was taken for the params' leaves, place by place."""
    tx, params = HALVES[name]("a"), start()
    updates = {key: torch.ones(24) for key in keys}
    with pytest.raises(ValueError, match=r"updates: has another structure, expected a .* \['a', 'b', 'c'\], but"):
        tx.update(Phase.WARMUP)(updates, tx.init(params), params)


def test_ranks_whose_params_have_another_order_are_refused():
    """What travels has no keys: `a` of one rank was averaged with `c` of the other."""
    for outcome in ranks.outcomes(2, turned_by_rank):
        assert isinstance(outcome, ranks.Raised), outcome
        assert (outcome.kind, "leaf 0 of the params is c on rank 1 and a on rank 0" in outcome.text) == (
            "RanksDisagree",
            True,
        )


def turned_by_rank() -> None:
    with bound():
        fn.adamw(axis="data").init(start(turned=bool(torch.distributed.get_rank())))
