"""Local steps without an anchor: params and moments are averaged where a round says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import fn
from fn import Phase, Round, tree

EXACT = fn.sparse_average("data", 1.0)


def adam(lr: float = 0.1) -> fn.Transform:
    return fn.chain(fn.scale_by_adam(0.5, 0.5), fn.scale_by_learning_rate(lr))


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


def test_periods_say_when_each_is_due() -> None:
    schedule = fn.periods(2, 3, 4, start=1)
    assert schedule(0) is Phase.WARMUP
    numbers = [schedule(t).begin for t in range(1, 13)]
    assert numbers == [None, 0, 1, 4, None, 2, None, 4, 1, 0, None, 6]
    assert [schedule(t).end for t in range(1, 13)] == numbers
    for bad in ({"params": 0}, {"first_moment": 1.5}, {"second_moment": -1}, {"start": -1}):
        with pytest.raises(ValueError, match=rf"{next(iter(bad))}: expected a whole number"):
            fn.periods(**{"params": 1, "first_moment": 1, "second_moment": 1, **bad})


def test_the_moment_of_a_step_is_averaged_behind_it() -> None:
    """At period 1 what all ranks hold behind step t is the mean of their own moments of step t.

    Differs: fn.local_optimizers.des_loc: a moment is averaged after the step that its period ends with; the paper
        averages the moment of the last step just before it is used, which is one step later.
    """
    tx, g = fn.des_loc(0.1, b1=0.5, b2=0.5, axis="data"), gradients(2, 1)
    dims = fn.rank_dims(tx.init(g[0, 0]))

    def step(g: Tensor) -> Any:
        return tx.update(Round(1, 1))(g, tx.init(g), torch.zeros_like(g))[1]

    state = fn.simulate(step, "data", 2, out_dims=dims)(g[:, 0])
    (mu,) = tree.fields(state, "mu")
    torch.testing.assert_close(mu, (0.5 * g[:, 0].mean(0)).expand(2, -1))


def test_sparta_sends_no_mask() -> None:
    """In every step each rank sends a number of each piece, and nothing else.

    Differs: fn.local_optimizers.sparta: as `sparse_average`: as many numbers in each step, of which no mask is sent.
    """
    tx = fn.sparta(0.1, axis="data", density=0.1)
    g = gradients(4, 1, 1000)
    dims = fn.rank_dims(tx.init(g[0, 0]))

    def step(g: Tensor) -> Any:
        updates, state = tx.update(Round(0, 0))(g, tx.init(g), torch.zeros_like(g))
        return fn.apply_updates(torch.zeros_like(g), updates), state

    with fn.ledger() as sent:
        params, _ = fn.simulate(step, "data", 4, out_dims=(0, dims))(g[:, 0])
    assert sent.sent == {("data", "all_reduce"): 2 * 3 * 100 * 4 // 4}
    assert int((params == params[:1]).all(0).sum()) >= 100


def test_a_warm_up_is_that_of_the_inner_optimizer_and_may_not_follow_local_steps() -> None:
    tx, plain = fn.average_params(adam(), EXACT), adam()
    g, p = gradients(1, 1)[0, 0], torch.zeros(5)
    found, state = tx.warmup_update(g, tx.init(p), p)
    assert torch.equal(found, plain.warmup_update(g, plain.init(p), p)[0])
    _, state = tx.local_update(g, state, p)
    with pytest.raises(ValueError, match="WARMUP after 1 steps of rounds"):
        tx.warmup_update(g, state, p)


def test_a_warm_up_step_that_is_not_finite_is_skipped_by_all() -> None:
    tx = fn.sparta(0.1, axis="data")
    dims = fn.rank_dims(tx.init(torch.zeros(3)))

    def step(g: Tensor) -> Any:
        return tx.warmup_update(g, tx.init(torch.zeros(3)), torch.zeros(3))

    g = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.nan, 3.0]])
    updates, state = fn.simulate(step, "data", 2, out_dims=(None, dims))(g)
    assert torch.equal(updates, torch.zeros(3))
    assert int(state.skipped) == 1
    assert torch.equal(tree.fields(state, "mu")[0], torch.zeros(2, 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_rank_leaves_out_its_own_bad_step_and_still_takes_part(bad: float) -> None:
    g = gradients(2, 2)
    g[1, 1, 2] = bad
    params, state = run(fn.average_params(adam(), EXACT), fn.every(2), g)
    assert state.dropped.tolist() == [0, 1]
    assert alike(params)
    assert params.isfinite().all()
    assert int(state.sync[0].left_out) == 0


def test_params_that_are_not_finite_stop_no_other_turn() -> None:
    """The turn counts on all ranks, or later shares of theirs would be other ones."""
    tx = fn.average_params(fn.scale_by_learning_rate(0.1), fn.sparse_average("data", 0.25))
    dims = fn.rank_dims(tx.init(torch.zeros(8)))
    state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(torch.zeros(8))
    p = torch.zeros(2, 8)
    p[1, 3] = torch.inf

    def step(s: Any, p: Tensor) -> Any:
        updates, s = tx.update(Round(0, 0))(torch.zeros(8), s, p)
        return fn.apply_updates(p, updates), s

    for _ in range(12):
        p, state = fn.simulate(step, "data", 2, in_dims=(dims, 0), out_dims=(0, dims))(state, p)
    assert int(state.sync[0].turn) == 12
    assert 0 < int(state.sync[0].left_out) < 12
    assert p[0].isfinite().all()


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
    "sparta": (lambda lr: fn.sparta(lr, axis="data", density=0.3), fn.every(1, start=2)),
    "des_loc": (lambda lr: fn.des_loc(lr, axis="data"), fn.periods(2, 3, 4, start=2)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_named_method_is_what_loops_and_adapters_rely_on(name: str) -> None:
    make, schedule = CHECKED[name]
    report = fn.testing.check_transform(make(0.01), {"w": torch.ones(4, 3), "b": torch.ones(3)}, schedule)
    assert report, report


@pytest.mark.parametrize("name", CHECKED)
def test_a_warm_up_in_a_simulated_loop_takes_params_that_are_each_ranks_own(name: str) -> None:
    """Whether that step is sound is the same on all ranks, which vmap cannot know from params that have a rank each."""
    make, schedule = CHECKED[name]
    params, _ = run(make(0.1), schedule, gradients())
    assert not params.isnan().any()


def trained(name: str) -> dict[str, Any]:
    """Return what a rank of two has after steps of `fn.Optimizer`, of a pure loop, and resumed in the middle."""
    make, schedule = CHECKED[name]
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]
    mine = torch.Generator().manual_seed(10 + dist.get_rank())
    all_grads = [[torch.randn(x.shape, generator=mine) for x in start] for _ in range(9)]

    def take(opt: fn.Optimizer, grads: list[Tensor]) -> list[Tensor]:
        params: list[Tensor] = opt.param_groups[0]["params"]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        opt.step()
        return [p.detach().clone() for p in params]

    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer([torch.nn.Parameter(x.clone()) for x in start], make, schedule=schedule, lr=0.05)
        tx, pure = make(0.05), [x.clone() for x in start]
        state = tx.init(pure)
        for t, grads in enumerate(all_grads):
            found = take(opt, grads)
            updates, state = tx.update(schedule(t))(grads, state, pure)
            pure = fn.apply_updates(pure, updates)
            if t == 5:
                saved, held = copy.deepcopy(opt.state_dict()), found
        again = fn.Optimizer([torch.nn.Parameter(x.clone()) for x in start], make, schedule=schedule, lr=0.05)
        for p, x in zip(again.param_groups[0]["params"], held, strict=True):
            p.data.copy_(x)
        again.load_state_dict(saved)
        for grads in all_grads[6:]:
            resumed = take(again, grads)
    return {"found": found, "pure": pure, "resumed": resumed}


@pytest.mark.parametrize("name", CHECKED)
def test_the_optimizer_takes_the_steps_of_a_pure_loop_and_resumes_bit_for_bit(name: str) -> None:
    first, second = ranks.run(2, trained, name)
    for each in (first, second):
        for ours, theirs in zip(each["found"], each["pure"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
        for ours, theirs in zip(each["found"], each["resumed"], strict=True):
            assert torch.equal(ours, theirs)
    if name == "sparta":
        assert not torch.equal(first["found"][0], second["found"][0])
