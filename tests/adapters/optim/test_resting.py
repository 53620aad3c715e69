"""A tensor that rests keeps its moments and their age; behind an average its age begins with its first gradient."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Cases, run

import fn
import fn.adapters.checkpoint
from fn import Phase

EVERY_OTHER = [1.0, None] * 6
NOT_AT_FIRST = [None, None, *[1.0, -0.5, 2.0] * 3]
LONG = [1.0] * 5 + [None] * 60 + [1.0, 0.5] * 4
PLANS = {"every other step": EVERY_OTHER, "none at first": NOT_AT_FIRST, "a long rest": LONG}

each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def adam(lr: Any, weight_decay: float = 0.0) -> fn.Transform:
    return fn.chain(fn.scale_by_adam(), fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr))


ALONE: dict[str, Callable[..., Any]] = {
    "adamw": fn.adamw,
    "adamw, an axis of one rank": partial(fn.adamw, axis="alone"),
    "onebit_adam": partial(fn.onebit_adam, axis="alone", b2=0.999),
    "powersgd_adamw": partial(fn.powersgd_adamw, axis="alone"),
    "diloco": partial(fn.diloco, axis="alone"),
    "a chain": adam,
    "a partition": lambda **hyper: fn.partition({"a": adam(**hyper), "b": adam(**hyper)}, ["a", "b", "a"]),
    "a mask": lambda lr, weight_decay=0.0: fn.chain(
        fn.mask(fn.scale_by_adam(), [True, True, True]), fn.add_decayed_weights(weight_decay),
        fn.scale_by_learning_rate(lr),
    ),
    "loco_adamw": partial(fn.loco_adamw, axis="alone"),
    "loco_adamw, by tensor": partial(fn.loco_adamw, axis="alone", layout="per_tensor"),
    "loco_adamw, end to end": partial(fn.loco_adamw, axis="alone", layout="fused"),
    "loco_adamw, a master": partial(fn.loco_adamw, axis="alone", master=True),
    "sharded_onebit_adam": partial(fn.sharded_onebit_adam, axis="alone", b2=0.999),
    "owned": lambda **hyper: fn.owned(adam(**hyper), "alone"),
    "muon, the other tensors": partial(
        fn.muon, axis="alone", other_rate=1.0, labels=["hidden", "other", "other"]
    ),
}  # fmt: skip


def steps_of(
    opt: torch.optim.Optimizer, params: Sequence[torch.Tensor], plan: Sequence[float | None], *, frozen: bool = False
) -> list[torch.Tensor]:
    """Return the second and the third parameter after each step; their gradients are the plan's, or there is none.

    Args: frozen: show that there is none by `requires_grad`, as fn alone takes it, next to a gradient of before.
    """
    after = []
    for t, g in enumerate(plan):
        params[0].grad = torch.full_like(params[0], 1.0 - 0.1 * t)
        for x in params[1:]:
            x.requires_grad_(not (frozen and g is None))
            x.grad = x.grad if frozen and g is None and t else None if g is None else torch.full_like(x, g)
        opt.step()
        after += [x.detach().clone() for x in params[1:]]
    return after


def three(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, n, dtype=dtype).reshape(shape))
            for n, shape in ((6, (2, 3)), (5, (5,)), (1, ()))]  # fmt: skip


@each_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in place", "pure"])
@pytest.mark.parametrize("name", ALONE)
def test_on_one_rank_a_tensor_without_a_gradient_takes_the_steps_of_torch(name, dtype, plan):
    ours, theirs = three(dtype), three(dtype)
    opt = fn.Optimizer(ours, ALONE[name], lr=1e-2, weight_decay=0.1)
    found = steps_of(opt, ours, plan)
    betas = (0.9, 0.95 if "muon" in name else 0.999)
    right = steps_of(torch.optim.AdamW(theirs, lr=1e-2, betas=betas, weight_decay=0.1), theirs, plan)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in place", "pure"])
def test_one_that_is_switched_off_takes_the_steps_of_torch_when_it_is_on_again(dtype):
    ours, theirs = three(dtype), three(dtype)
    found = steps_of(fn.Optimizer(ours, fn.adamw, lr=1e-2, weight_decay=0.1), ours, LONG, frozen=True)
    right = steps_of(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1), theirs, LONG)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


OWN_MOMENTA: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "lion_vote": (partial(fn.lion_vote, axis="alone"), fn.freeze_after(2)),
    "signum_vote": (partial(fn.contrib.signum_vote, axis="alone"), fn.freeze_after(2)),
    "lion_muon": (partial(fn.contrib.lion_muon, axis="alone"), fn.freeze_after(20)),
    "ef21_sgdm": (partial(fn.contrib.ef21_sgdm, axis="alone", k=1.0), fn.freeze_after(1)),
}
"""Their momenta differ between ranks; the last one sends differences, here all of them."""


@pytest.mark.parametrize("name", OWN_MOMENTA)
def test_momenta_of_a_rank_rest_too_and_so_does_the_sum_of_what_codes_delivered(name):
    make, schedule = OWN_MOMENTA[name]
    plan = [1.0, None, None, 2.0, None, -1.0, 0.5] * 3
    resting, without = three(torch.float32), three(torch.float32)
    found, right = (
        steps_of(fn.Optimizer(params, make, schedule=schedule, lr=1e-2, weight_decay=0.1), params, grads)[::2]
        for params, grads in ((resting, plan), (without, [g for g in plan if g is not None]))
    )
    moved = [x for x, g in zip(found, plan, strict=True) if g is not None]
    torch.testing.assert_close(moved, right, rtol=1e-5, atol=1e-6)


# shards of several tensors, on several ranks


def off_on_all_ranks(
    name: str, dtype: torch.dtype, layout: str, plan: list[float | None], warmup: int, folder: str = "", taken: int = 0
) -> tuple[list[torch.Tensor], list[int]]:
    """Take the steps of a plan, in which two parameters are switched off where it has no gradient.

    Args: warmup: its steps. folder: for a checkpoint, if there is to be one: saved in the end, or loaded first where
        some steps were taken before.
    Returns: the second and third parameter after each step; what tensors sat out.
    """
    params, rank = three(dtype), dist.get_rank()
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(
            params, partial(SHARDED[name], axis="data", layout=layout), schedule=fn.freeze_after(warmup), lr=1e-2,
            weight_decay=0.1, refuse_averaged=False,
        )  # fmt: skip
    if taken:
        fn.adapters.checkpoint.load(folder, opt)
    after = []
    for t, g in [*enumerate(plan)][taken:]:
        for x, of_step in zip(params, (1.0 - 0.1 * t, g, g), strict=True):
            x.requires_grad_(of_step is not None)
            # The mean over two ranks is the plan's.
            own = 1.0 if dist.get_world_size() == 1 else 0.5 + rank
            x.grad = torch.full_like(x, of_step * own) if of_step is not None else x.grad
        opt.step()
        after += [x.detach().clone() for x in params[1:]]
    if folder and not taken:
        fn.adapters.checkpoint.save(folder, opt)
    return after, [int(x) for x in fn.tree.leaves(fn.roles.find(opt.states, "rested")[0])]


SHARDED = {"loco_adamw": fn.loco_adamw, "sharded_onebit_adam": partial(fn.sharded_onebit_adam, b2=0.999)}
BOTH = (torch.float32, torch.float64)
LAYOUTS = (*(("flat", plan) for plan in PLANS), ("fused", "every other step"))
two = Cases(2)


@two
def in_warm_ups() -> dict[tuple[Any, ...], Any]:
    return {
        (name, dtype, layout, plan): off_on_all_ranks(name, dtype, layout, PLANS[plan], len(PLANS[plan]))
        for name in SHARDED
        for dtype in BOTH
        for layout, plan in LAYOUTS
    }


@two
def in_codes() -> dict[tuple[Any, ...], Any]:
    return {(name, dtype): off_on_all_ranks(name, dtype, "flat", EVERY_OTHER, 5) for name in SHARDED for dtype in BOTH}


@pytest.mark.parametrize("dtype", BOTH, ids=["in place", "pure"])
@pytest.mark.parametrize(("layout", "plan"), LAYOUTS)
@pytest.mark.parametrize("name", SHARDED)
def test_parts_of_shards_rest_on_all_ranks_and_take_the_steps_of_torch_when_they_are_on_again(
    name, layout, plan, dtype
):
    (here, rested), (there, _) = (found[name, dtype, layout, plan] for found in two.answer("in_warm_ups"))
    torch.testing.assert_close(here, there, rtol=0, atol=0)
    theirs, steps = three(dtype), PLANS[plan]
    right = steps_of(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1), theirs, steps)
    torch.testing.assert_close(here, right, rtol=1e-5, atol=1e-6)
    assert rested == [0, steps.count(None), steps.count(None)]


@pytest.mark.parametrize("name", SHARDED)
def test_parts_of_shards_go_on_in_codes_in_place_as_purely(name):
    answers = two.answer("in_codes")[0]
    found = [[x.double() for x in answers[name, dtype][0]] for dtype in BOTH]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    moved = [float((y - x).abs().max()) for x, y in zip(found[0], found[0][2:], strict=False)]
    off, on = moved[::4] + moved[1::4], moved[2::4] + moved[3::4]
    assert off == [0.0] * len(off)
    assert all(1e-3 < x < 0.012 for x in on)


@pytest.mark.parametrize("name", SHARDED)
def test_what_parts_of_shards_sat_out_goes_to_another_number_of_ranks(name, tmp_path):
    plan = [1.0, None, None, 0.5, -1.0, None, 2.0, 0.5]
    run(2, off_on_all_ranks, name, torch.float32, "flat", plan[:4], len(plan), f"{tmp_path}")
    ((after, rested),) = run(1, off_on_all_ranks, name, torch.float32, "flat", plan, len(plan), f"{tmp_path}", 4)
    theirs = three(torch.float32)
    right = steps_of(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1), theirs, plan)
    torch.testing.assert_close(after, right[8:], rtol=1e-5, atol=1e-6)
    assert rested == [0, 3, 3]


# among ranks

AMONG: dict[str, Callable[..., fn.Transform]] = {
    "adamw": fn.adamw,
    "onebit_adam": fn.onebit_adam,
    "zero_one_adam": fn.zero_one_adam,
    "powersgd_adamw": fn.powersgd_adamw,
    "muon, the other tensors": partial(fn.muon, labels=["other", "other"]),
    "muon, replicated": partial(fn.muon, owned=False, labels=["other", "other"]),
    "sign_muon, the other tensors": partial(fn.sign_muon, labels=["other", "other"], lr=0.1),
    "dion, the other tensors": partial(fn.dion, labels=["other", "other"]),
    "loco_adamw": fn.loco_adamw,
    "loco_adamw, by tensor": partial(fn.loco_adamw, layout="per_tensor"),
    "loco_adamw, end to end": partial(fn.loco_adamw, layout="fused"),
    "sharded_onebit_adam": fn.sharded_onebit_adam,
    "a chain": lambda lr, axis: fn.chain(
        fn.average(axis), fn.scale_by_adam(await_gradient=True), fn.scale_by_learning_rate(lr)
    ),
}
LATE = 3
"""The step in which the second tensor has its first gradient."""


def warmup_steps(tx: fn.Transform, g: torch.Tensor) -> list[torch.Tensor]:
    """Return the second tensor's updates; on this rank its gradients are zero, and g from step `LATE` on."""
    params, updates = [torch.zeros(3), torch.zeros(4)], []
    state = tx.init(params)
    for t in range(LATE + 4):
        grads = [1 + 0 * g[:3], g if t >= LATE else 0 * g]
        update, state = tx.update(Phase.WARMUP)(grads, state, params)
        update = fn.tree.map(lambda p, q: q - p, params, fn.apply_updates(params, update))
        updates.append(update[1])
    return updates


@pytest.mark.parametrize("name", AMONG)
def test_the_age_of_a_tensor_begins_with_its_first_mean_gradient(name):
    tx = AMONG[name](lr=0.01, axis="data", **({} if name == "a chain" else {"weight_decay": 0.0}))
    g = torch.tensor([[1.0, 2.0, -1.0, 3.0], [3.0, -4.0, -1.0, 1.0]])  # of each rank
    updates = fn.simulate(partial(warmup_steps, tx), "data", 2)(g)
    rate = -updates[LATE][0].abs().mean()
    assert float(rate) < -1e-3
    for t, update in enumerate(updates):
        right = rate * g.mean(0).sign() if t >= LATE else torch.zeros(4)
        torch.testing.assert_close(update, right.expand(2, 4), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["loco_adamw", "loco_adamw, by tensor", "sharded_onebit_adam"])
def test_ranks_ask_each_other_while_a_tensor_waits_for_its_first_gradient_and_no_longer(name):
    tx = AMONG[name](lr=0.01, axis="data")
    params = [torch.zeros(3), torch.zeros(4), torch.zeros(0)]
    asked: list[bool] = []

    def run(g: torch.Tensor) -> torch.Tensor:
        state, now = tx.init(params), params
        for t in range(LATE + 4):
            with fn.ledger() as sent:
                update, state = tx.update(Phase.WARMUP)([1 + 0 * g[:3], g if t >= LATE else 0 * g, g[:0]], state, now)
            now = fn.apply_updates(now, update)
            asked.append(("data", "all_reduce") in sent.sent)
        return now[1]

    fn.simulate(run, "data", 2)(torch.ones(2, 4))
    # In the second step all tensors are asked, then the one that waits, and last in the step behind its first gradient.
    assert asked == [False, *[True] * (LATE + 1), False, False]


def late_gradients(name: str, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Return how far the second tensor goes in each step of two ranks; its first gradient comes late, on rank 1."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 4)]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(
            params, partial(AMONG[name], axis="data"), schedule=fn.freeze_after(LATE + 3), lr=0.01, weight_decay=0.0,
            refuse_averaged=False,
        )  # fmt: skip
    rank, moved = dist.get_rank(), []
    for t in range(LATE + 6):
        before = params[1].detach().clone()
        params[0].grad = torch.full((3,), 1.0 + rank + t, dtype=dtype)
        params[1].grad = torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=dtype) if t >= LATE and rank else None
        opt.step()
        moved.append(float((params[1].detach() - before).abs().max()))
    ages, rested = fn.roles.find(opt.states, "ages")[0], fn.roles.find(opt.states, "rested")[0]
    return moved, [*map(float, (*ages, *fn.tree.leaves(rested)))]


ON_RANKS = ("onebit_adam", "loco_adamw", "loco_adamw, end to end", "sharded_onebit_adam")


@two
def late_on_ranks() -> dict[tuple[str, torch.dtype], Any]:
    return {(name, dtype): late_gradients(name, dtype) for name in ON_RANKS for dtype in BOTH}


@pytest.mark.parametrize("dtype", BOTH, ids=["in place", "pure"])
@pytest.mark.parametrize("name", ON_RANKS)
def test_real_ranks_take_these_steps_and_go_on_into_the_compressed_phase(name, dtype):
    here, there = (found[name, dtype] for found in two.answer("late_on_ranks"))
    assert here == there
    moved, (of_mu, of_nu, *rested) = here
    assert moved[:LATE] == [0.0] * LATE
    assert moved[LATE : LATE + 3] == pytest.approx([0.01] * 3, rel=1e-3)
    assert (of_mu, rested) == (LATE + 6, [0, LATE])
    assert of_nu == LATE + (6 if "loco" in name else 3)
    assert all(0 < x < 0.03 for x in moved[LATE + 3 :])  # the clamp would be 0.03


# what was saved


def resumed(opt: fn.Optimizer, saved: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    opt.load_state_dict(saved)
    with torch.no_grad():
        for p in params:
            p.zero_()
    return steps_of(opt, params, [0.1, None, -0.1])


def test_a_rest_is_saved_and_a_state_from_before_rests_were_counted_loads_as_one_without():
    params = three(torch.float32)
    opt = fn.Optimizer(params, fn.adamw, lr=0.01)
    steps_of(opt, params, [1.0, None, None, 1.0])
    saved = {path: x.clone() for path, x in opt.state_dict().items()}
    old = {path: x for path, x in saved.items() if "rested" not in path}
    assert len(saved) - len(old) == 3
    without = saved | {path: torch.zeros_like(x) for path, x in saved.items() if path not in old}
    fresh = [fn.Optimizer(three(torch.float32), fn.adamw, lr=0.01) for _ in range(4)]
    once, again, before, none = map(resumed, fresh, (saved, saved, old, without))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    torch.testing.assert_close(before, none, rtol=0, atol=0)
    assert not torch.equal(once[0], before[0])


def without_rests(make: Callable[..., fn.Transform], lr: Any) -> fn.Transform:
    """Return an optimizer whose state is that of before rests were counted."""
    tx = make(lr)
    return tx._replace(init=lambda params: fn.roles.replace(tx.init(params), "rested", lambda counts: ()))


@pytest.mark.parametrize("name", ["adamw", "loco_adamw", "sharded_onebit_adam"])
def test_a_checkpoint_from_before_rests_were_counted_loads(name):
    params, others, make = three(torch.float32), three(torch.float32), ALONE[name]
    old, new = fn.Optimizer(params, partial(without_rests, make), lr=0.01), fn.Optimizer(others, make, lr=0.01)
    steps_of(old, params, [1.0, -2.0])
    with tempfile.TemporaryDirectory() as folder:
        fn.adapters.checkpoint.save(folder, old)
        fn.adapters.checkpoint.load(folder, new)
    found, right = steps_of(new, others, [0.5, 1.0]), steps_of(old, params, [0.5, 1.0])
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    assert {int(x) for x in fn.tree.leaves(fn.roles.find(new.states, "rested"))} == {0}
    assert len(fn.tree.leaves(fn.roles.find(new.states, "rested")[0])) == 3


def test_what_torch_counted_for_each_parameter_is_taken_over():
    ours, theirs = three(torch.float32), three(torch.float32)
    adamw = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    steps_of(adamw, theirs, [1.0, None, None, 2.0])
    for x, y in zip(ours, theirs, strict=True):
        x.data.copy_(y)
    copied = torch.optim.AdamW(ours, lr=1e-2, weight_decay=0.1)
    copied.load_state_dict(adamw.state_dict())
    opt = fn.Optimizer(ours, fn.adamw, lr=1e-2, weight_decay=0.1)
    fn.adapters.from_adamw(copied, opt)
    found, right = steps_of(opt, ours, [1.0, None, -1.0]), steps_of(adamw, theirs, [1.0, None, -1.0])
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
