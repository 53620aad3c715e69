"""0/1 Adam against the paper, how little its ranks drift, and where it differs from DeepSpeed."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import chains
import numpy as np
import pytest
import torch
from oracle_family import ZeroOneAdam

import fn
from fn import tree
from fn.adapters.deepspeed import transforms as deepspeed

SHAPES = [(7, 5), (13,), (1,), (0,)]
KINDS = {fn.Phase.WARMUP: "variance", fn.Phase.COMPRESSED: "sync", fn.Phase.LOCAL: "local"}


def gradients(world: int, step: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn((world, *shape), generator=generator, dtype=dtype) for shape in SHAPES]


def begin(tx: fn.Transform, world: int, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any]:
    """Return params (W, ...), state and its rank dims."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(params)
    return [p.expand(world, *p.shape).contiguous() for p in params], state, dims


def runs(tx: fn.Transform, dims: Any, world: int) -> dict[fn.Phase, Any]:
    def advance(phase: fn.Phase, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(phase)(grads, state, params)
        return fn.apply_updates(params, updates), state

    return {
        phase: fn.simulate(partial(advance, phase), "data", world, in_dims=(0, dims, 0), out_dims=(0, dims))
        for phase in fn.Phase
    }


@pytest.mark.parametrize(
    ("world", "weight_decay", "max_step", "corrected"),
    [(1, 0.1, None, True), (3, 0.0, None, True), (3, 0.1, 0.5, False), (4, 0.1, 0.5, True)],
)
def test_zero_one_adam_is_the_papers(world: int, weight_decay: float, max_step: float | None, corrected: bool) -> None:
    hyper = {"lr": 0.02, "b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": weight_decay, "bias_correction": corrected}
    tx = chains.zero_one_adam(axis="data", max_step=max_step, **hyper)
    schedule = fn.zero_one_schedule(8, 2, 4, 4)
    params, state, dims = begin(tx, world)
    oracle = ZeroOneAdam([p[0].numpy().ravel() for p in params], world, max_step=max_step or np.inf, **hyper)
    steps, seen = runs(tx, dims, world), set()
    for step in range(30):
        phase, grads = schedule(step), gradients(world, step)
        params, state = steps[phase](params, state, grads)
        oracle.step([[g[r].numpy().ravel() for g in grads] for r in range(world)], KINDS[phase])
        seen.add(phase)
        for i, ours in enumerate(params):
            for r in range(world):
                np.testing.assert_allclose(ours[r].numpy().ravel(), oracle.params[r][i], rtol=0, atol=1e-9)
    assert seen == set(fn.Phase)


def spread(params: list[torch.Tensor]) -> float:
    return max(float((p - p[:1]).abs().max()) for p in params if p.numel())


@pytest.mark.reliability
@pytest.mark.parametrize("anchored", [True, False])
def test_ranks_agree_after_2000_steps_because_they_return_to_an_anchor(anchored: bool) -> None:
    """Without the anchor, as in DeepSpeed, they are more than 1e-7 apart.

    Differs: fn.transforms.zero_one_adam.scale_by_zero_one_adam: The ranks return to the anchor instead of taking their
        steps back, so they do not drift apart by rounding.
    """
    world, lr = 4, 1e-3
    sync = fn.compressed_average("data", fn.sign())
    theirs = partial(deepspeed.scale_by_zero_one_adam, lr, 0.9, 0.999, 1e-8, 0.0, frozen=True, alone=False)
    link = fn.scale_by_zero_one_adam(lr, sync=sync) if anchored else theirs(sync=sync)
    tx = fn.chain(fn.average("data"), link)
    schedule = fn.zero_one_schedule(20, 4, 50, 4)
    params, state, dims = begin(tx, world, torch.float32)
    steps = runs(tx, dims, world)
    last = 0.0
    for step in range(2001):
        params, state = steps[schedule(step)](params, state, gradients(world, step % 50, torch.float32))
        if schedule(step) is not fn.Phase.LOCAL:
            last = spread(params)
    if anchored:
        assert last <= 1e-7, f"the ranks are {last} apart"
    else:
        assert last > 1e-7, "taking steps back no longer drifts: `Differs` is out of date"


def test_decay_stays_out_of_the_momentum_which_deepspeeds_does_not() -> None:
    """With gradients of zero the momentum rebuilt at a synchronisation is zero, and DeepSpeed's is the decay."""
    momenta = {}
    for inside in (False, True):
        sync = fn.compressed_average("data", fn.sign())
        tx = fn.scale_by_zero_one_adam(0.1, weight_decay=0.5, sync=sync)
        if inside:
            hyper = 0.1, 0.9, 0.999, 1e-8, 0.5
            tx = deepspeed.scale_by_zero_one_adam(*hyper, sync=sync, frozen=True, alone=False)
        params = [torch.ones(8)]
        state: Any = tx.init(params)
        _, state = tx.warmup_update([torch.ones(8)], state, params)
        state = state._replace(mu=[torch.zeros(8)], **({} if inside else {"anchor": params}))
        updates, state = tx.local_update([torch.zeros(8)], state, params)
        params = fn.apply_updates(params, updates)
        updates, state = tx.compressed_update([torch.zeros(8)], state, params)
        momenta[inside] = state.mu[0]
        assert torch.all(fn.apply_updates(params, updates)[0] < 1.0), "the weights did not decay"
    assert momenta[False].abs().max() < 1e-6 < momenta[True].abs().max()


def test_a_variance_step_takes_the_exact_mean_into_the_momentum() -> None:
    """The mean gradient is (2, 4), and so is the first momentum, where codes would make both elements alike.

    Differs: fn.transforms.zero_one_adam.scale_by_zero_one_adam: a variance step uses the exact mean for the
        momentum, too, and sends no codes.
    """
    tx, params, g = fn.zero_one_adam(axis="data"), [torch.zeros(2)], [torch.tensor([[1.0, 3.0], [3.0, 5.0]])]
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(params)
    with fn.ledger() as sent:
        run = fn.simulate(tx.warmup_update, "data", 2, in_dims=(0, dims, None), out_dims=(0, dims))
        _, after = run(g, state, params)
    torch.testing.assert_close(tree.fields(after, "mu")[0][0], torch.tensor([[2.0, 4.0]] * 2))
    assert sent.messages == {("data", "all_reduce"): 1}
    (coded,) = fn.sign().decode(fn.sign().encode(torch.tensor([[2.0, 4.0]])))
    torch.testing.assert_close(coded[:2], torch.full((2,), 10**0.5))


def test_a_variance_step_never_follows_a_local_one() -> None:
    """It would not bring the ranks together: the schedule's variance steps come while all of them agree."""
    for arguments in ((8, 2, 4, 4), (100, 16, 1, 16), (0, 1, 1, 1), (7, 3, 2, 8)):
        phases = [fn.zero_one_schedule(*arguments)(step) for step in range(300)]
        behind_local = {b for a, b in pairwise(phases) if a is fn.Phase.LOCAL}
        assert behind_local <= {fn.Phase.LOCAL, fn.Phase.COMPRESSED}
        assert (fn.Phase.WARMUP in phases) is (arguments[0] > 0)


def test_a_rank_leaves_out_a_local_step_that_is_not_finite_and_stays_with_the_others() -> None:
    """The paper's step would be NaN and go to all ranks in the next message.

    Differs: fn.transforms.zero_one_adam.scale_by_zero_one_adam: A rank whose gradient is not finite in a local
        step leaves that step out alone, and counts it: no message tells the others.
    """
    world = 2
    tx = fn.zero_one_adam(lr=0.01, axis="data")
    params, state, dims = begin(tx, world, torch.float32)
    steps = runs(tx, dims, world)
    params, state = steps[fn.Phase.WARMUP](params, state, gradients(world, 0, torch.float32))
    grads = gradients(world, 1, torch.float32)
    grads[0][1, 0, 0] = float("nan")
    before = [p.clone() for p in params]
    mu = tree.fields(state, "mu")[0][0]
    papers = before[0] - 0.01 * (0.9 * mu + 0.1 * grads[0])
    assert papers.isnan().any(dim=(1, 2)).tolist() == [False, True]
    params, state = steps[fn.Phase.LOCAL](params, state, grads)
    assert torch.equal(params[0][1], before[0][1])
    assert not torch.equal(params[0][0], before[0][0])
    assert tree.fields(state, "dropped")[0].tolist() == [0, 1]
    params, state = steps[fn.Phase.COMPRESSED](params, state, gradients(world, 2, torch.float32))
    assert spread(params) <= 1e-7
    assert all(torch.isfinite(p).all() for p in params)


def test_deepspeeds_compresses_gradients_before_the_freeze_and_steps_behind_it() -> None:
    world, results = 2, []
    for frozen in (False, True):
        sync = fn.compressed_average("data", fn.sign())
        link = deepspeed.scale_by_zero_one_adam(0.01, 0.9, 0.999, 1e-8, 0.0, sync=sync, frozen=frozen, alone=False)
        tx = fn.chain(fn.average("data"), link)
        params, state, dims = begin(tx, world, torch.float32)
        steps = runs(tx, dims, world)
        params, state = steps[fn.Phase.WARMUP](params, state, gradients(world, 0, torch.float32))
        params, state = steps[fn.Phase.COMPRESSED](params, state, gradients(world, 1, torch.float32))
        results.append(params)
        assert spread(params) <= 1e-6
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize(("argument", "value"), [("weight_decay", -1.0), ("b2", 1.0)])
def test_an_argument_out_of_range_is_named(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=argument):
        fn.zero_one_adam(axis="data", **{argument: value})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_local_step_is_left_out_for_a_number_that_never_had_a_gradient_as_in_place(bad: float, dtype: Any) -> None:
    """Where nu is zero the move is zero, whatever the gradient."""
    tx = fn.zero_one_adam(0.1, axis="data")
    start = [torch.ones(3, dtype=dtype)]
    state = tx.init(start)
    seen = [torch.tensor([1.0, 2.0, 0.0], dtype=dtype)]
    updates, state = tx.update(fn.Phase.WARMUP)(seen, state, start)
    params = fn.apply_updates(start, updates)
    opt = fn.Optimizer(
        [torch.nn.Parameter(start[0].clone())], partial(fn.zero_one_adam, axis="data"), lr=0.1,
        schedule=lambda step: fn.Phase.LOCAL if step else fn.Phase.WARMUP,
    )  # fmt: skip
    (own,) = opt.param_groups[0]["params"]
    for gradient in (seen[0], torch.tensor([1.0, 1.0, bad], dtype=dtype)):
        own.grad = gradient
        opt.step()
    updates, state = tx.update(fn.Phase.LOCAL)([own.grad], state, params)
    assert int(state.inner[1].dropped) == int(opt.states[0].inner[1].dropped) == 1
    torch.testing.assert_close(fn.apply_updates(params, updates)[0], own.detach())
    assert torch.equal(own, params[0])


def test_a_variance_step_behind_a_local_one_is_refused() -> None:
    """It left every rank where it had gone alone, for good; behind a synchronising step it is taken."""
    phases = [fn.Phase.WARMUP, fn.Phase.LOCAL, fn.Phase.WARMUP, fn.Phase.COMPRESSED, fn.Phase.WARMUP]
    tx, params = fn.zero_one_adam(0.1, axis="data"), [torch.ones(9)]
    state = tx.init(params)
    for phase in phases:
        if state.inner[1].elapsed and phase is fn.Phase.WARMUP:
            with pytest.raises(ValueError, match=r"^phase: expected COMPRESSED after LOCAL, .* but got WARMUP; .*COMP"):
                tx.update(phase)(params, state, params)
            continue
        _, state = tx.update(phase)(params, state, params)
    assert int(state.inner[1].step) == len(phases) - 1
