"""Rounds of local steps behind `fn.Optimizer`: the numbers of the pure updates, on real ranks."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import chains
import own_pieces
import pytest
import ranks
import registry
import torch
import torch.distributed as dist
from torch import Tensor

import fn
from fn import Phase, Round, tree

STEPS = 18
SHAPES = [(5, 7), (7,), (3, 7), ()]

two = ranks.Cases(2)


def by_size(params: Any) -> Any:
    return tree.map(lambda p: 0 if p.ndim > 1 else 1, params)


def meeting(*parts: str) -> Any:
    """Return what makes a method of one's own that moves the params in these parts of a round."""

    def make(lr: Any, axis: str) -> fn.Transform:
        inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
        return own_pieces.meeting(inner, axis, parts)

    return make


METHODS: dict[str, tuple[Any, Any]] = {
    "diloco": (fn.diloco, fn.every(4, start=3)),
    "streaming": (partial(chains.diloco, fragments=2, alpha=0.5), fn.every(6, fragments=2, delay=2, start=2)),
    "named fragments": (partial(fn.diloco, fragments=by_size), fn.every(4, fragments=2, delay=1)),
    "signs": (partial(fn.diloco, codec=fn.sign(), fragments=2), fn.every(4, fragments=2, start=2)),
    "late signs": (partial(fn.diloco, codec=fn.sign()), fn.every(5, delay=3, start=2)),
    "sparse_loco": (partial(fn.sparse_loco, k=4, tile=4), fn.every(3, delay=1)),
    "local_sgd": (partial(fn.local_sgd, momentum=0.9), fn.every(2, start=1)),
    "muloco": (partial(fn.muloco, codec=fn.bins(4, 6)), fn.every(3)),
    **{
        method.name: (partial(method.make, guard={"temperature": 1.0, "clip": 1.0}, alpha=0.5), fn.every(4, delay=2))
        for method in registry.CONTRIB_ROUNDS
        if method.make is own_pieces.guarded_diloco
    },
    "late fragments": (partial(chains.diloco, fragments=3, alpha=0.5), fn.every(6, fragments=3, delay=5)),
    "params in the mean": (meeting("mean"), fn.every(3)),
    "params in all parts": (meeting("difference", "mean", "outer"), fn.every(3)),
    "params in the difference, a late mean": (meeting("difference", "outer"), fn.every(4, delay=2)),
    "phases": (fn.diloco, lambda step: Phase.COMPRESSED if step % 3 == 2 else Phase.LOCAL),
}


def start(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(step: int, params: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [0.5 * p.float() + torch.randn(p.shape, generator=generator) for p in params]


def purely(make: Any, schedule: Any, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return the params after each step of a loop of one's own."""
    params, found = start(dtype), []
    with fn.bind({"data": dist.group.WORLD}):
        tx = make(lr=0.02, axis="data")
        state = tx.init(params)
        for step in range(STEPS):
            grads = [g.to(dtype) for g in gradients(step, params)]
            when = schedule(step)
            updates, state = tx.update(when)(grads, state, params)
            params = fn.apply_updates(params, updates)
            found.append(params)
    return found


def optimizer(make: Any, schedule: Any, dtype: torch.dtype = torch.float32, **more: Any) -> fn.Optimizer:
    params = [torch.nn.Parameter(p) for p in start(dtype)]
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(params, partial(make, axis="data"), schedule=schedule, lr=0.02, **more)


def take(opt: fn.Optimizer, step: int) -> list[Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    for p, g in zip(params, gradients(step, [p.detach() for p in params]), strict=True):
        p.grad = g.to(p.dtype)
    opt.step()
    return [p.detach().clone() for p in params]


def farthest(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> float:
    pairs = [(x, y) for a, b in zip(found, wanted, strict=True) for x, y in zip(a, b, strict=True)]
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@two
def behind_the_optimizer() -> dict[str, float]:
    found = {}
    for name, (make, schedule) in METHODS.items():
        opt = optimizer(make, schedule)
        found[name] = farthest([take(opt, step) for step in range(STEPS)], purely(make, schedule))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_optimizer_takes_the_steps_of_the_pure_updates(name):
    for found in two.answer("behind_the_optimizer"):
        assert found[name] <= 2e-6


def late_params() -> tuple[str, float]:
    """Raise on both ranks, whose connections are closed by that: nothing is to be run behind it."""
    opt, text = optimizer(meeting("mean"), fn.every(4, delay=2)), ""
    alone = optimizer(meeting("mean"), lambda step: Round())
    for step in range(4):
        there = take(alone, step)
        try:
            take(opt, step)
        except ValueError as error:
            text = str(error)
    return text, farthest([[p.detach() for p in opt.param_groups[0]["params"]]], [there])


def test_params_of_a_mean_that_travels_are_refused_by_name():
    for text, far in ranks.run(2, late_params):
        assert text.startswith("exchange: expected `mean` to return the params that it got, ")
        assert "return params in `outer`, or use a schedule without a delay" in text
        assert far == 0.0  # the local steps have been taken


@two
def rank_0s_round_on_all_ranks() -> list[str]:
    opt = optimizer(fn.diloco, fn.every(4))
    for step in range(2):
        take(opt, step)
    box = [opt.state_dict()]
    dist.broadcast_object_list(box, src=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer(fn.diloco, fn.every(4)).load_state_dict(box[0])
    return [str(w.message) for w in caught]


def test_what_another_rank_has_of_its_own_within_a_round_is_taken_with_a_warning_only():
    first, (text,) = two.answer("rank_0s_round_on_all_ranks")
    assert first == []
    assert "is of rank 0 of 2, but this is rank 1 of 2: what is each rank's own within a round" in text


@two
def sent() -> list[list[int]]:
    """Return the bytes of each step: of exact differences at once and late, of gradients that a trainer clips."""
    found = []
    for schedule in (fn.every(4), fn.every(4, delay=2)):
        opt, each = optimizer(fn.diloco, schedule, max_norm=1.0), []
        for step in range(8):
            with fn.ledger() as wire:
                take(opt, step)
                opt.states  # noqa: B018  # which waits for the mean
            each.append(wire.total)
        found.append(each)
    return found


def test_nothing_is_sent_in_local_steps():
    for at_once, late in two.answer("sent"):
        count = sum(torch.Size(shape).numel() for shape in SHAPES)
        assert [x > 0 for x in at_once] == [False, False, False, True] * 2
        assert [x > 0 for x in late] == [False, True, False, False] * 2
        assert max(at_once) <= 4 * count + 100
        assert max(late) == max(at_once)


@two
def copied() -> bool:
    """A copy that is made while a mean is on its way has it, too."""
    opt = optimizer(fn.diloco, fn.every(4, delay=2))
    for step in range(2):
        take(opt, step)
    other = copy.deepcopy(opt)
    for step in range(2, 4):
        a, b = take(opt, step), take(other, step)
    return farthest([a], [b]) == 0


def test_a_copy_has_what_is_on_its_way():
    assert all(two.answer("copied"))


@pytest.mark.parametrize(
    ("schedule", "fragments", "message"),
    [
        (fn.every(4, fragments=2), None, "schedule: expected 1 fragments, .* but got fn.every.fragments=2"),
        (fn.every(4), 3, "schedule: expected 3 fragments, .* but got fn.every.fragments=1"),
    ],
)
def test_other_fragments_than_those_of_the_schedule_are_refused(schedule, fragments, message):
    params = [torch.nn.Parameter(p) for p in start()]

    def make(lr):
        inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
        return fn.outer(inner, fn.scale_by_learning_rate(0.7), fn.chain(), fragments=fragments)

    with pytest.raises(ValueError, match=message):
        fn.Optimizer(params, make, schedule=schedule, lr=0.01)


def test_a_schedule_of_rounds_is_refused_where_there_are_no_local_steps():
    params = [torch.nn.Parameter(p) for p in start()]
    with pytest.raises(ValueError, match="is Every, which does not fit this optimizer"):
        fn.Optimizer(params, partial(fn.onebit_adam, axis="data"), schedule=fn.every(4), lr=0.01)


def test_a_round_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match=r"phase.begin: expected the number of a fragment"):
        fn.Optimizer([torch.nn.Parameter(torch.ones(2))], fn.adamw, schedule=lambda step: Round(-1))


def order_of_phases(*phases: Any) -> Any:
    """Return a schedule that gives these phases, and the last one from then on."""
    return lambda step: phases[min(step, len(phases) - 1)]


FIRST_ALIKE = [fn.diloco, fn.local_sgd, fn.sparse_loco, fn.muloco, fn.zero_one_adam, fn.contrib.des_loc]


@pytest.mark.parametrize("make", FIRST_ALIKE)
def test_a_warm_up_step_behind_local_steps_is_refused_however_steps_are_taken(make):
    """In place or link by link: ranks that stepped alone would otherwise stay apart for good."""
    param = torch.nn.Parameter(torch.ones(8, 8))
    schedule = order_of_phases(Phase.WARMUP, Phase.LOCAL, Phase.WARMUP)
    opt = fn.Optimizer([param], partial(make, axis="data"), schedule=schedule, lr=0.01)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        opt.step()
    before, state = param.detach().clone(), [x.clone() for x in tree.leaves(opt.states)]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"phase: expected (LOCAL|COMPRESSED) .*, but got WARMUP"):
            opt.step()
        assert torch.equal(param, before)
        assert all(map(torch.equal, tree.leaves(opt.states), state))
        assert opt.steps == 2


@two
def schedules_without_rounds() -> list[list[str]]:
    found = []
    for make in (fn.diloco, partial(fn.diloco, codec=fn.sign()), fn.local_sgd):
        for schedule in (None, fn.freeze_after(2), fn.every(3), lambda step: Round()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer(make, schedule)
            found.append([str(w.message) for w in caught])
    return found


def test_a_schedule_without_rounds_warns_and_names_every():
    for found in two.answer("schedules_without_rounds"):
        texts = [[text for text in each if text.startswith("schedule: is ")] for each in found]
        assert [len(each) for each in texts] == [1, 1, 0, 0] * 3
        assert [len(each) for each in found] == [1, 1, 0, 0] * 3
        assert all("fn.every(h)" in text for each in texts for text in each)
