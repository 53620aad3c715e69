"""The transform kit: every named optimizer conforms, and each wrong transform is told its fault and the cure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chains
import own_pieces
import pytest
import ranks
import torch
import torch.distributed as dist
from registry import CODES, CONTRIB, OPTIMIZERS

import fn
from fn import Phase, tree

PARAMS = {"w": torch.linspace(-1, 1, 20).view(5, 4), "b": torch.linspace(0.5, 1, 4), "s": torch.tensor(0.3)}
METHODS: dict[str, tuple[Callable[..., fn.Transform], Any]] = {
    **{optimizer.name: (optimizer.make, optimizer.schedule) for optimizer in OPTIMIZERS},
    **{method.name: (method.make, method.schedule) for method in (*CODES, *CONTRIB)},
    "dion": (fn.dion, fn.freeze_after(10)),
    "diloco": (fn.diloco, fn.every(500, start=10)),
    "streaming": (partial(chains.diloco, fragments=2, alpha=0.5), fn.every(6, fragments=2, delay=2, start=2)),
    "local_sgd": (fn.local_sgd, fn.every(4)),
    "sparse_loco": (partial(fn.sparse_loco, k=4, tile=4), fn.every(15)),
    "muloco": (fn.muloco, fn.every(30)),
    "freeze_when_stable": (fn.onebit_adam, fn.freeze_when_stable()),
    "norm_guard, streaming": (
        partial(own_pieces.guarded_diloco, guard={"temperature": 1.0, "clip": 1.0}, fragments=2, alpha=0.5),
        fn.every(4, fragments=2, delay=1, start=2),
    ),
}


ONE_OF_EACH_KIND = (
    "adamw", "onebit_adam", "zero_one_adam", "loco_adamw", "muon, int8", "streaming", "freeze_when_stable", "des_loc",
    "no_loco", "primal_average",
)  # fmt: skip
LATER = [pytest.param(name, marks=pytest.mark.reliability) for name in METHODS if name not in ONE_OF_EACH_KIND]


@pytest.mark.parametrize("name", [*ONE_OF_EACH_KIND, *LATER])
def test_every_named_optimizer_conforms(name):
    make, schedule = METHODS[name]
    report = fn.testing.check_transform(make(lr=0.02, axis="data"), PARAMS, schedule)
    assert report, report
    assert report.checks > 6


def test_a_method_of_ones_own_conforms_with_a_delay():
    report = fn.testing.check_transform(meeting("difference", "outer"), PARAMS, fn.every(4, delay=2))
    assert report, report


def test_several_axes_are_simulated_together():
    tx = fn.onebit_adam(0.02, axis=("local", "node"))
    report = fn.testing.check_transform(tx, PARAMS, fn.freeze_after(3))
    assert report, report


class Momentum(NamedTuple):
    mu: Any


def momentum(update: Callable[[Any, Any], Any], *, averaged: bool = True, sync: bool = False) -> fn.Transform:
    """Return a chain around a momentum, which `update` makes of the old one and the gradient."""

    def step(updates: Any, state: Momentum, params: Any, /) -> tuple[Any, Momentum]:
        mu = tree.map(update, state.mu, updates)
        return fn.pmean(mu, "data") if sync else mu, Momentum(mu)

    link = fn.lift(lambda params: Momentum(tree.map(torch.zeros_like, params)), step)
    return fn.chain(*[fn.average("data")] * averaged, link, fn.scale_by_learning_rate(0.1))


def growing() -> fn.Transform:
    def step(updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        return updates, {**state, "seen": updates}

    return fn.chain(fn.average("data"), fn.lift(lambda params: {}, step), fn.scale_by_learning_rate(0.1))


def counting() -> fn.Transform:
    count = itertools.count()

    def step(updates: Any, params: Any) -> Any:
        factor = next(count)
        return tree.map(lambda u: factor * u, updates)

    return fn.chain(fn.average("data"), fn.stateless(step), fn.scale_by_learning_rate(0.1))


def hiding_nan() -> fn.Transform:
    clean = fn.stateless(lambda updates, params: tree.map(torch.nan_to_num, updates))
    return fn.skip_nonfinite(fn.chain(clean, fn.average("data"), fn.scale_by_learning_rate(0.1)))


def meeting(*parts: str) -> fn.Transform:
    inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.02))
    return own_pieces.meeting(inner, "data", parts)


def reading_mean() -> fn.Transform:
    """Return an exchange whose mean is that of the params it is shown."""
    tx = meeting("outer")

    def mean(number: int, state: Any, params: Any) -> tuple[Any, Any]:
        return params, state._replace(noted=fn.pmean(params, "data"))

    return tx._replace(exchange=tx.exchange._replace(mean=mean))


def warm_up(step: int) -> Phase:
    return Phase.WARMUP


WRONG: dict[str, tuple[Callable[[], fn.Transform], Any, str]] = {
    "writes": (
        lambda: momentum(lambda m, g: m.mul_(0.9).add_(g)), warm_up,
        r"writes into its argument state, leaf '1.mu.*write torch.add",
    ),
    "structure": (growing, warm_up, r"structure changes, leaves lost: \[\], new: \['1.seen.*same structure"),
    "dtype": (
        lambda: momentum(lambda m, g: 0.9 * m + g.double()), warm_up,
        r"leaf '1.mu.*' of the state was torch.float32 .* becomes torch.float64 .*same structure, shapes and dtypes",
    ),
    "hidden state": (counting, warm_up, r"other numbers the second time; keep what changes in the state"),
    "params apart": (
        lambda: momentum(lambda m, g: g, averaged=False), warm_up,
        r"differs between ranks",
    ),
    "undeclared": (
        lambda: momentum(lambda m, g: 0.9 * m + g, averaged=False, sync=True), warm_up,
        r"leaf '0.mu.*' of the state differs between ranks, but is called replicated; name its field in .*rank_local",
    ),
    "NaN": (hiding_nan, warm_up, r"a NaN on one rank is not skipped and counted by all ranks; let a NaN reach"),
    "late params": (
        lambda: meeting("mean"), fn.every(4, delay=2), r"the part 'mean' returns params; return them in",
    ),
    "late reading": (reading_mean, fn.every(4, delay=2), r"the part 'mean' reads the params .*in "),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_transform_is_told_its_fault_and_the_cure(what):
    make, schedule, said = WRONG[what]
    report = fn.testing.check_transform(make(), PARAMS, schedule, axis="data")
    assert not report
    assert "NOT conforming" in repr(report)
    assert any(re.search(said, fault) for fault in report.faults), report


def over_groups() -> tuple[Any, ...]:
    def of_rank(updates: Any, params: Any) -> Any:
        return tree.map(lambda u: u + dist.get_rank(), updates)

    wrong = fn.chain(fn.average("data"), fn.stateless(of_rank), fn.scale_by_learning_rate(0.1))
    alone = fn.testing.check_transform(fn.diloco(0.02, axis="data"), PARAMS, fn.every(4, delay=1, start=2))
    with fn.bind({"data": dist.group.WORLD}):
        right = fn.testing.check_transform(fn.diloco(0.02, axis="data"), PARAMS, fn.every(4, delay=1, start=2))
        codes = fn.testing.check_transform(fn.onebit_adam(0.02, axis="data"), PARAMS, fn.freeze_after(3))
        found = fn.testing.check_transform(wrong, PARAMS, warm_up)
    return right.checks > alone.checks, right.faults, codes.faults, found.faults


def test_inside_of_bind_the_steps_are_taken_over_the_process_groups():
    for more, right, codes, wrong in ranks.run(2, over_groups):
        assert more
        assert right == codes == ()
        assert any("process group: what all ranks are to hold alike differs" in fault for fault in wrong)
