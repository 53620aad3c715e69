"""`fn.Optimizer(..., momentum_as_codes=True)`: the numbers of an optimizer without it, bit for bit, in less memory."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn import Phase, tree
from fn.adapters import checkpoint
from fn.transforms.momentum_codes import MomentumCodes

SHAPES = [(37, 5), (7,), (), (0,), (4097,), (8, 16)]
CASES = [
    {},
    {"feedback": fn.classic(lazy=True), "weight_decay": 0.1},
    {"layout": "per_tensor", "bias_correction": True, "feedback": fn.classic(lazy=True)},
    {"codec": fn.sign(padding_counts=True), "b1": 0.3},
    {"feedback": fn.classic(store=torch.bfloat16)},
    {"warmup": fn.int8(), "max_step": None, "eps": 1e-4},
]
PHASES = [*[Phase.WARMUP] * 3, *[Phase.COMPRESSED] * 5, Phase.WARMUP, *[Phase.COMPRESSED] * 4]


def gradient(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    grads[0][3] = 0.0  # a row that never receives a gradient
    if step == 5 and rank == 0:
        grads[1][2] = float("nan")
    return grads


def optimizer(as_codes: bool, dtype: torch.dtype = torch.float32, *, groups: int = 2, **hyper: Any) -> fn.Optimizer:
    more = {key: hyper.pop(key) for key in ("compile",) if key in hyper}
    params = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES]
    make = partial(fn.onebit_adam, axis="data", **hyper)
    split = [{"params": params[g::groups]} for g in range(groups)]
    return fn.Optimizer(split, make, schedule=PHASES.__getitem__, momentum_as_codes=as_codes, **more)


def take(opt: fn.Optimizer, step: int, dtype: torch.dtype = torch.float32) -> None:
    params = [p for group in opt.param_groups for p in group["params"]]
    for p, g in zip(params, sorted_like(params, gradient(step, dist.get_rank(), dtype)), strict=True):
        p.grad = g
    opt.step()


def sorted_like(params: list[Any], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    by_shape = {g.shape: g for g in grads}
    return [by_shape[p.shape] for p in params]


def equal(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def params_of(opt: fn.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for group in opt.param_groups for p in group["params"]]


def side_by_side(hyper: dict[str, Any], dtype: torch.dtype, rows: str = "numba") -> list[tuple[bool, bool, bool]]:
    """Return for each step: whether params are the same, whether it was in place, and whether codes were kept."""
    if rows == "torch":
        sys.modules["fn.kernels.table"].BUILT_IN = {
            "cpu": {"numpy": "fn.kernels.bits:numpy", "torch": "fn.kernels.foreach:row"}
        }
    found = []
    with fn.bind({"data": dist.group.WORLD}):
        plain, kept = (optimizer(how, dtype, **hyper) for how in (False, True))
    for step in range(len(PHASES)):
        with fn.ledger() as sent:
            take(plain, step, dtype)
        with in_place_steps.listed() as in_place, fn.ledger() as sent_too:
            take(kept, step, dtype)
        assert sent.sent == sent_too.sent
        codes = tree.instances(kept.training.states, MomentumCodes)
        found.append((equal(params_of(plain), params_of(kept)), all(in_place), len(codes) == 2))
    assert equal(plain.states, kept.states)  # errors and the momentum, which is read in floating point
    assert not tree.instances(kept.states, MomentumCodes)
    assert plain.skipped == kept.skipped == 1
    return found


def all_cases(dtype: torch.dtype, rows: str) -> list[list[tuple[bool, bool, bool]]]:
    return [side_by_side(hyper, dtype, rows) for hyper in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dtype", "rows"),
    [
        (2, torch.float32, "numba"),
        (3, torch.float32, "numba"),
        (2, torch.bfloat16, "numba"),
        (3, torch.float32, "torch"),
        (2, torch.float64, "numba"),
    ],
)
def test_steps_are_the_same_bit_for_bit(world, dtype, rows):
    for outcome in ranks.run(world, all_cases, dtype, rows):
        for hyper, steps in zip(CASES, outcome, strict=True):
            assert [same for same, _, _ in steps] == [True] * len(PHASES), hyper
            assert [kept for _, _, kept in steps] == [phase is Phase.COMPRESSED for phase in PHASES], hyper
            if dtype == torch.float32:
                assert all(in_place for _, in_place, _ in steps[4:]) or "store" in str(hyper), hyper


def compiled() -> list[bool]:
    with fn.bind({"data": dist.group.WORLD}):
        plain, kept = (optimizer(how, groups=1, compile=True) for how in (False, True))
    same = []
    for step in range(len(PHASES)):
        take(plain, step)
        take(kept, step)
        same.append(equal(params_of(plain), params_of(kept)))
    return same


@pytest.mark.reliability
def test_compiled_steps_are_the_same_bit_for_bit():
    assert all(all(same) for same in ranks.run(2, compiled))


LAST = 7
"""The step before which states are saved: a compressed one, behind compressed ones."""


def saves(folder: str) -> list[bool]:
    """Save both forms, copy and load them back, and go on."""
    with fn.bind({"data": dist.group.WORLD}):
        plain, kept, fresh = (optimizer(how) for how in (False, True, True))
    for step in range(LAST):
        take(plain, step)
        take(kept, step)
    assert len(tree.instances(kept.training.states, MomentumCodes)) == 2
    checkpoint.save(f"{folder}/plain", plain)
    checkpoint.save(f"{folder}/kept", kept)
    assert equal(plain.state_dict(), kept.state_dict())
    fresh.load_state_dict(kept.state_dict())
    for p, q in zip(params_of(fresh), params_of(kept), strict=True):
        p.copy_(q)
    again = copy.deepcopy(kept)
    same = []
    for step in range(LAST, len(PHASES)):
        for opt in (plain, kept, fresh, again):
            take(opt, step)
        same += [equal(params_of(plain), params_of(opt)) for opt in (kept, fresh, again)]
    return same


def goes_on(folder: str) -> list[bool]:
    with fn.bind({"data": dist.group.WORLD}):
        plain, kept = (optimizer(how) for how in (False, True))
    for name, opt in (("plain", plain), ("kept", kept)):
        checkpoint.load(f"{folder}/{name}", opt)
    same = []
    for step in range(LAST, len(PHASES)):
        take(plain, step)
        take(kept, step)
        same.append(equal(params_of(plain), params_of(kept)))
    assert len(tree.instances(kept.training.states, MomentumCodes)) == 2
    return same


@pytest.mark.slow
def test_checkpoints_are_those_of_the_other_form_and_fit_any_world(tmp_path):
    assert all(all(same) for same in ranks.run(2, saves, str(tmp_path)))
    for world in (2, 3):
        assert all(all(same) for same in ranks.run(world, goes_on, str(tmp_path)))


def test_one_rank_has_no_codes_and_trains():
    p = torch.nn.Parameter(torch.ones(9))
    make = partial(fn.onebit_adam, axis="data")
    opt = fn.Optimizer([p], make, schedule=fn.freeze_after(2), momentum_as_codes=True)
    for _ in range(5):
        p.grad = torch.ones(9)
        opt.step()
    assert not tree.instances(opt.training.states, MomentumCodes)
    assert opt.steps == 5


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (partial(fn.adamw), "a transform without scale_by_onebit_adam"),
        (partial(fn.onebit_adam, axis="data", keep_zeros=False), "keep_zeros=False"),
        (partial(fn.onebit_adam, axis="data", codec=fn.int8()), "a codec without a single scale per tensor"),
        (partial(fn.onebit_adam, axis="data", codec=fn.sign(block=64)), "a codec without a single scale per tensor"),
        (partial(fn.onebit_adam, axis="data", servers=False), "servers=False and layout='flat'"),
        (partial(fn.onebit_adam, axis="data", layout="fused"), "servers=True and layout='fused'"),
        (partial(fn.onebit_adam, axis=("local", "node")), "the axes ('local', 'node')"),
        (partial(fn.onebit_adam, axis="data", feedback=fn.off()), "a feedback without errors, or several axes"),
    ],
)
def test_what_has_no_codes_is_refused_when_the_optimizer_is_built(make, got):
    with pytest.raises(ValueError, match=r"momentum_as_codes: expected False, or 1-bit Adam with fn\.sign") as caught:
        fn.Optimizer([torch.nn.Parameter(torch.ones(40))], make, momentum_as_codes=True)
    assert caught.value.args[0].endswith(f"but got {got}")
