"""The order of a dict's keys means nothing: gradients, masks and labels may come in another one than params."""

from __future__ import annotations

import pytest
import ranks
import torch
from registry import each_optimizer
from test_ranks import bound
from torch.distributed.device_mesh import init_device_mesh

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


def by_hand(way: str, *, turned: bool) -> fn.Transform:
    """Return a transform that shows its average a list of leaves, which has no keys."""
    mean = fn.compressed_average("data", fn.identity(), fn.off(), layout="per_tensor")
    step = fn.scale_by_learning_rate(1.0)
    return {
        "mean": lambda: fn.average("data"),
        "mask": lambda: fn.mask(fn.average("data"), {"a": True, "b": True, "c": False}),
        "mask by a function": lambda: fn.mask(mean, lambda params: fn.tree.map(lambda p: True, params)),
        "other mask": lambda: fn.mask(mean, {"a": not turned, "b": True, "c": turned}),
        "partition": lambda: fn.partition({"y": mean, "x": fn.average("data")}, {"a": "x", "b": "x", "c": "y"}),
        "other labels": lambda: fn.partition({"x": mean, "y": mean}, {"a": "xy"[turned], "b": "x", "c": "yx"[turned]}),
        "rounds of labels": lambda: fn.partition({"x": fn.outer(step, step, mean), "y": step}, labels),
        "rounds": lambda: fn.outer(step, step, mean, fragments=2),
        "basis": lambda: fn.in_basis(fn.tiles(24), mean),
        "basis by length": lambda: fn.in_basis(fn.tiles(24), lambda n: mean),
        "shards": lambda: fn.sharded(fn.chain(mean, step), "local"),
    }[way]()


def labels(params):
    return {key: "y" if key == "b" else "x" for key in params}


WAYS = {
    "mean": "leaf 0 of the params is c",
    "mask": "leaf 0 of the mask is b",
    "mask by a function": "leaf 0 of the mask is c",
    "other mask": "leaf 0 of the mask is b",
    "partition": "leaf 0 of label 'x' is b",
    "other labels": "leaf 0 of label 'x' is b",
    "rounds of labels": "leaf 0 of label 'x' is c",
    "rounds": "leaf 0 of fragment 0 is c",
    "basis": "leaf 0 of the params is c",
    "basis by length": "leaf 0 of the params is c",
    "shards": "leaf 0 of the params is c",
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_whose_params_have_another_order_are_refused(way):
    """What travels has no keys: `a` of one rank was averaged with `c` of the other."""
    assert [text.split("; ")[0] for text in CASES.answer("turned_by_rank")[0][way]] == [
        f"ranks disagree: {WAYS[way]} on rank 1 and a on rank 0"
    ]


CASES = ranks.Cases(2)


@CASES
def turned_by_rank() -> dict[str, list[str]]:
    turned, found = bool(torch.distributed.get_rank()), {}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "local"))
    with fn.bind(mesh):
        for way in WAYS:
            try:
                by_hand(way, turned=turned).init(start(turned=turned and "other" not in way))
                found[way] = []
            except fn.RanksDisagree as error:
                found[way] = [str(error)]
    return found


ALIKE = {
    "partition's transforms": lambda turned: fn.partition(
        {key: fn.average("data") for key in sorted("xy", reverse=turned)}, {"a": "x", "b": "y", "c": "y"}
    ),
    "masks and labels": lambda turned: fn.mask(
        fn.average("data"), {key: key != "b" for key in sorted("abc", reverse=turned)}
    ),
}


@pytest.mark.parametrize("way", ALIKE)
def test_ranks_that_spell_a_dict_in_another_order_take_the_same_step(way):
    for of_rank in CASES.answer("spelled_by_rank"):
        assert (of_rank[way]["a"], of_rank[way]["c"]) == (1.5, 4.5)


@CASES
def spelled_by_rank() -> dict[str, dict[str, float]]:
    rank, params, found = torch.distributed.get_rank(), start(), {}
    with bound():
        for way, made in ALIKE.items():
            tx = made(bool(rank))
            g = {key: torch.full(p.shape, (1.0 + rank) * (ord(key) - 96)) for key, p in params.items()}
            updates, _ = tx.update(Phase.WARMUP)(g, tx.init(params), params)
            found[way] = {key: float(u.mean()) for key, u in updates.items()}
    return found
