"""The same code on real processes: gloo groups of 2 and 4 give what the simulation gives, and fail together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS, each_optimizer
from simulated import bits, same_bits
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.collectives import agreement
from fn.inplace import match
from fn.inplace.match import in_place
from fn.inplace.protocol import InPlace

SHAPES = [(6, 5), (7,), (), (0,), (3, 2, 2)]
STEPS = 8
BY_NAME = {optimizer.name: optimizer for optimizer in OPTIMIZERS}


def bound():
    return fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",)))


def start(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradient(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def schedule_of(name: str):
    """Visit every phase within `STEPS` steps; no warm-up step comes behind a local one."""
    phases = BY_NAME[name].phases
    return lambda step: phases[min(step // 3, len(phases) - 1)] if len(phases) < 3 else phases[-step % 3]


def everything(world: int) -> dict[str, dict[tuple, Any]]:
    """Run all functions of `ASKED`, one after the other in the same processes."""
    return {f.__name__: {case: f(*case) for case in cases} for f, cases in ASKED[world]}


@functools.cache
def in_processes(world: int) -> list[dict[str, dict[tuple, Any]]]:
    return ranks.run(world, everything, world)


def answers(world: int, f: Callable[..., Any]) -> list[dict[tuple, Any]]:
    """Return {case: f(*case)} of every rank."""
    return [found[f.__name__] for found in in_processes(world)]


# The compressed path alone: bit for bit.


def codes(name: str, layout: str, dtype: torch.dtype) -> list:
    codec = {"sign": fn.sign, "blocks": partial(fn.sign, 16), "bf16": partial(fn.identity, torch.bfloat16)}[name]()
    tx = fn.compressed_average("data", codec, layout=layout)
    found = []
    with bound():
        params = start(dtype)
        state = tx.init(params)
        for t in range(4):
            u, state = tx.compressed_update(gradient(t, dist.get_rank(), dtype), state, params)
            found.append((u, state))
    return found


LAYOUTS = [("flat", torch.float32), ("per_tensor", torch.float32), ("flat", torch.bfloat16)]
CODES = tuple((codec, *layout) for codec in ("sign", "blocks", "bf16") for layout in LAYOUTS)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("codec", "layout", "dtype"), CODES)
def test_the_compressed_mean_is_bitwise_what_the_simulation_gives(world, codec, layout, dtype):
    outcomes = [found[codec, layout, dtype] for found in answers(world, codes)]
    make = {"sign": fn.sign(), "blocks": fn.sign(16), "bf16": fn.identity(torch.bfloat16)}[codec]
    tx = fn.compressed_average("data", make, layout=layout)
    params = start(dtype)
    state = fn.simulate(tx.init, "data", world, in_dims=None)(params)
    for t in range(4):
        g = [torch.stack(each) for each in zip(*(gradient(t, r, dtype) for r in range(world)), strict=True)]
        update = fn.simulate(lambda g, s: tx.compressed_update(g, s, params), "data", world, out_dims=([None] * 5, 0))
        u, state = update(g, state)
        for r in range(world):
            theirs, their_state = outcomes[r][t]
            assert same_bits(theirs, u)
            assert same_bits(their_state, tree.map(lambda x: x[r], state))  # noqa: B023


def means() -> list:
    tx = fn.average("data")
    with bound():
        return [tx.warmup_update(gradient(t, dist.get_rank()), tx.init(start()), start())[0] for t in range(3)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_exact_mean_is_the_simulations_to_rounding_and_bitwise_the_same_on_all_ranks(world):
    outcomes = ranks.run(world, means)
    for t in range(3):
        expected = [sum(each) / world for each in zip(*(gradient(t, r) for r in range(world)), strict=True)]
        for found in outcomes:
            assert same_bits(found[t], outcomes[0][t])
            for a, b in zip(found[t], expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# Whole optimizers, as pure functions and behind torch.optim.


def pure(name: str, dtype: torch.dtype) -> tuple:
    optimizer, schedule = BY_NAME[name], schedule_of(name)
    tx = optimizer.make(lr=optimizer.lr, axis="data")
    with bound():
        params = start(dtype)
        state = tx.init(params)
        for t in range(STEPS):
            u, state = tx.update(schedule(t))(gradient(t, dist.get_rank(), dtype), state, params)
            params = fn.apply_updates(params, u)
    return params, state


def through_the_adapter(name: str, dtype: torch.dtype, groups: int = 1, **options: Any) -> tuple:
    optimizer = BY_NAME[name]
    params = [torch.nn.Parameter(p) for p in start(dtype)]
    split = [params] if groups == 1 else [params[:2], params[2:]]
    with bound():
        make = partial(optimizer.make, axis="data")
        opt = fn.Optimizer([{"params": p} for p in split], make, schedule=schedule_of(name), lr=optimizer.lr, **options)
    for t in range(STEPS):  # outside of the binding: the optimizer keeps the one it was built in
        for p, g in zip(params, gradient(t, dist.get_rank(), dtype), strict=True):
            p.grad = g
        opt.step()
    return [p.detach() for p in params], opt.states, opt.skipped


def simulated(name: str, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the params of all ranks (W, ...)."""
    optimizer, schedule = BY_NAME[name], schedule_of(name)
    tx = optimizer.make(lr=optimizer.lr, axis="data")
    params = [p.expand(world, *p.shape).clone() for p in start(dtype)]
    state = fn.simulate(tx.init, "data", world)(params)
    for t in range(STEPS):
        g = [torch.stack(each) for each in zip(*(gradient(t, r, dtype) for r in range(world)), strict=True)]

        def step(g, s, p, phase=schedule(t)):  # noqa: B008
            u, s = tx.update(phase)(g, s, p)
            return fn.apply_updates(p, u), s

        params, state = fn.simulate(step, "data", world)(g, state, params)
    return params


PURE = tuple((name, dtype) for name in BY_NAME for dtype in (torch.float32, torch.bfloat16))
ADAPTED = (*((*case, 1) for case in PURE), *((name, torch.float32, 2) for name in BY_NAME))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "dtype"), [(4, torch.float32), (2, torch.bfloat16)])
@each_optimizer
def test_an_optimizer_trains_what_the_simulation_trains(optimizer, world, dtype):
    """Exact averaging rounds in another order, so the whole is compared to rounding; the phases in codes are above."""
    outcomes = [found[optimizer.name, dtype] for found in answers(world, pure)]
    expected = simulated(optimizer.name, world, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for r, (params, _) in enumerate(outcomes):
        for a, b in zip(params, expected, strict=True):
            torch.testing.assert_close(a, b[r], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_optimizer
def test_behind_torch_optim_it_is_the_pure_function_bit_for_bit(optimizer, dtype):
    """Steps that a kernel takes in place agree to rounding, and over the ranks bit for bit as well."""
    tx = optimizer.make(lr=optimizer.lr, axis="data")
    staged = any(isinstance(in_place(update), InPlace) for update in tx[1:])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    through_pure = [found[optimizer.name, dtype] for found in answers(2, pure)]
    adapted = [found[optimizer.name, dtype, 1] for found in answers(2, through_the_adapter)]
    for r, (params, states, skipped) in enumerate(adapted):
        assert skipped == 0
        if optimizer.replicated:
            assert same_bits(params, adapted[0][0])
        if staged:
            # In half precision one rounding of a param is a large part of a momentum that is made of steps.
            mine, theirs = (params, states[0]), through_pure[r]
            mine, theirs = (mine, theirs) if dtype == torch.float32 else (mine[0], theirs[0])
            pairs = list(zip(tree.leaves(mine), tree.leaves(theirs), strict=True))
            far = sum(int((~torch.isclose(a, b, rtol=tolerance, atol=tolerance)).sum()) for a, b in pairs)
            assert far == 0, far
            continue
        assert same_bits(params, through_pure[r][0])
        assert same_bits(states[0], through_pure[r][1])


@each_optimizer
def test_two_param_groups_train_what_one_trains(optimizer):
    """On one scale per tensor the groups only change the messages; 1-bit LAMB has one scale per group."""
    found = answers(2, through_the_adapter)
    two = [rank[optimizer.name, torch.float32, 2][0] for rank in found]
    if optimizer.replicated:
        assert same_bits(two[0], two[1])
    if optimizer.name != "onebit_lamb":
        for a, b in zip(found[0][optimizer.name, torch.float32, 1][0], two[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Bad numbers.


def one_bad_number(name: str, phase: Phase, culprit: int, groups: int) -> tuple:
    optimizer = BY_NAME[name]
    params = [torch.nn.Parameter(p) for p in start()]
    split = [params] if groups == 1 else [params[:2], params[2:]]
    asked = [Phase.WARMUP, Phase.WARMUP, phase, phase, phase]
    with bound():
        opt = fn.Optimizer(
            [{"params": p} for p in split], partial(optimizer.make, axis="data"), schedule=asked.__getitem__, lr=0.01
        )
    history = []
    for t in range(len(asked)):
        for p, g in zip(params, gradient(t, dist.get_rank()), strict=True):
            p.grad = g
        if t == 3 and dist.get_rank() == culprit:
            params[1].grad[2] = float("nan")
        opt.step()
        inner = [state.inner for state in opt.states]
        history.append(([b.clone() for b in bits(params)], [b.clone() for b in bits(inner)], opt.skipped))
    return history


SKIPPING = [(o, phase) for o in OPTIMIZERS for phase in o.phases if phase is not Phase.LOCAL]
CULPRITS = ((0, 2), (1, 1))
"""A rank, and the param groups that it has."""

BAD = tuple((o.name, phase, *CULPRITS[i % 2]) for i, (o, phase) in enumerate(SKIPPING))
"""Either culprit, with as many param groups, in turn."""


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD, ids=[f"{name}-{phase.value}-{culprit}" for name, phase, culprit, _ in BAD])
def test_nan_on_one_rank_skips_the_step_on_all_and_leaves_every_bit(case):
    for found in answers(2, one_bad_number):
        history = found[case]
        (p2, s2, skipped2), (p3, s3, skipped3), (p4, _, skipped4) = history[2:]
        assert (skipped2, skipped3, skipped4) == (0, 1, 1)
        assert all(map(torch.equal, p2, p3))
        assert all(map(torch.equal, s2, s3))
        assert not all(map(torch.equal, p3, p4))


# Ranks that do not mean the same thing.


def disagree(field: str) -> str:
    second = dist.get_rank() == 1
    shapes = [(4, 3), (6,)] if field == "shape" and second else [(4, 3), (5,)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    if field == "dtype" and second:
        params[1] = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    if field == "count" and second:
        params.append(torch.nn.Parameter(torch.ones(2)))
    changes: dict[str, dict[str, Any]] = {
        "b1": {"b1": 0.8},
        "eps": {"eps": 1e-6},
        "weight_decay": {"weight_decay": 0.1},
        "codec": {"codec": fn.sign(block=128)},
        "servers": {"servers": False},
        "max_step": {"max_step": 2.0},
    }
    hyper = changes.get(field, {}) if second else {}
    lr = 0.5 if field == "lr" and second else 0.25
    schedule = fn.freeze_after(20 if field == "schedule" and second else 10)
    named = list(zip(("first", "second", "third"), params, strict=False))
    groups = [{"params": named[::-1] if field == "order" and second else named}]
    if field == "groups" and second:
        groups.append({"params": [("more", torch.nn.Parameter(torch.ones(2)))]})
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    other = {"other": alone if second else dist.group.WORLD} if field == "world" else {}
    agreement.__version__ = "9.9.9" if field == "version" and second else fn.__version__
    rows = {} if field == "steps in place" and second else match._rows  # a method's module is not imported there
    optimizer = fn.onebit_lamb if field == "optimizer" and second else fn.onebit_adam
    with mock.patch.object(match, "_rows", rows), fn.bind({"data": dist.group.WORLD, **other}):
        try:
            fn.Optimizer(groups, partial(optimizer, axis="data", **hyper), schedule=schedule, lr=lr)
        except fn.RanksDisagree as error:
            return str(error) if error.rank == 1 and error.field else f"rank {error.rank}, field {error.field!r}"
    return "no error"


NAMED = {
    "shape": "params[1]",
    "dtype": "params[1]",
    "count": "number of parameters in group 0 is 3 on rank 1 and 2 on rank 0",
    "b1": "b1",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "lr": "lr",
    "codec": "block",
    "servers": "servers",
    "max_step": "max_step is 2.0 on rank 1",
    "optimizer": "scale_by_adam.b1 is missing on rank 1",
    "schedule": "steps is 20 on rank 1 and 10 on rank 0",
    "groups": "param groups is 2 on rank 1 and 1 on rank 0",
    "order": "name of parameter 0 in group 0 is second",
    "world": "size of axis 'other' is 1",
    "version": "version of fn is 9.9.9",
    "steps in place": "steps taken in place is ()",
}


ASKED: dict[int, tuple[tuple[Callable[..., Any], tuple[tuple, ...]], ...]] = {
    2: (
        (codes, CODES),
        (pure, PURE),
        (through_the_adapter, ADAPTED),
        (one_bad_number, BAD),
        (disagree, tuple((name,) for name in NAMED)),  # last, as a refusal closes connections
    ),
    4: ((codes, CODES), (pure, tuple(case for case in PURE if case[1] == torch.float32))),
}
"""What is run on so many ranks, whose processes are started once."""


@pytest.mark.parametrize("field", sorted(NAMED))
def test_ranks_that_disagree_at_construction_are_refused_on_all_with_rank_and_field(field):
    for found in answers(2, disagree):
        assert "ranks disagree" in found[(field,)]
        assert "rank 1" in found[(field,)]
        assert "nothing has moved" in found[(field,)]
        assert NAMED[field] in found[(field,)]


def numbers_of_many_digits() -> dict[str, str]:
    """Return what ranks say whose numbers, tensors, are alike in their first nine digits."""
    second, found = dist.get_rank(), {}
    rates = {
        "float64": torch.tensor(0.1, dtype=torch.float64) * (1 + second * 1e-14),
        "float32": torch.tensor(0.1) * (1 + second * 2e-7),
        "int64": torch.tensor(2**53 + second),
        "the same": torch.tensor(0.3, dtype=torch.float64),
    }
    with bound():
        for name, rate in rates.items():
            try:
                fn.adamw(rate, axis="data").init([torch.ones(3)])
                found[name] = "no error"
            except fn.RanksDisagree as error:
                found[name] = str(error)
    return found


def test_numbers_that_are_alike_in_nine_digits_are_told_apart():
    for found in ranks.run(2, numbers_of_many_digits):
        assert "lr is 0.100000000000001 on rank 1 and 0.1 on rank 0" in found["float64"]
        assert "lr is 0.100000024 on rank 1 and 0.100000001 on rank 0" in found["float32"]
        assert f"lr is {2**53 + 1} on rank 1 and {2**53} on rank 0" in found["int64"]
        assert found["the same"] == "no error"


def disagree_in_pure_functions() -> str:
    tx = fn.chain(fn.average("data"), fn.compressed_average("data", fn.sign(8 * (1 + dist.get_rank()))))
    with bound():
        try:
            tx.init([torch.ones(3)])
        except ValueError as error:
            return str(error)
    return "no error"


def test_the_fourth_rank_is_named_and_pure_functions_are_checked_too():
    for text in ranks.run(4, disagree_in_pure_functions):
        assert "ranks disagree" in text
        assert "block is 16 on rank 1 and 8 on rank 0" in text
