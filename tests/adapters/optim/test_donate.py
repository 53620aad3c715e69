"""`donate` changes where results are, never what they are."""

from __future__ import annotations

import pytest
import torch

import fn
from fn import Phase, tree


def test_state_buffers_stay_and_results_are_those_of_the_pure_update():
    tx = fn.onebit_adam(axis="data")
    p = [torch.randn(5), torch.randn(2, 3)]
    pure, donated = tx.init(p), tx.init(p)
    pointers = [x.data_ptr() for x in tree.leaves(donated)]
    for phase in (Phase.WARMUP, Phase.COMPRESSED, Phase.COMPRESSED):
        g = [torch.randn_like(x) for x in p]
        u, pure = tx.update(phase)(g, pure, p)
        v, after = fn.donate(tx.update(phase))(g, donated, p)
        assert after is donated
        assert all(map(torch.equal, u, v))
        assert all(map(torch.equal, tree.leaves(pure), tree.leaves(donated)))
    assert [x.data_ptr() for x in tree.leaves(donated)] == pointers


def test_leaves_that_change_places_do_not_overwrite_each_other():
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    state = (a, b)
    fn.donate(lambda u, s, p: (u, (s[1], s[0])))([], state, [])
    assert (float(a), float(b)) == (2.0, 1.0)


def test_an_update_that_is_the_old_state_survives_the_new_one():
    """A link that delays by one step returns its old state."""
    state = [torch.zeros(2)]
    (u,), _ = fn.donate(lambda u, s, p: (s, u))([torch.ones(2)], state, [])
    assert torch.equal(u, torch.zeros(2))
    assert torch.equal(state[0], torch.ones(2))


@pytest.mark.parametrize(
    "after",
    [(torch.ones(2), torch.ones(1)), (torch.ones(2),), (torch.ones(2), torch.ones((), dtype=torch.float64))],
    ids=["shape", "structure", "dtype"],
)
def test_an_update_that_changes_the_form_of_the_state_is_refused_and_writes_nothing(after):
    state = (torch.zeros(2), torch.zeros(()))
    with pytest.raises(ValueError, match="update: changed"):
        fn.donate(lambda u, s, p: (u, after))([], state, [])
    assert not any(x.any() for x in state)


def test_compiled_steps_write_numbers_without_a_dimension_too():
    """Without a view of them, those of float64 stayed at zero: AdamW corrected the bias of the first step for good."""
    torch._dynamo.reset()
    state, one = [torch.zeros((), dtype=torch.float64)], [torch.ones((), dtype=torch.float64)]
    count = torch.compile(fn.donate(lambda u, s, p: (u, [s[0] + u[0]])), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        count(one, state, one)
    assert state == [3.0]


@pytest.mark.parametrize("view", [torch.detach, lambda x: x.view(-1), lambda x: x.flatten()[:2]])
def test_a_view_of_an_old_leaf_is_not_overwritten_before_it_moves(view):
    """A link that remembers the state before: what it kept was the new one."""
    state = (torch.zeros(2), torch.zeros(2))
    fn.donate(lambda u, s, p: (u, (s[0] + 1, view(s[0]))))([], state, [])
    assert (state[0].tolist(), state[1].tolist()) == ([1, 1], [0, 0])


def shares(kind):
    """Return a transform whose state begins in memory that is not its own."""

    def init(params):
        zeros = tree.map(torch.zeros_like, params)
        views = tree.map(torch.detach, params)
        folded = tree.map(lambda p: p.new_zeros(()).expand(p.shape), params)
        found = {"params": (params, zeros), "views": (views, zeros), "twins": (zeros, zeros), "folded": (folded, zeros)}
        return found[kind]

    def update(updates, state, params, /):
        slow = tree.map(lambda s, p, g: 0.5 * (s + p) + g, state[0], params, updates)
        seen = tree.map(lambda s, g: s + g * g, state[1], updates)
        out = tree.map(lambda g, s, p, v: -0.1 * g + 0.3 * (s - p) - 0.1 * v, updates, state[0], params, state[1])
        return out, (slow, seen)

    return fn.lift(init, update)


@pytest.mark.parametrize("kind", ["params", "views", "twins", "folded"])
def test_the_optimizer_trains_as_the_pure_function_whatever_a_state_begins_as(kind):
    p, pure = torch.nn.Parameter(torch.ones(3)), [torch.ones(3)]
    tx, opt = shares(kind), fn.Optimizer([p], lambda lr: shares(kind), lr=0.1)
    state = tx.init(pure)
    for t in range(4):
        p.grad = torch.arange(3.0) + t
        updates, state = tx.update(Phase.WARMUP)([p.grad.clone()], state, pure)
        pure = fn.apply_updates(pure, updates)
        opt.step()
    torch.testing.assert_close(p.detach(), pure[0])


@pytest.mark.parametrize("kind", ["params", "views", "twins"])
def test_a_state_in_memory_that_is_not_its_own_is_refused_and_nothing_is_written(kind):
    params, tx = [torch.ones(3)], shares(kind)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"state: expected leaf .* of its own, but got that of another leaf"):
        fn.donate(tx.update(Phase.WARMUP))([torch.ones(3)], state, params)
    assert torch.equal(params[0], torch.ones(3))
