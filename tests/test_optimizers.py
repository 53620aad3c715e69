"""The named optimizers: where they say that they differ from the papers."""

from __future__ import annotations

from functools import partial
from inspect import signature

import pytest
import torch
from registry import ADAMS, OPTIMIZERS, OTHERS

import fn
from fn import Phase, tree
from fn.adapters.deepspeed import OnebitAdam


def test_every_named_optimizer_is_registered():
    """What is not in `registry` is left out of the tests of default devices and dtypes, and of other devices."""
    made = {name for name in fn.__all__ if getattr(getattr(fn, name), "__module__", "").endswith("optimizers")}
    assert made == {optimizer.name.split(",")[0] for optimizer in (*OPTIMIZERS, *OTHERS)}


def test_a_named_optimizer_takes_at_most_twelve_arguments():
    """Whoever wants another one writes the chain, which the docstring shows."""
    names = {optimizer.name.split(",")[0] for optimizer in (*OPTIMIZERS, *OTHERS)}
    counts = {name: len(signature(getattr(fn, name)).parameters) for name in names}
    assert {name: count for name, count in counts.items() if count > 12} == {}


def test_weight_decay_of_one_bit_adam_is_decoupled():
    """Without a gradient a weight of 1 shrinks by lr * decay = 0.05; as a gradient, 0.5 is a whole step of Adam's.

    Differs: fn.optimizers.onebit_adam: weight decay is decoupled, as in the authors' code; the initialising call of
        that code is not made.
    """
    p, zero = [torch.ones(3)], [torch.zeros(3)]
    decoupled = fn.onebit_adam(0.1, weight_decay=0.5, axis="data")
    coupled = fn.onebit_adam(0.1, axis="data")
    updates, _ = decoupled.warmup_update(zero, decoupled.init(p), p)
    torch.testing.assert_close(updates[0], torch.full((3,), -0.05))
    updates, _ = coupled.warmup_update([0.5 * p[0]], coupled.init(p), p)
    torch.testing.assert_close(updates[0], torch.full((3,), -0.1))


def test_the_first_batch_of_one_bit_adam_is_not_dropped():
    """With the initialising call of DeepSpeed the first step moves nothing.

    Differs: fn.optimizers.onebit_adam: weight decay is decoupled, as in the authors' code; the initialising call of
        that code is not made.
    """
    theirs = torch.ones(3, requires_grad=True)
    optimizer = OnebitAdam([theirs], lr=0.1, initialising_call=True)
    theirs.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(theirs, torch.ones(3))
    p = [torch.ones(3)]
    tx = fn.onebit_adam(0.1, axis="data")
    updates, _ = tx.warmup_update([torch.ones(3)], tx.init(p), p)
    torch.testing.assert_close(updates[0], torch.full((3,), -0.1))


def run(tx: fn.Transform, params: torch.Tensor, phases: list[Phase], gradients: torch.Tensor) -> tuple:
    """Return the params and the state of all ranks behind steps with the same gradients (W, n)."""
    world, p = gradients.shape[0], [params]
    dims = fn.rank_dims(tx.init(p))
    state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(p)
    for phase in phases:

        def step(g, s, p, phase=phase):
            updates, s = tx.update(phase)(g, s, p)
            return fn.apply_updates(p, updates), s

        p, state = fn.simulate(step, "data", world, in_dims=(0, dims, None), out_dims=(None, dims))(
            [gradients], state, p
        )
    return p[0], state


def test_locos_scale_follows_the_gradient():
    """4 bits with a scale that was given for magnitudes up to 1 make 0.875 of 1000; ours make 875.

    Differs: fn.optimizers.loco_adamw: see `damped` and `int4`; the scale is each block's maximum, not given.
    """
    for magnitude in (1.0, 1000.0):
        g = magnitude * torch.ones(2, 16)
        given = (g[0] * 8).round().clamp(-8, 7) / 8
        assert torch.equal(given, torch.full((16,), 0.875))
        _, state = run(fn.loco_adamw(axis="data"), torch.zeros(16), [Phase.COMPRESSED], g)
        (mu,) = tree.leaves(tree.fields(state, "mu"))
        torch.testing.assert_close(mu.flatten(), torch.full((16,), 0.875 * magnitude))


def test_unused_elements_of_sharded_one_bit_adam_travel_and_do_not_move():
    """`onebit_adam` keeps their momentum at zero; here they are given their block's scale, as one bit cannot say zero.

    Differs: fn.optimizers.sharded_onebit_adam: elements that never received a gradient take part in the exchange,
        where their momentum is not zero; their params do not move.
    """
    g = torch.randn(2, 16) * (torch.arange(16) < 12)
    start = torch.randn(16)
    phases = [Phase.WARMUP, Phase.WARMUP, Phase.COMPRESSED, Phase.COMPRESSED]
    params, state = run(fn.onebit_adam(axis="data"), start, phases, g)
    assert not tree.leaves(tree.fields(state, "mu"))[0][12:].any()
    assert torch.equal(params[12:], start[12:])
    params, state = run(fn.sharded_onebit_adam(axis="data"), start, phases, g)
    whole = tree.leaves(tree.fields(state, "momentum"))[0].flatten()[:16]
    assert (whole[12:].abs() == whole[8:12].abs().max()).all()  # the second server's piece, of one block
    assert torch.equal(params[12:], start[12:])
    assert (params[:12] != start[:12]).all()


@pytest.mark.parametrize(
    ("make", "updates"), [(fn.onebit_adam, 0), (fn.sharded_onebit_adam, 256 * 4), (fn.zero_one_adam, 0)]
)
def test_each_block_of_64_has_a_scale(make, updates):
    """512 numbers on two ranks: 32 bytes of signs and four scales of 2 bytes for each of the two servers.

    Differs: fn.optimizers.onebit_adam: Each block of 64 has a scale.
    Differs: fn.optimizers.sharded_onebit_adam: Each block of 64 has a scale.
    Differs: fn.zero_one_optimizers.zero_one_adam: Each block of 64 has a scale.
    """
    tx, params, found = make(axis="data"), [torch.ones(512)], {}

    def two_steps(g):
        _, state = tx.warmup_update([g], tx.init(params), params)
        with fn.ledger() as book:
            tx.compressed_update([g], state, params)
        found.update(book.sent)
        return g

    fn.simulate(two_steps, "data", 2)(torch.linspace(1, 9, 512).expand(2, -1))
    codes = 32 + 4 * 2
    assert found == {("data", "all_to_all"): codes, ("data", "all_gather"): codes + updates}


def after_a_step(make, lr: torch.Tensor) -> torch.Tensor:
    tx, p = make(lr=lr, axis="data"), [torch.ones(3)]
    updates, _ = tx.warmup_update([torch.arange(1.0, 4.0)], tx.init(p), p)
    return fn.apply_updates(p, updates)[0]


NUMBERS = [(o, name) for o in OPTIMIZERS for name in ("b1", "b2", "eps", "weight_decay")
           if name == "weight_decay" or o in ADAMS]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "name"), NUMBERS, ids=[f"{o.name}-{name}" for o, name in NUMBERS])
def test_other_hyper_parameters_that_are_batched_are_refused_by_name(optimizer, name):
    """torch spoke of data-dependent control flow, and asked for an issue."""
    make = partial(optimizer.make, axis="data")
    with pytest.raises(TypeError, match=rf"^{name}: .* got a tensor that vmap batches; only lr may be batched"):
        torch.func.vmap(lambda value: make(**{name: value}) and value)(torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_whole_run_may_be_vmapped_over_learning_rates_and_differentiated_by_them(optimizer):
    """The comparison of the ranks at init has no one number to send then, and must not ask for it."""
    rates, one = torch.tensor([0.1, 0.2]), partial(after_a_step, optimizer.make)
    together, apart = torch.func.vmap(one)(rates), torch.stack([one(lr) for lr in rates])
    torch.testing.assert_close(together, apart)
    slopes = torch.func.vmap(torch.func.grad(lambda lr: one(lr).sum()))(rates)
    assert slopes.isfinite().all()
    assert (slopes < 0).all()


@pytest.mark.parametrize("optimizer", ADAMS, ids=[optimizer.name for optimizer in ADAMS])
@pytest.mark.filterwarnings("ignore:(eps|gradients):")
def test_b2_may_be_zero(optimizer):
    """`Optimizer` takes the steps that the pure transform takes, as torch's AdamW takes betas of (0.9, 0)."""
    make = partial(optimizer.make, axis="data", b2=0.0)
    tx, phase, start = make(lr=0.01), optimizer.phases[0], torch.linspace(-1, 1, 30).view(6, 5)
    param, pure = torch.nn.Parameter(start.clone()), [start]
    opt, state = fn.Optimizer([param], make, schedule=lambda step: phase, lr=0.01), tx.init(pure)
    for t in range(3):
        grad = torch.sin(start * (t + 2)) + 0.1
        param.grad = grad.clone()
        opt.step()
        updates, state = tx.update(phase)([grad], state, pure)
        pure = fn.apply_updates(pure, updates)
    assert not torch.equal(pure[0], start)
    torch.testing.assert_close(param.detach(), pure[0])


@pytest.mark.parametrize("make", [fn.powersgd_adamw, fn.dion])
def test_a_rank_that_rounds_to_nothing_is_one(make):
    """A fraction is rounded up, so the smallest one is rank 1: basis (5, 1) of a (6, 5) matrix."""
    for phase in (Phase.WARMUP, Phase.COMPRESSED):
        tx, p = make(axis="data", rank=1e-9), [torch.ones(6, 5)]
        state = tx.init(p)
        updates, _ = tx.update(phase)([torch.ones(6, 5)], state, p)
        assert updates[0].isfinite().all()
        assert {tuple(q.shape) for states in tree.fields(state, "q") for q in tree.leaves(states)} == {(5, 1)}
