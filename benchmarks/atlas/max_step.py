"""What `max_step` does to 1-bit Adam and its relatives, with one scale a tensor: loss beside AdamW's, paired by seed.

    python -m benchmarks.atlas.max_step --json benchmarks/results/max_step.json

Digits of scikit-learn on four simulated workers, 300 steps, five seeds, two learning rates; and the atlas' language
model on eight workers, 400 steps, three seeds. A difference is that to AdamW of the same seed and rate, with its 95 %
interval (Student's t). About eight minutes on one core; runs that the file has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.atlas import methods as atlas_methods
from benchmarks.atlas.methods import METHODS
from benchmarks.atlas.paired import difference
from benchmarks.atlas.summary import by_seed
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.atlas.train import Run, train
from benchmarks.measure import markdown

TASKS = {"digits": (4, range(1, 6), 300, (3e-3, 1e-2)), "language model": (8, range(1, 4), 400, (3e-3,))}
"""Workers, seeds, steps and learning rates."""

LIMITS = {"onebit_adam": (1.0, 3.0, 10.0, None), "sharded_onebit_adam": (1.0, None), "zero_one_adam": (10.0, 1.0, None)}
"""By method; None is no clamp."""


def runs() -> Iterator[Run]:
    """Yield all runs."""
    for name, limits in LIMITS.items():
        for limit in limits:
            make = partial(METHODS[name].make, max_step=limit)
            atlas_methods.METHODS[f"{name}, max_step={limit}"] = METHODS[name]._replace(make=make)
    for task, (workers, seeds, steps, rates) in TASKS.items():
        for lr in rates:
            for name in ["adamw", *(f"{name}, max_step={x}" for name, limits in LIMITS.items() for x in limits)]:
                for seed in seeds:
                    yield Run(task, name, workers, seed, steps, lr)


def table(rows: list[dict[str, Any]]) -> str:
    """Return each method's difference to AdamW's loss, paired by seed, and its worst loss as a multiple of AdamW's."""
    columns = dict.fromkeys((row["task"], row["lr"]) for row in rows)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = [method]
        for task, lr in columns:
            own, base = (by_seed(runs_of(rows, task=task, lr=lr, method=name), "loss") for name in (method, "adamw"))
            bad, gap = sum(map(math.isnan, own.values())), difference(own, base)
            if method == "adamw" or gap is None:
                cells.append(f"{statistics.fmean(own.values()):.3f}")
            elif bad:
                cells.append(f"{bad} of {len(own)} runs not finite")
            else:
                cells.append(f"{gap:.3f} (worst {max(own[seed] / base[seed] for seed in own):.2f})")
        lines.append(cells)
    return markdown(" | ".join(["method", *(f"{task}, lr {lr:g}" for task, lr in columns)]), lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("max_step.json"))
    path = parser.parse_args().json
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {tuple(row[key] for key in Run._fields) for row in rows}
    for run in tqdm([run for run in runs() if tuple(run) not in done], unit="run"):
        rows.append(train(run))
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(table(rows))


if __name__ == "__main__":
    main()
