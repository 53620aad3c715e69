"""Different transforms for different leaves, full precision for some, masks for momentum."""

from __future__ import annotations

from functools import partial
from inspect import unwrap

import pytest
import torch

import fn
from fn import tree


def labels(params: dict[str, torch.Tensor]) -> dict[str, str]:
    return tree.map(lambda p: "full" if p.ndim < 2 else "codes", params)


def test_each_label_gets_its_own_transform() -> None:
    halve, double = (fn.stateless(lambda u, p, k=k: tree.map(lambda x: k * x, u)) for k in (0.5, 2.0))
    tx = fn.partition({"full": halve, "codes": double}, labels)
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    updates, state = tx.warmup_update(params, tx.init(params), params)
    assert torch.equal(updates["w"], 2 * torch.ones(2, 2))
    assert torch.equal(updates["b"], 0.5 * torch.ones(2))
    assert set(state) == {"full", "codes"}


def test_labels_are_taken_in_one_order_whatever_that_of_the_mapping() -> None:
    """Ranks do not compare it, and would wait for each other without end."""
    taken: list[str] = []

    def noting(label: str) -> fn.Transform:
        return fn.stateless(lambda updates, params: taken.append(label) or updates)

    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    for order in (("codes", "full"), ("full", "codes")):
        tx = fn.partition({label: noting(label) for label in order}, labels)
        tx.warmup_update(params, tx.init(params), params)
    assert taken == ["codes", "full"] * 2


def test_unfrozen_leaves_stay_in_full_precision_while_the_others_travel_as_codes() -> None:
    """What `non_freeze` groups are: biases in exact data-parallel Adam, matrices in 1-bit Adam."""
    make = partial(fn.onebit_adam, lr=0.1, axis="data")
    mixed = fn.partition({"codes": make(), "full": fn.unfrozen(make())}, labels)
    exact = make()
    params = {"w": torch.randn(8, 4), "b": torch.randn(8)}

    def advance(tx, phase, params, state, grads):
        updates, state = tx.update(phase)(grads, state, params)
        return fn.apply_updates(params, updates), state

    found = {}
    for name, tx, after in (("mixed", mixed, fn.Phase.COMPRESSED), ("exact", exact, fn.Phase.WARMUP)):
        generator = torch.Generator().manual_seed(0)
        state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=fn.rank_dims(tx.init(params)))(params)
        dims, p = fn.rank_dims(state), params
        for phase in (fn.Phase.WARMUP, after, after):
            grads = {k: torch.randn(2, *x.shape, generator=generator) for k, x in params.items()}
            run = fn.simulate(partial(advance, tx, phase), "data", 2, in_dims=(None, dims, 0), out_dims=(None, dims))
            p, state = run(p, state, grads)
        found[name] = p
    torch.testing.assert_close(found["mixed"]["b"], found["exact"]["b"])
    assert not torch.allclose(found["mixed"]["w"], found["exact"]["w"])


def test_a_phase_that_one_label_lacks_the_partition_lacks() -> None:
    tx = fn.partition({"codes": fn.onebit_adam(axis="data"), "full": fn.adamw(axis="data")}, labels)
    with pytest.raises(ValueError, match="COMPRESSED"):
        tx.update(fn.Phase.COMPRESSED)
    assert unwrap(tx.update(fn.Phase.WARMUP)) is tx.warmup_update


@pytest.mark.parametrize("bad", [{"w": "other", "b": "full"}, {"w": "full"}])
def test_labels_that_do_not_fit_are_refused(bad: dict[str, str]) -> None:
    tx = fn.partition({"full": fn.scale_by_learning_rate(1.0)}, bad)
    with pytest.raises(ValueError, match="labels"):
        tx.init({"w": torch.ones(2, 2), "b": torch.ones(2)})
