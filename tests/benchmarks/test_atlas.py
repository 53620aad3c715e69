"""`benchmarks/atlas.py`: it has every named optimizer, goes on where it stopped, and tells what its rows say."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn import local_optimizers, low_rank_optimizers, optimizers, vote_optimizers
from fn.planner.methods import methods
from fn.planner.network import Cost, network
from fn.planner.predict import plan
from fn.planner.traffic import Model

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import atlas  # noqa: E402
import atlas_picture  # noqa: E402
from atlas_methods import METHODS, H  # noqa: E402
from atlas_summary import best, summary, table  # noqa: E402
from atlas_tasks import TASKS  # noqa: E402
from atlas_train import Run, train  # noqa: E402


def named() -> set[str]:
    """Return the names of the optimizers of `fn`."""
    modules = {m.__name__ for m in (optimizers, local_optimizers, low_rank_optimizers, vote_optimizers)}
    return {name for name in fn.__all__ if inspect.getmodule(getattr(fn, name)).__name__ in modules}


def test_every_named_optimizer_has_a_row() -> None:
    assert {"adamw", "demo", "diloco", "powersgd_adamw"} <= named() <= set(METHODS) | {"muloco"}
    assert any(name.startswith("muloco") for name in METHODS)


def row(method: str, lr: float, loss: float | None, seed: int = 0, workers: int = 4) -> dict[str, Any]:
    found = Run("language model", method, workers, seed, 400, lr)._asdict()
    return {**found, "loss": loss, "bytes": 1000, "seconds": 1.0}


def test_a_learning_rate_is_chosen_when_all_were_tried_and_one_that_diverged_never() -> None:
    low, middle, high = METHODS["adamw"].rates
    rows = [row("adamw", low, 2.0), row("adamw", middle, None)]
    assert best(rows, "language model", "adamw", 400) is None
    assert best([*rows, row("adamw", high, 2.5)], "language model", "adamw", 400) == low
    assert best([*rows, row("adamw", high, 1.5)], "language model", "adamw", 400) == high


def test_it_goes_on_where_it_stopped() -> None:
    first = list(atlas.wanted([], "language model", "adamw", [0, 1]))
    assert [run.lr for run in first] == list(METHODS["adamw"].rates)
    rows = [row("adamw", lr, lr) for lr in METHODS["adamw"].rates]
    then = set(atlas.wanted(rows, "language model", "adamw", [0, 1])) - set(first)
    assert {(run.workers, run.seed, run.lr) for run in then} == {(w, s, 1e-3) for w, s in ((4, 1), (8, 0), (8, 1))}


def test_a_method_that_diverged_on_a_seed_has_no_mean() -> None:
    rows = [row("adamw", lr, 2.0 + lr) for lr in METHODS["adamw"].rates]
    (fine,) = summary([*rows, row("adamw", 1e-3, 2.2, seed=1)], "language model", 4, 400)
    assert fine["loss"] == pytest.approx((2.001 + 2.2) / 2)
    assert fine["range"] == (2.001, 2.2)
    (bad,) = summary([*rows, row("adamw", 1e-3, None, seed=1)], "language model", 4, 400)
    assert "| diverged on a seed |" in table([bad])
    assert "| adamw | float32 | 0.001 | 2.1005 (2.0010 – 2.2000) | +0.0% | 0.00 | 1.0x |" in table([fine])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    found = atlas_picture.front(points)
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] <= p[1]}
    assert set(found) == set(points) - beaten
    assert found == sorted(set(found))


def test_rows_of_other_lengths_are_not_mixed() -> None:
    rows = [row("adamw", lr, 2.0 + lr) for lr in METHODS["adamw"].rates]
    short = {**row("adamw", 1e-2, 1.0), "steps": 8}
    assert best([*rows, short], "language model", "adamw", 400) == 1e-3
    assert [found["lr"] for found in summary([*rows, short], "language model", 4, 8)] == [1e-2]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", METHODS)
def test_every_run_ends_with_all_ranks_alike(name: str, task: str) -> None:
    """Else the mean that is scored would be one more exchange, which nobody counts."""
    for steps in (TASKS[task][1], atlas.QUICK_STEPS):
        last = METHODS[name].schedule(steps)(steps - 1)
        assert last not in (fn.Phase.LOCAL, fn.Round())


@pytest.mark.parametrize("name", METHODS)
def test_the_planner_knows_the_step_of_every_method(name: str) -> None:
    slow, fast = (atlas_picture.slowdown(name, atlas_picture.predicted(8, rate), 400) for rate in (1e8, 1e11))
    assert 1 <= fast < slow


@pytest.mark.parametrize("name", METHODS)
def test_warm_up_and_messages_are_as_large_as_the_planner_says(name: str) -> None:
    method, ranks, shapes = METHODS[name], 4, ((64, 64), (64,), (256, 64))
    net = network(ranks, ranks, Cost(0.0, 1.0))
    made = plan(methods(Model(shapes), net, local_steps=H, interval=4), net, 1.0, 1, memory=1.0)
    params = [torch.ones(shape) for shape in shapes]
    tx = method.make(lr=1e-3, axis="data")

    def sent(phase: Any) -> int:
        def run(x: torch.Tensor) -> torch.Tensor:
            with fn.ledger() as book:
                tx.update(phase)([x * p for p in params], tx.init(params), params)
            books.append(book.total)
            return x

        books: list[int] = []
        fn.simulate(run, "data", ranks)(torch.rand(ranks))
        return books[0]

    phases = [method.schedule(400)(step) for step in range(400)]
    own = made.of(method.row).method
    exchanges = [p for p in phases if p not in (fn.Phase.WARMUP, fn.Phase.LOCAL, fn.Round())]
    if exchanges:
        assert sent(exchanges[0]) == sum(message.size for message in own.messages)
    if fn.Phase.WARMUP in phases:
        planned = method.more * made.of(method.warm_up).method.size
        assert sent(fn.Phase.WARMUP) == pytest.approx(planned, rel=0.01)  # codes pad what they gather


@pytest.mark.parametrize(("task", "workers"), [(atlas.MAIN, 8), (atlas.MAIN, 4), ("fine-tuning", 4), ("digits", 4)])
def test_the_tables_are_those_of_the_committed_runs(task: str, workers: int) -> None:
    rows = atlas.read(atlas.FULL)
    found = summary(rows, task, workers, TASKS[task][1])
    assert [row["method"] for row in found] == list(METHODS)
    assert all(row["seeds"] == 3 for row in found)
    assert table(found) in (ROOT / "benchmarks" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str) -> None:
    pytest.importorskip("sklearn")
    task = TASKS["digits"][0]()
    low, middle, _ = METHODS[name].rates
    lr = low if name == "sharded_onebit_adam" else middle  # frozen after 12 steps it diverges at the other one
    found = train(Run("digits", name, 4, 0, 60, lr))
    assert found["loss"] < task.score(task.params(0)) - 0.05
    assert found["bytes"] > 0
