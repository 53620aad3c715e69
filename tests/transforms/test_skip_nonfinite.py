"""`skip_nonfinite`: a step that is not finite moves nothing, on any rank, and is counted."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from simulated import same_bits

import fn
from fn import Phase, tree


def guarded() -> fn.Transform:
    sync = fn.compressed_average("data", fn.sign())
    return fn.skip_nonfinite(fn.chain(fn.average("data"), fn.scale_by_onebit_adam(sync=sync)))


def step(tx, phase, world):
    return fn.simulate(lambda g, s: tx.update(phase)([g], s, [g]), "data", world)


@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.COMPRESSED])
def test_a_bad_number_where_no_gradient_ever_came_is_seen_too(phase):
    """Momentum is kept at zero there, which must not hide the number: it would stay in the error."""
    tx = guarded()
    state = fn.simulate(lambda p: tx.init([p]), "data", 2)(torch.ones(2, 20))
    seen = (torch.arange(20) < 10) * torch.randn(2, 20)
    _, state = step(tx, Phase.WARMUP, 2)(seen, state)
    g = seen.clone()
    g[1, 15] = float("nan")
    (u,), after = step(tx, phase, 2)(g, state)
    assert same_bits(after.inner, state.inner)
    assert after.skipped.tolist() == [1, 1]
    assert torch.equal(u, torch.zeros(2, 20))


def test_a_bad_number_in_a_block_that_is_kept_at_zero_is_seen_too():
    sync = fn.compressed_average("data", fn.sign(block=8))
    tx = fn.skip_nonfinite(fn.chain(fn.average("data"), fn.scale_by_onebit_adam(sync=sync)))
    state = fn.simulate(lambda p: tx.init([p]), "data", 2)(torch.ones(2, 32))
    seen = (torch.arange(32) < 8) * torch.randn(2, 32)
    _, state = step(tx, Phase.WARMUP, 2)(seen, state)
    g = seen.clone()
    g[0, 30] = float("inf")
    _, after = step(tx, Phase.COMPRESSED, 2)(g, state)
    assert same_bits(after.inner, state.inner)
    assert after.skipped.tolist() == [1, 1]


def test_a_second_moment_that_overflows_is_as_in_torch():
    """The update is 0 then, which is finite; all of it is what torch.optim.AdamW does."""
    p = torch.nn.Parameter(torch.ones(2))
    theirs = torch.optim.AdamW([p], lr=0.1)
    tx, params = fn.skip_nonfinite(fn.adamw(0.1)), [torch.ones(2)]
    state = tx.init(params)
    for g in (torch.tensor([1.0, 1e25]), torch.tensor([1.0, 1.0])):
        p.grad = g
        theirs.step()
        updates, state = tx.warmup_update([g], state, params)
        params = fn.apply_updates(params, updates)
        torch.testing.assert_close(params[0], p.detach())
    assert state.skipped == 0


def test_a_counter_that_is_a_number_of_python_is_refused_by_its_path():
    counting = fn.lift(lambda p: {"t": 0}, lambda updates, state, params: (updates, {"t": state["t"] + 1}))
    tx = fn.skip_nonfinite(fn.chain(fn.scale_by_learning_rate(0.1), counting))
    x = [torch.ones(2)]
    with pytest.raises(TypeError, match=r"state.inner: expected leaf '1\.t' .*, but got int; use torch\.zeros"):
        tx.warmup_update(x, tx.init(x), x)


def test_a_guard_around_a_guard_skips_what_the_inner_one_skips():
    inner = fn.skip_nonfinite(fn.scale_by_adam())
    tx = fn.skip_nonfinite(fn.chain(fn.scale_by_adam(), inner))
    p = [torch.ones(3)]
    state = tx.init(p)
    _, after = tx.warmup_update([torch.tensor([1.0, float("nan"), 1.0])], state, p)
    assert same_bits(after.inner, state.inner)
    assert after.skipped == 1


def guarded_in_front(*behind):
    return fn.chain(fn.skip_nonfinite(fn.clip_by_global_norm(1.0)), fn.average("data"), *behind)


@pytest.mark.parametrize("around", [fn.skip_nonfinite, lambda tx: fn.skip_nonfinite(fn.chain(tx))])
def test_what_a_guard_in_front_of_an_exchange_skips_on_one_rank_all_ranks_skip(around):
    """Nobody but that rank knows of it, unless it sends something that is not finite."""
    tx = around(guarded_in_front(fn.scale_by_adam()))
    state = fn.simulate(lambda p: tx.init([p]), "data", 2)(torch.ones(2, 5))
    g = torch.randn(2, 5)
    _, state = step(tx, Phase.WARMUP, 2)(g, state)
    g[1, 3] = float("nan")
    (u,), after = step(tx, Phase.WARMUP, 2)(g, state)
    assert torch.equal(u, torch.zeros(2, 5))
    assert after.skipped.tolist() == [1, 1]
    assert same_bits(after.inner, state.inner)
    assert tree.flatten(after)[1] == tree.flatten(state)[1]


def test_a_guard_in_front_of_an_exchange_with_none_around_it_sends_zeros():
    tx = guarded_in_front()
    state = fn.simulate(lambda p: tx.init([p]), "data", 2)(torch.ones(2, 2))
    (u,), _ = step(tx, Phase.WARMUP, 2)(torch.tensor([[0.5, 0.25], [float("nan"), 0.0]]), state)
    assert torch.equal(u, torch.tensor([[0.25, 0.125]] * 2))


def guarded_in_front_on_ranks() -> list[tuple[list[float], int]]:
    p, found = torch.nn.Parameter(torch.ones(3)), []
    with fn.bind({"data": dist.group.WORLD}):
        make = lambda lr: guarded_in_front(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))  # noqa: E731
        opt = fn.Optimizer([p], make)
    for t in range(3):
        p.grad = torch.full((3,), 1.0 + dist.get_rank())
        if t == 1 and dist.get_rank() == 1:
            p.grad[0] = float("nan")
        opt.step()
        found.append((p.tolist(), opt.skipped))
    return found


def test_behind_an_optimizer_no_rank_waits_for_what_a_guard_in_front_of_an_exchange_skipped():
    first, second = ranks.run(2, guarded_in_front_on_ranks)
    assert first == second
    assert [skipped for _, skipped in first] == [0, 1, 1]
    assert first[0][0] == first[1][0] != first[2][0]
