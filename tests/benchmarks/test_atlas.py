"""`benchmarks/atlas.py`: it has every named optimizer, goes on where it stopped, and tells what its rows say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from registry import OPTIMIZERS, OTHERS

import fn
from benchmarks.atlas import runs
from benchmarks.atlas.methods import METHODS, H
from benchmarks.atlas.paired import rate_at
from benchmarks.atlas.summary import chosen_rate, missing_runs, rates_to_try, summary, table
from benchmarks.atlas.tasks import TASKS
from benchmarks.atlas.train import Run
from fn.planner.methods import methods
from fn.planner.network import Cost, network
from fn.planner.predict import plan
from fn.planner.traffic import Model


def test_every_named_optimizer_has_a_row() -> None:
    assert {named.name.split(",")[0] for named in (*OPTIMIZERS, *OTHERS)} <= {name.split(",")[0] for name in METHODS}


def row(method: str, lr: float, loss: float | None, seed: int = 0, workers: int = 4) -> dict[str, Any]:
    found = Run("language model", method, workers, seed, 400, lr)._asdict()
    return {**found, "tuning": loss, "loss": loss, "accuracy": None, "bytes": 1000, "seconds": 1.0}


def rate(of: str, place: int) -> float:
    return rate_at(METHODS[of].rate, place)


def tried(*losses: float | None, of: str = "adamw", places: tuple[int, ...] = (-1, 0, 1, 2)) -> list[dict[str, Any]]:
    return [row(of, rate(of, place), loss) for place, loss in zip(places, losses, strict=False)]


def test_a_rate_is_searched_until_the_best_is_at_no_edge() -> None:
    def places(*losses: float | None) -> list[int]:
        rates = rates_to_try(tried(*losses), "language model", "adamw")
        return [place for place in range(-3, 4) if rate("adamw", place) in rates]

    assert places() == [-1, 0, 1]
    assert places(2.2, 2.1, 2.0) == [2]
    assert places(2.2, 2.1, 2.0, None) == []
    assert places(2.0, 2.1, 2.2) == [-2]
    chosen = partial(chosen_rate, task="language model", method="adamw")
    assert chosen(tried(2.2, 2.1, 2.0)) is None
    assert chosen(tried(2.2, 2.1, 2.0, 2.3)) == rate("adamw", 1)


def test_what_is_reported_chooses_no_rate() -> None:
    shown = [{**row("adamw", rate("adamw", 0), 0.1, seed=1, workers=8), "tuning": 0.1}]
    other_split = [{**r, "loss": 9.0 - r["loss"]} for r in tried(2.2, 2.1, 2.0, 2.3)]
    assert chosen_rate([*shown, *other_split], "language model", "adamw") == rate("adamw", 1)
    assert summary(tried(2.2, 2.1, 2.0, 2.3), "language model", 4, 400) == []


def seeds(method: str, *losses: float | None) -> list[dict[str, Any]]:
    return [row(method, rate(method, 0), loss, seed) for seed, loss in enumerate(losses, 1)]


def test_differences_are_paired_by_seed_and_carry_their_interval() -> None:
    rows = [*seeds("adamw", 2.0, 2.1, 2.3), *seeds("adamw, int8", 2.1, 2.2, 2.41)]
    exact, coded = summary(rows, "language model", 4, 400)
    assert exact["difference"] is None
    assert coded["difference"].verdict == "higher"
    _, near = summary([*seeds("adamw", 2.0, 2.1, 2.3), *seeds("lion", 2.1, 1.9, 2.4)], "language model", 4, 400)
    assert near["difference"].verdict == "not told apart"
    assert f"| {near['difference']} | not told apart |" in table([exact, near])


def test_a_method_that_diverged_on_a_seed_has_no_mean() -> None:
    (bad,) = summary(seeds("adamw", 2.0, None), "language model", 4, 400)
    assert "| diverged on a seed |" in table([bad])


def test_rows_of_other_lengths_are_not_mixed() -> None:
    rows = [*tried(2.2, 2.0, 2.1), *seeds("adamw", 2.0, 2.1)]
    short = [{**r, "steps": 8, "lr": 1e-2} for r in seeds("adamw", 1.0)]
    assert chosen_rate([*rows, *short], "language model", "adamw") == rate("adamw", 0)
    assert [found["lr"] for found in summary([*rows, *short], "language model", 4, 8)] == [1e-2]


def test_splits_share_nothing() -> None:
    for name, setting in TASKS.items():
        assert set(setting.choosing).isdisjoint(setting.seeds), name
        assert len(setting.seeds) >= 3


def test_every_run_ends_with_all_ranks_alike() -> None:
    """Else the mean that is scored would be one more exchange, which nobody counts."""
    for steps in (*(task.steps for task in TASKS.values()), runs.QUICK_STEPS):
        for name, method in METHODS.items():
            assert method.schedule(steps)(steps - 1) not in (fn.Phase.LOCAL, fn.Round()) or method.ends_apart, name


@pytest.mark.reliability
@pytest.mark.parametrize("name", METHODS)
def test_warm_up_and_messages_are_as_large_as_the_planner_says(name: str) -> None:
    method, ranks, shapes = METHODS[name], 4, ((64, 64), (64,), (256, 64))
    net = network(ranks, ranks, Cost(0.0, 1.0))
    made = plan(methods(Model(shapes), net, local_steps=H, interval=4, contrib=True), net, 1.0, 1, memory=1.0)
    params = {f"blocks.{i}" if len(shape) == 2 else "bias": torch.ones(shape) for i, shape in enumerate(shapes)}
    tx = method.make(lr=1e-3, axis="data")

    def sent(phase: Any) -> int:
        def run(x: torch.Tensor) -> torch.Tensor:
            with fn.ledger() as book:
                tx.update(phase)({name: x * p for name, p in params.items()}, tx.init(params), params)
            books.append(book.total)
            return x

        books: list[int] = []
        fn.simulate(run, "data", ranks)(torch.rand(ranks))
        return books[0]

    phases = [method.schedule(400)(step) for step in range(400)]
    own = made.of(method.row).method
    exchanges = [p for p in phases if p not in (fn.Phase.WARMUP, fn.Phase.LOCAL, fn.Round())]
    if exchanges and not method.alone:
        assert sent(exchanges[0]) == sum(message.size for message in own.messages)
    if fn.Phase.WARMUP in phases:
        planned = method.more * made.of(method.warm_up).method.size
        assert sent(fn.Phase.WARMUP) == pytest.approx(planned, rel=0.01)  # codes pad what they gather


@pytest.mark.parametrize("task", TASKS)
def test_the_committed_runs_are_complete(task: str) -> None:
    rows, setting = runs.read(runs.FULL), TASKS[task]
    shown = summary(rows, task, setting.workers, setting.steps)
    assert [row["method"] for row in shown] == [name for name in METHODS if task in METHODS[name].tasks]
    assert all(row["seeds"] == len(setting.seeds) for row in shown)
    assert missing_runs(rows, task) == 0
