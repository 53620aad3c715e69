"""Trains core methods as they come on the atlas's tasks: the default rate, and no other argument.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.as_it_comes --json benchmarks/results/as_it_comes.json

Seeds, steps and workers are the atlas's, whose tuned AdamW is what losses are compared with, seed by seed. Runs that
the file holds are not taken again; `--show` takes none and prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from pathlib import Path

from benchmarks.atlas import runs as atlas
from benchmarks.atlas.choices import shown
from benchmarks.atlas.methods import Method, labels
from benchmarks.atlas.paired import difference
from benchmarks.atlas.summary import BASE, MAIN, Row, by_seed, runs
from benchmarks.atlas.tasks import TASKS
from benchmarks.atlas.train import Run
from benchmarks.first_hour import METHODS, default_rate
from benchmarks.measure import markdown

ON = (MAIN, "digits")
"""Tasks."""


def wanted() -> Iterator[tuple[Run, Method]]:
    """Yield all runs, the first seed of all methods first."""
    for seed in range(1, 6):
        for task in (task for task in ON if seed in TASKS[task].seeds):
            for name, method in METHODS.items():
                if "labels" in signature(method.make).parameters:
                    method = method._replace(make=partial(method.make, labels=labels))
                yield Run(task, name, TASKS[task].workers, seed, TASKS[task].steps, default_rate(name)), method


def table(rows: Sequence[Row]) -> str:
    """Return how far each method's losses are from tuned AdamW's, paired by seed; bold where that is told apart."""
    tuned = atlas.read(atlas.FULL)
    base = {task: by_seed(shown(tuned, task, BASE), "loss") for task in ON}
    lines = []
    for name in METHODS:
        lr = default_rate(name)
        own = {task: by_seed(runs(rows, task=task, method=name, lr=lr), "loss") for task in ON}
        gaps = [difference(own[task], base[task]) for task in ON]
        lines.append([name, f"{lr:g}", *("" if gap is None else gap.bold() for gap in gaps)])
    head = ["method", "default rate", *(f"{task}, {TASKS[task].workers} workers" for task in ON)]
    return markdown(" | ".join(head), lines)


if __name__ == "__main__":
    print(table(atlas.fill(__doc__ or "", Path("benchmarks/results/as_it_comes.json"), wanted())))
