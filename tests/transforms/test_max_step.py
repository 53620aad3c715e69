"""`max_step`: compressed steps are clamped, what travels and what is kept is not, and the same steps are skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chains
import pytest
import torch

import fn
from fn import Phase, tree

WORLD, LR = 2, 0.1
MAKES: dict[str, Callable[..., fn.Transform]] = {
    "onebit_adam": fn.onebit_adam,
    "the paper's": partial(chains.onebit_adam, bias_correction=False),
    "sharded_onebit_adam": fn.sharded_onebit_adam,
    "onebit_lamb": chains.onebit_lamb,
    "zero_one_adam": fn.zero_one_adam,
}


def frozen(make: Callable[..., fn.Transform], sizes: torch.Tensor) -> tuple[Any, Any, Callable[..., Any]]:
    """Freeze the second moments of gradients of some sizes; return params, state and the compressed step."""
    tx, params = make(LR, axis="data"), torch.zeros(len(sizes))
    dims, noise = fn.rank_dims(tx.init(params)), torch.Generator().manual_seed(0)
    state = fn.simulate(tx.init, "data", WORLD, in_dims=None, out_dims=dims)(params)
    place = 0 if fn.roles.find(state, "copies") else None  # an anchor is kept by each rank
    params = params.expand(WORLD, -1).clone() if place == 0 else params

    def step(phase: Phase, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        def one(p: Any, s: Any, g: Any) -> tuple[Any, Any]:
            u, s = tx.update(phase)(g, s, p)
            return fn.apply_updates(p, u), s

        return fn.simulate(one, "data", WORLD, in_dims=(place, dims, 0), out_dims=(place, dims))(params, state, grads)

    for _ in range(5):
        grads = sizes * torch.randn(WORLD, len(sizes), generator=noise)
        params, state = step(Phase.WARMUP, params, state, grads)
    return params, state, lambda params, state, grads, phase=Phase.COMPRESSED: step(phase, params, state, grads)


SLEEPS = torch.tensor([1.0, 1.0, 1e-6, 1.0, 1e-6, 1.0, 1.0, 1.0])
"""Sizes of gradients: two elements are all but asleep when the second moment is frozen."""


@pytest.mark.parametrize("name", MAKES)
def test_no_element_moves_further_than_max_step(name: str) -> None:
    """
    Differs: fn.transforms.adam.scale_by_onebit_adam: The step of the compressed phase is clamped to `max_step`.
    Differs: fn.optimizers.onebit_adam: The step of the compressed phase is clamped to `max_step`.
    Differs: fn.optimizers.sharded_onebit_adam: The step of the compressed phase is clamped to `max_step`.
    """
    moves = {}
    for limit in (None, 1.0, 0.25):
        before, state, step = frozen(partial(MAKES[name], max_step=limit), SLEEPS)
        after, state = step(before, state, SLEEPS * torch.ones(WORLD, 1))
        ratio = float(tree.leaves(tree.fields(state, "ratio"))[0]) if name == "onebit_lamb" else 1.0
        moves[limit] = (after - before).abs().amax() / (LR * ratio)
    assert moves[None] > 100
    torch.testing.assert_close(torch.stack([moves[1.0], moves[0.25]]), torch.tensor([1.0, 0.25]))


@pytest.mark.parametrize("name", [name for name in MAKES if name != "zero_one_adam"])
def test_the_momentum_and_the_residuals_are_untouched(name: str) -> None:
    states = []
    for limit in (None, 0.5):
        params, state, step = frozen(partial(MAKES[name], max_step=limit), SLEEPS)
        states.append(step(params, state, torch.ones(WORLD, len(SLEEPS)))[1])
    for field in ("mu", "momentum", "worker", "server"):
        assert all(map(torch.equal, *(tree.leaves(tree.fields(state, field)) for state in states))), field


def test_zero_one_adam_clamps_the_steps_of_all_phases_and_no_momentum() -> None:
    """Any of them may follow a synchronising step, whose momentum is of codes.

    Differs: fn.transforms.zero_one_adam.scale_by_zero_one_adam: Steps are clamped to `max_step`.
    Differs: fn.zero_one_optimizers.zero_one_adam: Steps are clamped to `max_step`.
    """
    momenta = []
    for phase in (Phase.WARMUP, Phase.LOCAL, Phase.COMPRESSED):
        for limit in (None, 0.5):
            params, state, step = frozen(partial(fn.zero_one_adam, max_step=limit), SLEEPS)
            params, state = step(params, state, torch.ones(WORLD, len(SLEEPS)))
            momenta.append(tree.fields(state, "mu")[0])
            after, _ = step(params, state, SLEEPS * torch.ones(WORLD, 1), phase=phase)
        torch.testing.assert_close((after - params).abs().amax(), torch.tensor(0.5 * LR))
        torch.testing.assert_close(*momenta[-2:])


@pytest.mark.parametrize("name", MAKES)
def test_a_clamp_hides_no_step_that_is_skipped_without_one(name: str) -> None:
    skips = []
    for limit in (None, 1.0):
        params, state, step = frozen(partial(MAKES[name], max_step=limit), torch.full((8,), 1e-6))
        after, state = step(params, state, torch.full((WORLD, 8), float("inf")))
        assert torch.equal(after, params)
        skips.append([int(x) for x in fn.roles.find(state, "skips")])
    assert skips[0] == skips[1]
    assert sum(skips[0]) == 1


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), "1"])
@pytest.mark.parametrize("make", [fn.onebit_adam, chains.onebit_lamb, fn.zero_one_adam, fn.sharded_onebit_adam])
def test_a_max_step_that_is_no_number_above_zero_is_refused(make: Any, limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_step: expected a number"):
        make(axis="data", max_step=limit)
