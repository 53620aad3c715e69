"""Local steps without an anchor: params and moments are averaged where a round says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, Round, tree

EXACT = fn.compressed_average("data", fn.identity(), fn.off())


def adam(lr: float = 0.1) -> fn.Transform:
    return fn.chain(fn.scale_by_adam(0.5, 0.5), fn.scale_by_learning_rate(lr))


def guarded(lr: Any) -> fn.Transform:
    return fn.skip_nonfinite(fn.chain(fn.average("data"), fn.average_params(adam(lr), EXACT)))


def run(tx: fn.Transform, schedule: Any, gradients: Tensor) -> tuple[Tensor, Any]:
    """Return params (W, n) and states of all ranks after steps with gradients (W, T, n)."""
    world, steps, n = gradients.shape
    p = torch.zeros(n)
    dims = fn.rank_dims(tx.init(p))
    state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(p)
    params = p.expand(world, n).clone()
    for t in range(steps):

        def step(g: Tensor, s: Any, p: Tensor, t: int = t) -> tuple[Tensor, Any]:
            updates, s = tx.update(schedule(t))(g, s, p)
            return fn.apply_updates(p, updates), s

        params, state = fn.simulate(step, "data", world, in_dims=(0, dims, 0), out_dims=(0, dims))(
            gradients[:, t], state, params
        )
    return params, state


def gradients(world: int = 3, steps: int = 8, n: int = 5) -> Tensor:
    return torch.randn(world, steps, n, generator=torch.Generator().manual_seed(0))


def moments(state: Any) -> tuple[Tensor, Tensor]:
    (mu,), (nu,) = tree.fields(state.inner, "mu"), tree.fields(state.inner, "nu")
    return mu, nu


def alike(x: Tensor) -> bool:
    return bool((x == x[:1]).all())


@pytest.mark.parametrize("number", range(7))
def test_a_round_averages_what_the_bits_of_its_number_say(number: int) -> None:
    schedule = lambda t: Round(number, number) if t == 7 else Round()  # noqa: E731
    alone, before = run(fn.average_params(adam(), EXACT), lambda t: Round(), gradients())
    params, state = run(fn.average_params(adam(), EXACT), schedule, gradients())
    pairs = zip((params, *moments(state)), (alone, *moments(before)), strict=True)
    for bit, (ours, own) in enumerate(pairs):
        if number + 1 >> bit & 1:
            assert alike(ours)
            torch.testing.assert_close(ours, own.mean(0).expand_as(own))
        else:
            assert torch.equal(ours, own)
            assert not alike(ours)


def test_a_warm_up_is_that_of_the_inner_optimizer_and_may_not_follow_local_steps() -> None:
    tx, plain = fn.average_params(adam(), EXACT), adam()
    g, p = gradients(1, 1)[0, 0], torch.zeros(5)
    found, state = tx.warmup_update(g, tx.init(p), p)
    assert torch.equal(found, plain.warmup_update(g, plain.init(p), p)[0])
    _, state = tx.local_update(g, state, p)
    with pytest.raises(ValueError, match="WARMUP after 1 steps of rounds"):
        tx.warmup_update(g, state, p)


def test_an_average_that_is_not_finite_is_left_out_by_all_and_counted() -> None:
    tx = fn.average_params(fn.scale_by_learning_rate(0.1), EXACT)
    dims = fn.rank_dims(tx.init(torch.zeros(3)))
    state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(torch.zeros(3))
    p = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.inf, 0.0]])

    def step(s: Any, p: Tensor) -> Any:
        updates, s = tx.update(Round(0, 0))(torch.zeros(3), s, p)
        return fn.apply_updates(p, updates), s

    after, state = fn.simulate(step, "data", 2, in_dims=(dims, 0), out_dims=(0, dims))(state, p)
    assert torch.equal(after, p)
    assert int(state.left_out) == 1


def test_half_precision_is_averaged_in_float32() -> None:
    tx = fn.average_params(fn.scale_by_learning_rate(0.1), EXACT)
    p = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)

    def step(p: Tensor) -> Any:
        updates, _ = tx.update(Round(0, 0))(torch.zeros_like(p), tx.init(p), p)
        return fn.apply_updates(p, updates)

    assert torch.equal(fn.simulate(step, "data", 2)(p), p)


def refusals() -> dict[str, Any]:
    tx, p = fn.average_params(fn.scale_by_learning_rate(0.1), EXACT), torch.zeros(2)
    return {
        "has no first moment": lambda: tx.update(Round(1, 1))(p, tx.init(p), p),
        "a number below 7": lambda: tx.update(Round(7, 7))(p, tx.init(p), p),
        "no communication over an axis": lambda: fn.average_params(fn.average("data"), EXACT),
        "a transform, such as": lambda: fn.average_params(adam(), "mean"),
    }


@pytest.mark.parametrize("text", refusals())
def test_what_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        refusals()[text]()


CHECKED = {
    "params": (guarded, fn.every(2, start=2)),
    "moments, too": (guarded, lambda step: Phase.WARMUP if step < 2 else Round(step % 7, step % 7)),
}


def test_a_method_of_links_is_what_loops_and_adapters_rely_on() -> None:
    make, schedule = CHECKED["moments, too"]
    report = fn.testing.check_transform(make(0.01), {"w": torch.ones(4, 3), "b": torch.ones(3)}, schedule)
    assert report, report


@pytest.mark.parametrize("name", CHECKED)
def test_a_warm_up_in_a_simulated_loop_takes_params_that_are_each_ranks_own(name: str) -> None:
    """Whether that step is sound is the same on all ranks, which vmap cannot know from params that have a rank each."""
    make, schedule = CHECKED[name]
    params, _ = run(make(0.1), schedule, gradients())
    assert not params.isnan().any()
