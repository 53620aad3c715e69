"""A schedule whose phases do not all average over an axis, so that ranks would go apart in one of them."""

from __future__ import annotations

import pytest
import registry
import torch
from ranks import Cases

import fn
from fn import Phase

case = Cases(2)
CODES = fn.compressed_average("data", fn.int8(8))


def adam(lr: float = 0.1) -> fn.Transform:
    return fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))


AVERAGE = fn.average("data")
APART = {
    "warm-up only": (lambda lr: fn.chain(AVERAGE, adam(lr)), fn.freeze_after(3)),
    "codes only": (lambda lr: fn.chain(CODES, adam(lr)), fn.freeze_after(3)),
    "one branch": (
        lambda lr: fn.chain(AVERAGE, fn.partition({"a": fn.chain(CODES, adam(lr)), "b": adam(lr)}, ["a", "b"])),
        fn.freeze_after(3),
    ),
    "some parameters": (lambda lr: fn.chain(AVERAGE, fn.mask(CODES, [True, False]), adam(lr)), fn.freeze_after(3)),
    "1-bit Adam without its warm-up": (
        lambda lr: fn.chain(fn.scale_by_onebit_adam(sync=CODES), fn.scale_by_learning_rate(lr)), fn.freeze_after(3)
    ),
    "0/1 Adam without its warm-up": (
        lambda lr: fn.scale_by_zero_one_adam(lr, sync=CODES), fn.zero_one_schedule(2, 1, 1, 4)
    ),
    "rounds of what has none": (lambda lr: fn.chain(AVERAGE, adam(lr)), fn.every(3, start=2)),
    "a clip's axis is no average": (
        lambda lr: fn.chain(AVERAGE, fn.clip_by_global_norm(1.0, "data"), adam(lr)), fn.freeze_after(3)
    ),
}  # fmt: skip
TOGETHER = {
    "both": (lambda lr: fn.chain(AVERAGE, CODES, adam(lr)), fn.freeze_after(3)),
    "the cure": (lambda lr: fn.chain(fn.unfrozen(AVERAGE), adam(lr)), fn.freeze_after(3)),
    "no warm-up": (lambda lr: fn.chain(CODES, adam(lr)), fn.freeze_after(0)),
    "no axis": (adam, fn.freeze_after(3)),
    "a link without facts": (
        lambda lr: fn.chain(AVERAGE, fn.stateless(lambda u, p: fn.pmean(u, "data")), adam(lr)), fn.freeze_after(3)
    ),
    "rounds without a warm-up": (
        lambda lr: fn.outer(adam(lr), fn.scale_by_learning_rate(1.0), fn.compressed_average("data", fn.identity())),
        fn.every(3),
    ),
    "branches of two kinds": (
        lambda lr: fn.partition(
            {"a": fn.chain(AVERAGE, CODES, adam(lr)), "b": fn.chain(fn.unfrozen(AVERAGE), adam(lr))}, ["a", "b"]
        ),
        fn.freeze_after(3),
    ),
}  # fmt: skip


def made(make, schedule) -> tuple[fn.Optimizer, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
    with fn.bind({"data": torch.distributed.group.WORLD}):
        return fn.Optimizer(params, make, schedule=schedule), params


def train(make, schedule, steps: int = 6) -> list[torch.Tensor]:
    opt, params = made(make, schedule)
    for t in range(steps):
        for p in params:
            p.grad = torch.randn(8, generator=torch.Generator().manual_seed(t + 50 * torch.distributed.get_rank()))
        opt.step()
    return [p.detach() for p in params]


@case
def refused() -> dict[str, tuple[str, str, float]]:
    """Return what is said at construction; by a plain schedule in its first such step, and how far that came."""
    found = {}
    for name, (make, schedule) in APART.items():
        with pytest.raises(ValueError, match="an average over 'data'") as at_once:
            made(make, schedule)
        opt, params = made(make, lambda step: schedule(step))  # noqa: B023
        with pytest.raises(ValueError, match="an average over 'data'") as later:  # noqa: PT012
            for t in range(6):
                before = [p.detach().clone() for p in params]
                for p in params:
                    p.grad = torch.full((8,), float(t + 1 + torch.distributed.get_rank()))
                opt.step()
        moved = max(float((p.detach() - q).abs().max()) for p, q in zip(params, before, strict=True))
        found[name] = str(at_once.value), str(later.value), moved
    return found


@case
def together() -> dict[str, list[torch.Tensor]]:
    return {name: train(make, schedule) for name, (make, schedule) in TOGETHER.items()}


@pytest.mark.parametrize("name", APART)
def test_an_average_in_some_phases_only_is_refused_with_the_cure(name):
    for found in case.answer("refused"):
        at_once, later, moved = found[name]
        assert "fn.unfrozen(fn.average('data'))" in at_once
        assert "fn.unfrozen(fn.average('data'))" in later
        assert moved == 0


@pytest.mark.parametrize("name", TOGETHER)
def test_what_may_be_right_is_not_refused(name):
    first, second = (found[name] for found in case.answer("together"))
    if name != "no axis":
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@registry.each_of_all
def test_named_methods_average_alike_in_all_of_their_phases(optimizer):
    averaged = optimizer.make(axis="data").facts.averaged
    of_phase = {Phase.WARMUP: averaged.warmup, Phase.COMPRESSED: averaged.compressed, Phase.LOCAL: averaged.local}
    axes = {phase.phase: {*of_phase[phase.phase]} for phase in optimizer.phases}
    assert len({*map(frozenset, axes.values())}) == 1
    assert optimizer.divided or optimizer.name == "primal_average" or {*averaged.warmup} == {"data"}
