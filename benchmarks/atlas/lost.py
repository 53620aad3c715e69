"""Counts the runs that 1-bit Adam and 0/1 Adam lose on digits, over 20 seeds and five schedules, beside AdamW's.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.lost --json benchmarks/results/lost.json

A network of one hidden layer learns scikit-learn's digits on four simulated workers, 300 steps of 64 images. AdamW's
rate is tuned on a seed and a split that the table does not show, and the others take it. A run is lost that ends with
an accuracy below 0.9. Runs that the file holds are not taken again; `--show` takes none and prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import fn
from benchmarks.atlas.methods import Method, Schedule, freeze, never, seldom
from benchmarks.atlas.paired import rate_at, search
from benchmarks.atlas.summary import runs
from benchmarks.atlas.tasks import Batch, Task
from benchmarks.atlas.train import Run, train
from benchmarks.first_hour import splits_of, task_of
from benchmarks.measure import about, markdown

WORKERS, STEPS, SEEDS, TUNED_ON, START = 4, 300, range(1, 21), 0, 0.01
RIGHT = 0.9
"""The accuracy below which a run is lost."""

FREEZES = {"frozen at 60": freeze(0.2), "frozen at 30": freeze(0.1)}
"""Of 1-bit Adam."""

LONGEST = "frozen at 30, up to 8 steps alone"
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "the default schedule": lambda steps: fn.zero_one_schedule(),
    "frozen at 60, up to 4 steps alone": seldom,
    LONGEST: lambda steps: fn.zero_one_schedule(30, 16, 25, 8),
}
"""Of 0/1 Adam."""


def papers_form(lr: Any, axis: str) -> fn.Transform:
    """Return 0/1 Adam without bias correction and without a clamp."""
    sync = fn.compressed_average(axis, fn.sign(), fn.classic())
    return fn.chain(fn.average(axis), fn.scale_by_zero_one_adam(lr, sync=sync))


corrected = partial(fn.zero_one_adam, b2=0.999, codec=fn.sign(), max_step=1.0)
"""The paper's form with bias correction and a clamp."""


def method(make: Callable[..., fn.Transform], schedule: Callable[[int], Schedule], alike: bool) -> Method:
    """Return a method of this table."""
    return Method("signs", make, schedule, START, "", "", alike=alike)


METHODS = {
    "adamw": method(fn.adamw, never, True),
    **{f"1-bit Adam as it comes, {name}": method(fn.onebit_adam, schedule, True) for name, schedule in FREEZES.items()},
    **{f"0/1 Adam as it comes, {name}": method(fn.zero_one_adam, to, False) for name, to in SCHEDULES.items()},
    f"0/1 Adam, bias-corrected, a clamp of 1, {LONGEST}": method(corrected, SCHEDULES[LONGEST], False),
    f"0/1 Adam, the paper's form, {LONGEST}": method(papers_form, SCHEDULES[LONGEST], False),
}


@cache
def digits() -> Task:
    """Classify scikit-learn's handwritten digits of 8 x 8."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
    images, targets = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    splits = splits_of(len(order))

    def samples(split: str, number: int, generator: torch.Generator) -> Batch:
        which = torch.randint(*splits[split], (number,), generator=generator)
        return images[which], targets[which]

    return task_of(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), 64, samples)


def missing(rows: list[dict[str, Any]]) -> Iterator[Run]:
    """Yield the runs that the table lacks, as far as they are known: those of the search for AdamW's rate first."""
    tried = {row["lr"]: row["tuning"] or math.inf for row in runs(rows, method="adamw", seed=TUNED_ON)}
    found = search(START, tried)
    if found.chosen is None:
        yield from (Run("digits", "adamw", WORKERS, TUNED_ON, STEPS, rate_at(START, k)) for k in found.missing)
        return
    done = {(row["method"], row["seed"]) for row in rows if row["seed"] != TUNED_ON}
    lr = rate_at(START, found.chosen)
    pairs = ((seed, name) for seed in SEEDS for name in METHODS)
    yield from (Run("digits", name, WORKERS, seed, STEPS, lr) for seed, name in pairs if (name, seed) not in done)


def table(found: dict[str, Any]) -> str:
    """Return how many runs each method loses, and its mean and worst accuracy."""
    lines = []
    for name in METHODS:
        own = [row["accuracy"] for row in found["rows"] if row["method"] == name and row["seed"] != TUNED_ON]
        if own:
            lost = sum(not x >= RIGHT for x in own)
            lines.append([name, f"{lost} of {len(own)}", f"{math.fsum(own) / len(own):.3f}", f"{min(own):.3f}"])
    return markdown("method | lost | mean accuracy | worst", lines)


def main() -> None:
    """Take the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/lost.json"), metavar="FILE")
    parser.add_argument("--show", action="store_true", help="take no runs")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    with tqdm(desc="runs", disable=args.show) as bar:
        while not args.show and (wanted := list(missing(rows))):
            for run in wanted:
                rows.append(train(run, digits(), METHODS[run.method]))
                lines = ",\n".join(map(json.dumps, rows))
                args.json.write_text(f'{{"about": {json.dumps(about())},\n"rows": [\n{lines}\n]}}\n')
                bar.update()
    print(table({"rows": rows}))


if __name__ == "__main__":
    main()
