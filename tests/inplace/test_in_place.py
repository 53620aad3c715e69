"""Steps in place are the pure steps: the same numbers, the same messages, nothing written before all is agreed."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import chains
import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.adapters.deepspeed import transforms as deepspeed
from fn.inplace.compressed_average import CodedMean
from fn.kernels.table import cells

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

SHAPES = [(37, 5), (7,), (), (0,), (4097,), (8, 16)]
BFLOAT16 = fn.identity(torch.bfloat16)


def drop_in(lr: float | torch.Tensor, axis: str) -> fn.Transform:
    """Return DeepSpeed's 1-bit Adam of a param group."""
    (tx,) = deepspeed.onebit_adam([deepspeed.ParamGroup(lr, 0.9, 0.999, 1e-8, 0.1)], axis=axis, world_size=2)
    return tx


CASES: list[dict[str, Any]] = [
    {},
    {"feedback": fn.classic(lazy=True), "weight_decay": 0.1},
    {"layout": "per_tensor", "feedback": fn.classic(lazy=True)},
    {"make": drop_in},
    {"codec": deepspeed.codec(2), "b1": 0.3},
    {"layout": "fused"},
    {"codec": fn.int8(), "feedback": fn.damped()},
    {"codec": fn.int4(64), "feedback": fn.damped(block=64), "layout": "per_tensor", "bias_correction": False},
    {"codec": fn.int8(), "weight_decay": 0.1},
    {"codec": BFLOAT16, "layout": "fused"},
    {"warmup": fn.int8()},
    {"servers": False},
    {"servers": False, "layout": "per_tensor", "feedback": fn.classic(lazy=True)},
    {"servers": False, "codec": fn.int8(), "feedback": fn.damped(), "layout": "fused"},
]


def gradient(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads[0][3] = 0.0  # a row that never receives a gradient
    if step == 4 and rank == 0:
        grads[1][2] = float("nan")
    return grads


LAMB_CASES = [
    {},
    {"weight_decay": 0.1, "feedback": fn.classic(lazy=True)},
    {"codec": fn.int8(), "feedback": fn.damped(), "b1": 0.3, "weight_decay": 0.1},
    {"warmup": fn.int4()},
    {"servers": False},
]


BY_NAME = {"onebit_adam": CASES, "onebit_lamb": LAMB_CASES}


def against_the_pure_chain(name: str, rows: str = "numba") -> list[dict[str, Any]]:
    """Return, case by case, how many steps were taken in place, and what they differ in from the pure ones.

    Args: rows: "numba", or "torch" as where the extra `cpu` is not installed.
    """
    if rows == "torch":
        ranks.without("numba")
        assert [cell.provider for cell in cells("adamw_", "cpu")] == ["torch"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = []
    for hyper in BY_NAME[name][:: 1 if rows == "numba" and dist.get_world_size() > 1 else 4]:
        schedule = fn.freeze_after(3)
        given = dict(hyper)
        make = partial(given.pop("make", getattr(chains, name)), axis="data", **given)
        params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
        with fn.bind(mesh):
            opt, tx = fn.Optimizer(params, make, schedule=schedule, lr=1e-2), make(lr=1e-2)
            plain = [p.detach().clone() for p in params]
            state = tx.init(plain)
        taken, differences, skipped = 0, [], []
        for step in range(8):
            for p, g in zip(params, gradient(step, dist.get_rank()), strict=True):
                p.grad = g
            with in_place_steps.listed() as in_place_here, fn.ledger() as sent:
                opt.step()
            with fn.bind(mesh), fn.ledger() as sent_too:
                grads = gradient(step, dist.get_rank())
                updates, state = tx.update(schedule(step))(grads, state, plain)
                plain = fn.apply_updates(plain, updates)
            same = sent.sent == sent_too.sent
            asks = step in (0, 3, 4)  # the first of each phase, and one that is skipped
            assert same or asks, (step, hyper.keys(), sent, sent_too)
            taken += sum(in_place_here)
            differences.append(difference([params, opt.states[0]], [plain, state]))
            skipped.append(opt.skipped)
        found.append({"taken": taken, "differences": differences, "skipped": skipped})
    return found


@contextmanager
def count_means():
    """List the steps that are taken in place from what the ranks agreed on."""
    taken, original = [], CodedMean.step

    def noted(*args: Any, **kwargs: Any) -> None:
        taken.append(True)
        original(*args, **kwargs)

    CodedMean.step = noted
    try:
        yield taken
    finally:
        CodedMean.step = original


three = ranks.Cases(3)


@three
def adams() -> list[dict[str, Any]]:
    return against_the_pure_chain("onebit_adam")


@three
def lambs() -> list[dict[str, Any]]:
    return against_the_pure_chain("onebit_lamb")


@pytest.mark.slow
def test_a_step_in_place_is_the_pure_step():
    check_cases(CASES, three.answer("adams"))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "rows"), [(1, "numba"), (2, "torch")])
def test_a_step_in_place_is_the_pure_step_on_other_ranks_and_rows(world, rows):
    check_cases(CASES[::4], ranks.run(world, against_the_pure_chain, "onebit_adam", rows), rows)


def test_a_step_that_overflows_is_at_the_clamp_in_place():
    p = torch.nn.Parameter(torch.ones(6))
    opt = fn.Optimizer([p], partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(3), lr=0.01)
    for step in range(8):
        p.grad = torch.linspace(-1, 1, 6) if step < 4 else torch.full((6,), 3e38)
        opt.step()
    assert opt.skipped == 0
    assert p.isfinite().all()


@pytest.mark.slow
def test_onebit_lamb_in_place_is_the_pure_one():
    check_cases(LAMB_CASES, three.answer("lambs"))


def check_cases(cases: Any, outcomes: Any, rows: str = "numba") -> None:
    for outcome in outcomes:
        for case, found in zip(cases, outcome, strict=True):
            assert found["taken"] == (8 if len(outcomes) > 1 or "make" not in case else 3), case
            assert found["skipped"] == [0, 0, 0, 0, 1, 1, 1, 1]
            bound = 3e-6
            if rows == "torch":  # moments differ in their last bits, which decide how a momentum is rounded to bfloat16
                bound = 1e-3 if case.get("codec") is BFLOAT16 else 1e-5
            assert max(found["differences"]) < bound, (case, found["differences"])


def difference(a: Any, b: Any) -> float:
    """Return the largest difference, relative to numbers above 1.

    Errors in integers are left out: they say nothing where all of them is rounding.
    """
    rounded = {id(x) for name in ("codes", "scales") for x in tree.leaves(tree.fields(a, name))}
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max(
        float((x.detach() - y).abs().max() / y.abs().max().clamp(min=1))
        for x, y in pairs
        if x.numel() and id(x) not in rounded
    )


ZERO_ONE_CASES = [
    {},
    {"feedback": fn.classic(lazy=True), "layout": "per_tensor"},
    {"codec": fn.sign(block=64)},
    {"codec": fn.int8(), "feedback": fn.damped(), "bias_correction": False},
    {"warmup": fn.int8()},
    {"servers": False},
    {"servers": False, "codec": fn.int8(), "feedback": fn.classic(lazy=True), "layout": "per_tensor",
     "bias_correction": False},
]  # fmt: skip


def zero_one_against_the_pure_chain(hyper: dict[str, Any]) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    make = partial(chains.zero_one_adam, axis="data", weight_decay=0.1, **hyper)
    phases = [Phase.WARMUP] * 3 + [Phase.LOCAL, Phase.LOCAL, Phase.COMPRESSED, Phase.LOCAL, Phase.COMPRESSED]
    phases += [Phase.COMPRESSED, Phase.WARMUP]
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
    with fn.bind(mesh):
        opt, tx = fn.Optimizer(params, make, schedule=phases.__getitem__, lr=1e-2), make(lr=1e-2)
        plain = [p.detach().clone() for p in params]
        state = tx.init(plain)
    differences = []
    for step, phase in enumerate(phases):
        grads = gradient(step, dist.get_rank())  # a NaN in step 4, a local one
        if step == 7 and dist.get_rank() == 1:
            grads[4][9] = float("inf")  # all ranks skip this one
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        with count_means() as means:
            opt.step()
        assert means == [True] * (phase is Phase.COMPRESSED and step != 7), (step, means)
        with fn.bind(mesh):
            updates, state = tx.update(phase)(grads, state, plain)
            plain = fn.apply_updates(plain, updates)
        if hyper == {"servers": False} and phase is Phase.COMPRESSED:  # a bound of it, from the scales of all ranks
            (peak,), (exact,) = (tree.fields(x, "peak") for x in (opt.states, state))
            assert 0 < exact <= peak * (1 + 1e-6) < 2 * exact, (step, peak, exact)
            exact.copy_(peak)
        differences.append(difference([params, opt.states[0]], [plain, state]))
    assert [int(x) for x in tree.fields(opt.states, "dropped")] == [int(dist.get_rank() == 0)]
    assert opt.skipped == 1
    return differences


@three
def zero_one_cases() -> list[list[float]]:
    return [zero_one_against_the_pure_chain(hyper) for hyper in ZERO_ONE_CASES]


@pytest.mark.slow
def test_zero_one_adam_in_place_is_the_pure_one():
    for outcome in three.answer("zero_one_cases"):
        for case, differences in zip(ZERO_ONE_CASES, outcome, strict=True):
            assert max(differences) < 3e-6, (case, differences)


def test_autograd_refuses_to_go_back_through_params_that_a_step_overwrote():
    w = torch.nn.Parameter(torch.ones(40))
    opt = fn.Optimizer([w], fn.adamw, lr=0.1)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_other_sizes_than_the_params_are_never_staged():
    """A kernel sees addresses: it would write behind the end of the moments."""
    p = torch.nn.Parameter(torch.ones(10))
    opt = fn.Optimizer([p], fn.adamw)
    p.data, p.grad = torch.ones(100_000), None
    p.grad = torch.ones(100_000)
    with pytest.raises(ValueError, match=r"leaf '0' to have its shape at init, \(10,\), but got \(100000,\)"):
        opt.step()
    assert torch.equal(p.detach(), torch.ones(100_000))


@pytest.mark.parametrize("change", ["nothing", "memory", "transposed", "gradient", "state"])
def test_steps_notice_what_changed_since_the_last_one(change):
    """What is only compared from step to step: tensors at their addresses."""
    torch.manual_seed(0)
    start, grads = torch.randn(40, 40), torch.randn(4, 40, 40)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    opt, reference = fn.Optimizer([ours], fn.adamw, lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    for step, grad in enumerate(grads):
        if step == 2:
            if change == "memory":
                ours.data, theirs.data = ours.data.clone(), theirs.data.clone()
            elif change == "transposed":  # the same memory, seen in another way
                ours.data, theirs.data = ours.data.t(), theirs.data.t()
            elif change == "gradient":
                grad = grad.t().contiguous().t()
            elif change == "state":
                moments = opt.states[0].inner[1]
                moments.mu[0] = moments.mu[0].clone()
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        opt.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def zero_one_without_steps() -> list[float]:
    """Synchronise at a learning rate of zero, where no momentum follows from where the ranks went."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    p = torch.nn.Parameter(torch.ones(40))
    with fn.bind(mesh):
        phases = [Phase.WARMUP, Phase.COMPRESSED]
        opt = fn.Optimizer([p], partial(fn.zero_one_adam, axis="data"), schedule=phases.__getitem__, lr=0.0)
    for step in range(2):
        p.grad = torch.full((40,), float(step + dist.get_rank()))
        opt.step()
    (mu,) = tree.fields(opt.states, "mu")
    return [float(p.detach().min()), float(p.detach().max()), float(mu[0].abs().max()), opt.skipped]


def test_zero_one_adam_synchronises_at_a_learning_rate_of_zero():
    assert ranks.run(2, zero_one_without_steps) == [[1.0, 1.0, 0.0, 0]] * 2
