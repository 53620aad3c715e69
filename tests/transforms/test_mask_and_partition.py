"""`mask`: a transform for some leaves only."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import fn
from fn import Phase, tree
from fn.base import has_phase

PARAMS = {"w": torch.ones(2, 3), "b": torch.ones(3)}


def no_vectors(params):
    return tree.map(lambda p: p.ndim > 1, params)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("chosen", [no_vectors, {"w": True, "b": False}], ids=["function", "tree"])
def test_only_chosen_leaves_are_transformed(phase, chosen):
    tx = fn.mask(fn.add_decayed_weights(0.5), chosen)
    u = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    found, _ = tx.update(phase)(u, tx.init(PARAMS), PARAMS)
    assert torch.equal(found["w"], torch.full((2, 3), 0.5))
    assert found["b"] is u["b"]


def test_the_state_is_that_of_the_chosen_leaves():
    tx = fn.mask(fn.scale_by_adam(), no_vectors)
    state = tx.init(PARAMS)
    assert [tuple(m.shape) for m in state.mu] == [(2, 3)]
    u = tree.map(torch.ones_like, PARAMS)
    found, after = tx.update(Phase.WARMUP)(u, state, PARAMS)
    alone, _ = fn.scale_by_adam().warmup_update([u["w"]], fn.scale_by_adam().init([PARAMS["w"]]), [PARAMS["w"]])
    assert torch.equal(found["w"], alone[0])
    assert after.step == 1


def test_nothing_chosen_and_everything_chosen():
    u = tree.map(torch.ones_like, PARAMS)
    for keep in (True, False):
        tx = fn.mask(fn.add_decayed_weights(1.0), {"w": keep, "b": keep})
        found, _ = tx.update(Phase.LOCAL)(u, tx.init(PARAMS), PARAMS)
        assert all(torch.equal(leaf, torch.full_like(leaf, 2.0 if keep else 1.0)) for leaf in tree.leaves(found))


@pytest.mark.parametrize("phase", list(Phase))
def test_it_has_the_phases_of_the_inner_transform(phase):
    inner = fn.adamw()
    assert has_phase(fn.mask(inner, no_vectors), phase) == has_phase(inner, phase)
    if not has_phase(inner, phase):
        with pytest.raises(ValueError, match=f"phase.*{phase.name}"):
            fn.mask(inner, no_vectors).update(phase)


def test_a_compressed_mean_of_some_leaves_keeps_its_errors_under_simulate():
    tx = fn.mask(fn.compressed_average("data", fn.sign()), {"w": True, "b": False})
    u = {"w": torch.randn(2, 2, 3), "b": torch.randn(2, 3)}
    state = fn.simulate(tx.init, "data", 2)(u)
    found, state = fn.simulate(lambda u, s: tx.compressed_update(u, s, u), "data", 2)(u, state)
    assert torch.equal(found["w"][0], found["w"][1])
    assert torch.equal(found["b"], u["b"])
    assert state.worker[0].any()


def test_a_mask_of_another_structure_is_refused_by_name():
    with pytest.raises(ValueError, match="mask: has another structure"):
        fn.mask(fn.scale_by_adam(), {"w": True}).init(PARAMS)


def test_a_mask_of_numbers_is_refused_by_leaf():
    with pytest.raises(TypeError, match=r"^mask: .*leaf 'b' .* got int"):
        fn.mask(fn.scale_by_adam(), {"w": True, "b": 0}).init(PARAMS)


@pytest.mark.parametrize("make", [fn.dion, fn.muloco])
@pytest.mark.parametrize("labels", [None, ("other", "hidden", "other"), ["other", "hidden", "other"]])
@pytest.mark.parametrize("kind", [tuple, list])
def test_labels_in_a_list_or_a_tuple_fit_params_in_either(make, labels, kind):
    params = kind(torch.ones(shape) for shape in [(4, 3), (3, 3), (3,)])
    tx = make(0.1, axis="data", labels=labels)
    updates, _ = tx.update(Phase.WARMUP)(params, tx.init(params), params)
    assert type(updates) is kind
    assert all(u.any() for u in updates)


def test_params_in_a_named_tuple_need_no_labels():
    class Params(NamedTuple):
        weight: torch.Tensor
        bias: torch.Tensor

    params = Params(torch.ones(4, 3), torch.ones(3))
    labels: Any = Params("hidden", "other")  # type: ignore[arg-type]
    for tx in (fn.dion(0.1, axis="data", labels=labels), fn.dion(0.1, axis="data")):
        updates, _ = tx.update(Phase.WARMUP)(params, tx.init(params), params)
        assert type(updates) is Params
