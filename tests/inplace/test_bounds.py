"""A step in place writes no number that is not finite, without a look at what it wrote."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import Any

import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.base import Guarded
from fn.inplace.bounds import Bounds, Reach
from fn.transforms.lamb import common_scale_of

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

NAMES = ("adamw", "onebit_adam", "onebit_lamb", "zero_one_adam", "loco_adamw")
ATTACKS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 3e38, "weight_decay": 0.0},
    "lr with decay": {"lr": 3e38, "weight_decay": 0.01},
    "weight_decay": {"weight_decay": 1e30},
    "mu": {"bad": "mu"},
    "nu": {"bad": "nu"},
}
STEPS = 7
ROUND = (Phase.LOCAL, Phase.COMPRESSED)


def schedule_of(name: str, warm: int = 2) -> Any:
    if name == "adamw":
        return None
    return fn.freeze_after(warm) if name != "zero_one_adam" else lambda t: Phase.WARMUP if t < warm else ROUND[t % 2]


def hidden(update: Any) -> Any:
    """Return an update that does not say what it is made of."""
    return lambda *args: update(*args)


def pure(make: Any, **hypers: Any) -> Any:
    """Make a transform that is never staged."""
    tx = make(**hypers)
    return tx._replace(**{k: hidden(u) for k, u in tx._asdict().items() if isinstance(u, Guarded)})


def optimizer(name: str, make: Any = None, lr: float = 1e-2, warm: int = 2, **hypers: Any) -> Any:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(37)), torch.nn.Parameter(torch.randn(5, 8))]
    made = partial(getattr(fn, name), axis="data", **hypers)
    schedule = schedule_of(name, warm)
    opt = fn.Optimizer(params, partial(make, made) if make else made, schedule=schedule, lr=lr, refuse_averaged=False)
    return params, opt


def set_gradients(params: list[Any], step: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def spoil(opt: Any, field: str) -> None:
    """Load a state with a NaN in it."""
    saved = opt.state_dict()
    path = next(path for path in saved if f".{field}." in path)
    saved[path] = saved[path].clone()
    saved[path].view(-1)[3] = math.nan
    opt.load_state_dict(saved)


@contextmanager
def counted(owner: Any, method: str):
    """List what the calls of a method return."""
    found, original = [], getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(original(*args, **kwargs))
        return found[-1]

    setattr(owner, method, noted)
    try:
        yield found
    finally:
        setattr(owner, method, original)


def counts(opt: Any) -> tuple[int, ...]:
    return (opt.skipped, *(int(x) for x in tree.fields(opt.states, "dropped")))


def attacked(name: str, make: Any, attack: dict[str, Any], on: tuple[int, ...] = (0, 1)) -> list[tuple[int, ...]]:
    """Return what was skipped and dropped after each step; in such a step nothing moves, and all stays finite.

    Args: on: the ranks that a bad number is loaded on, after the third step.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    params, opt = optimizer(name, make, **{k: v for k, v in attack.items() if k != "bad"})
    found = []
    for step in range(STEPS):
        if step == 3 and "bad" in attack and rank in on:
            spoil(opt, attack["bad"])
        set_gradients(params, step, rank)
        before, last = [x.clone() for x in tree.leaves([params, opt.states[0].inner])], counts(opt)
        opt.step()
        after = tree.leaves([params, opt.states[0].inner])
        if opt.skipped > last[0]:
            same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)]
            assert all(same), (name, attack, step)
        assert all(p.isfinite().all() for p in params), (name, attack, step)
        found.append(counts(opt))
    return found


@pytest.mark.filterwarnings("ignore:steps. the last 5 were skipped")
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_place_skips_what_the_pure_step_skips(name, attack):
    found = attacked(name, None, ATTACKS[attack])
    assert found == attacked(name, pure, ATTACKS[attack])
    assert sum(found[-1]) >= 3


def attacked_ranks() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    with fn.bind(mesh):
        both = [[attacked(name, make, x) for make in (None, pure)] for name in NAMES for x in ATTACKS.values()]
        alone = [attacked(name, None, {"bad": field}, on=(0,)) for name in NAMES for field in ("mu", "nu")]
    return [both, alone]


@pytest.mark.slow
def test_ranks_skip_together_what_one_of_them_cannot_take():
    one, two = ranks.run(2, attacked_ranks)
    assert one[0] == two[0]
    cases = [(name, attack) for name in NAMES for attack in ATTACKS]
    for case, (in_place, plain) in zip(cases, one[0], strict=True):
        assert in_place == plain, case
        assert sum(in_place[-1]) >= 2, case
    cases = [(name, field) for name in NAMES for field in ("mu", "nu")]
    for case, mine, theirs in zip(cases, one[1], two[1], strict=True):  # what is dropped is a rank's own
        assert [x[0] for x in mine] == [x[0] for x in theirs], case
        assert mine[-1][0] >= 2, case


def steady() -> list[Any]:
    """Return by name how many steps were written in place, and how many looks they took."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = []
    for name in NAMES:
        for eps in (1e-8, 1e-12 if name == "onebit_lamb" else 1e-20):
            with fn.bind(mesh):
                params, opt = optimizer(name, eps=eps)
            with in_place_steps.listed() as in_place, counted(Bounds, "_look") as looks:
                for step in range(60):
                    set_gradients(params, step, dist.get_rank())
                    opt.param_groups[0]["lr"] = 1e-3 * (1 + step)  # a warm-up of the learning rate
                    opt.step()
            found.append((name, eps, sum(in_place), len(looks), opt.skipped))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_steady_steps_are_taken_in_place_without_a_look(world):
    for outcome in ranks.run(world, steady):
        for name, eps, taken, looks, skipped in outcome:
            alone = {"zero_one_adam": 29, "onebit_lamb": 58} if world == 1 else {}  # these have no codes to step from
            assert (taken, skipped) == (60 - alone.get(name, 0), 0), (name, eps)
            if name not in alone:  # one for each update with bounds of its own, and for some of the learning rates
                assert looks <= (3 if eps == 1e-8 else 6), (name, eps, looks)


@pytest.mark.parametrize("change", ["param", "memory", "moment", "load"])
def test_what_is_written_from_outside_is_looked_at(change):
    params, opt = optimizer("adamw", weight_decay=0.1)
    for step in range(6):
        set_gradients(params, step)
        if step == 3:
            with torch.no_grad():
                if change == "param":
                    params[1][2] = 1e38
                elif change == "memory":
                    params[1].data = torch.full_like(params[1], 1e38)
                elif change == "moment":
                    tree.fields(opt.states, "mu")[0][1].fill_(1e38)
                else:
                    spoil(opt, "nu")
        with counted(Bounds, "_look") as looks:
            opt.step()
        again = step == 3 if change == "load" else step >= 3  # moments that are not finite need no other look
        assert len(looks) == (step == 0 or again), step
        assert opt.skipped == max(0, step - 2)


@pytest.mark.parametrize("name", ["adamw", "onebit_adam", "zero_one_adam"])
def test_no_number_is_larger_than_its_bound(name):
    params, opt = optimizer(name, warm=30, weight_decay=0.3)
    made: list[Any] = []
    hold = Bounds.hold

    def noted(self: Bounds, *args: Any) -> bool:
        made.append(self)
        return hold(self, *args)

    Bounds.hold = noted
    try:
        for step in range(200):
            set_gradients(params, step)
            opt.step()
            bounds, (mu,), (nu,) = made[-1], tree.fields(opt.states, "mu"), tree.fields(opt.states, "nu")
            if name == "zero_one_adam" and step >= 30 and step % 2:
                continue  # synchronising alone is pure, and the bounds know nothing of it
            for bound, tensors in ((bounds.param, params), (bounds.momentum, mu), (bounds.square, nu)):
                assert max(float(x.detach().abs().max()) for x in tensors) <= bound < math.inf, step
    finally:
        Bounds.hold = hold


def test_what_is_allowed_shrinks_with_what_a_step_could_move():
    usual = Reach(1e-3, 1e-8, 0.1)
    assert usual.limit == 16.0**15
    assert usual._replace(eps=1e-20).limit < 1e19
    assert usual._replace(rate=3e38).limit == 0
    assert usual._replace(rate=1e30).limit == 0
    assert usual._replace(rate=math.nan).limit == usual._replace(mu_weight=math.nan).limit == 0
    assert usual._replace(eps=0.0).limit == usual._replace(eps=1e-40).limit == 0


def test_one_transform_for_two_param_groups_keeps_apart_what_is_known():
    tx = fn.adamw(1e-2, weight_decay=0.1)
    small, large = torch.nn.Parameter(torch.ones(9)), torch.nn.Parameter(torch.full((9,), 1e38))
    opt = fn.Optimizer([{"params": [small]}, {"params": [large]}], lambda lr: tx)
    for _ in range(3):
        small.grad, large.grad = torch.ones(9), torch.ones(9)
        opt.step()
    assert opt.skipped == 3
    assert torch.equal(large.detach(), torch.full((9,), 1e38))


def test_a_momentum_that_fades_out_leaves_lambs_scaling_finite():
    scaling = common_scale_of(torch.tensor([1e4, 1e-40, 0.0], dtype=torch.float64)).float()
    assert scaling.isfinite().all()
    assert scaling[2] == 1
