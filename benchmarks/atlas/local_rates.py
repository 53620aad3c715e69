"""Measures what methods of local steps lose by their default rate: as they come, beside their own tuned rate.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.local_rates --json benchmarks/results/local_rates.json --hours 0.1

Tasks are those of the first hour and the atlas's language model, with the schedule of both: H = 16, a warm-up of 8 %, 4
workers. The rate is searched on a split and a seed that the table does not show, all other arguments left out. Runs
that the file holds are not taken again; `--hours` ends the script before the next group of runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import fn
from benchmarks import first_hour
from benchmarks.atlas import runs as atlas
from benchmarks.atlas.methods import H, labels, rounds
from benchmarks.atlas.paired import difference, rate_at, search
from benchmarks.atlas.rounds import Run, trained
from benchmarks.atlas.summary import Row
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.atlas.tasks import Task, language_model
from benchmarks.atlas.train import finite
from benchmarks.measure import commit, markdown


class Setting(NamedTuple):
    """A task: what makes it, its steps, and which of its params are Muon's."""

    make: Callable[[], Task]
    steps: int
    labels: Any


TASKS = {
    "names": Setting(partial(first_hour.names, 32), first_hour.STEPS, fn.labels_of(first_hour.Names())),
    "moved digits": Setting(partial(first_hour.digits, 64), first_hour.STEPS, fn.labels_of(first_hour.MOVED())),
    "language model": Setting(language_model, 400, labels),
}

START = {"diloco": 3e-3, "sparse_loco": 3e-3, "muloco": 3e-3, "local_sgd": 0.1, "local_sgd, momentum 0.9": 0.1}
"""Methods, and the rates that their searches begin at."""

WORKERS, CHOOSING, SEEDS = 4, 0, (1, 2, 3)

OF_DEFAULTS = (11, 12, 13, 14)
"""Seeds on which default rates were chosen."""

RATES = {
    "diloco": (0.003, 0.005, 0.007, 0.00972, 0.0135, 0.0175, 0.025), "local_sgd": (0.3, 0.42, 0.5, 0.583, 0.8),
    "sparse_loco": (0.007, 0.00972),
}  # fmt: skip
"""Rates among which they were chosen."""


def as_it_comes(method: str, task: str, lr: Any, axis: str, outer_lr: float, outer_momentum: float) -> fn.Transform:
    """Return a method with no argument but its rate."""
    more = {"labels": TASKS[task].labels} if method == "muloco" else {"momentum": 0.9} if "momentum" in method else {}
    return first_hour.named(method)(lr, axis=axis, **more)


def train(runs: Sequence[Run], task: str) -> list[Row]:
    """Train runs of one method together; return a row for each."""
    setting, (method, *_) = TASKS[task], runs[0]
    given, makes = setting.make(), {method: partial(as_it_comes, method, task)}
    return [
        {**run._asdict(), "task": task, **{name: finite(x) for name, x in given.score(params)._asdict().items()},
         "commit": commit()}
        for run, params in trained(runs, given, rounds()(setting.steps), setting.steps, makes)
    ]  # fmt: skip


def losses(rows: Sequence[Row], task: str, method: str, split: str, over: str, **fixed: Any) -> dict[Any, float]:
    """Return losses by seed or rate; NaN where a run diverged."""
    own = runs_of(rows, task=task, method=method, **fixed)
    return {row[over]: math.nan if row[split] is None else row[split] for row in own}


def tuned(rows: Sequence[Row], task: str, method: str) -> tuple[float, list[float]]:
    """Return the rate that is chosen, NaN before the search is over; and the rates that it lacks."""
    found = search(START[method], losses(rows, task, method, "tuning", "lr", seed=CHOOSING))
    lr = math.nan if found.chosen is None else rate_at(START[method], found.chosen)
    return lr, [rate_at(START[method], place) for place in found.missing]


def missing(rows: Sequence[Row], task: str, method: str) -> list[Run]:
    """Return the next group of runs that a method lacks on a task; none at the end."""
    lr, rates = tuned(rows, task, method)
    pairs = [(CHOOSING, x) for x in rates]
    if not pairs:
        pairs = [(seed, x) for seed in SEEDS for x in dict.fromkeys((lr, first_hour.default_rate(method)))]
    done = {(row["seed"], row["lr"]) for row in runs_of(rows, task=task, method=method)}
    return [Run(method, 0, H, WORKERS, *pair, 1.0, 0.0) for pair in pairs if pair not in done]


def table(rows: Sequence[Row]) -> str:
    """Return what defaults lose to tuned rates, paired by seed."""
    lines = []
    for method in START:
        default = first_hour.default_rate(method)
        line = [method, f"{default:g}"]
        for task in TASKS:
            lr, rates = tuned(rows, task, method)
            base, own = (losses(rows, task, method, "loss", "seed", lr=x) for x in (lr, default))
            base = {seed: base[seed] for seed in SEEDS if seed in base}
            gap = difference(own, base)
            line.append("" if rates or not base else f"{statistics.fmean(base.values()):.3f} at {lr:g}")
            line.append("chosen" if lr == default else "" if gap is None else f"{gap:.3f}")
        lines.append(line)
    head = ["method", "default rate", *(x for task in TASKS for x in (f"{task}, tuned", "default"))]
    return markdown(" | ".join(head), lines)


def defaults(rows: Sequence[Row]) -> str:
    """Return what defaults were chosen by: how far rates are from the best of a task, the mean of seeds."""
    lines = []
    for method in START:
        found = {task: losses(rows, task, method, "tuning", "lr", seed=OF_DEFAULTS[0]) for task in TASKS}
        for lr in sorted(set().union(*found.values())):
            lines.append([method, f"{lr:g}", *(farther(rows, task, method, lr, [*found[task]]) for task in TASKS)])
    return markdown(" | ".join(["method", "rate", *TASKS]), lines)


def farther(rows: Sequence[Row], task: str, method: str, lr: float, rates: Sequence[float]) -> str:
    """Return how far a rate's mean loss is from the lowest of the rates'."""
    means = {
        rate: statistics.fmean(losses(rows, task, method, "tuning", "seed", lr=rate)[seed] for seed in OF_DEFAULTS)
        for rate in rates
    }
    return f"{means[lr] - min(means.values()):.3f}" if lr in means else ""


def tried(rows: Sequence[Row]) -> str:
    """Return how far each rate is from the best of its search, on the split and seed that choose."""
    lines = []
    for task in TASKS:
        for method in START:
            if found := losses(rows, task, method, "tuning", "lr", seed=CHOOSING):
                best = min(x for x in found.values() if math.isfinite(x))
                lines.append([task, method, ", ".join(f"{lr:g}: {found[lr] - best:.3f}" for lr in sorted(found))])
    return markdown("task | method | rates, and how far they are from the best", lines)


def main() -> None:
    """Take the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = Path("benchmarks/results/local_rates.json")
    parser.add_argument("--json", type=Path, default=path, metavar="FILE", help="where rows are kept")
    parser.add_argument("--hours", type=float, default=math.inf, metavar="X", help="begin no runs after so many hours")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--search", action="store_true", help="only the runs that choose rates")
    parser.add_argument("--defaults", action="store_true", help="instead, the runs that choose default rates")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, end = atlas.read(args.json), time.monotonic() + 3600 * args.hours
    bar = tqdm(desc="groups of runs")
    for task, (method, rates) in product(args.tasks, RATES.items()) if args.defaults else ():
        done = {(row["seed"], row["lr"]) for row in runs_of(rows, task=task, method=method)}
        for lr in rates:
            group = [Run(method, 0, H, WORKERS, x, lr, 1.0, 0.0) for x in OF_DEFAULTS if (x, lr) not in done]
            if group and time.monotonic() < end:
                rows += train(group, task)
                atlas.write(args.json, rows)
                bar.update()
    for searching in () if args.defaults else (True, False)[: 1 if args.search else 2]:
        for task in args.tasks:
            for method in START:
                while time.monotonic() < end and (group := missing(rows, task, method)):
                    if searching and group[0].seed != CHOOSING:
                        break
                    rows += train(group, task)
                    atlas.write(args.json, rows)
                    bar.update()
    print(table(rows), defaults(rows), tried(rows), sep="\n\n")


if __name__ == "__main__":
    main()
