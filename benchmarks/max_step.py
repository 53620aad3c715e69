"""What `max_step` does to 1-bit Adam and its relatives: loss and accuracy beside AdamW's, paired by seed.

    python benchmarks/max_step.py --json benchmarks/max_step.json

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

import atlas_methods
from atlas_methods import METHODS
from atlas_summary import by_seed
from atlas_summary import runs as runs_of
from atlas_train import Run, train
from paired import difference
from tqdm import tqdm

TASKS = {"digits": (4, range(1, 6), 300, (3e-3, 1e-2)), "language model": (8, range(1, 4), 400, (3e-3,))}
"""Workers, seeds, steps and learning rates."""

LIMITS = {"onebit_adam": (1.0, 3.0, 10.0, None), "sharded_onebit_adam": (1.0, None), "zero_one_adam": (10.0, 1.0, None)}
"""By method: the default, others, and none."""


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
    """Return the losses of each method, its worst as a multiple of AdamW's, and differences that are paired by seed."""
    head = ["task", "lr", "method", "loss", "worst / AdamW", "loss - AdamW's", "accuracy - AdamW's, points"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for task, lr, method in dict.fromkeys((row["task"], row["lr"], row["method"]) for row in rows):
        own, base = (runs_of(rows, task=task, lr=lr, method=name) for name in (method, "adamw"))
        losses, others = by_seed(own, "loss"), by_seed(base, "loss")
        bad = sum(math.isnan(loss) for loss in losses.values())
        cells = [task, f"{lr:g}", method, "" if bad else f"{statistics.fmean(losses.values()):.3f}"]
        gap, points = (difference(by_seed(own, field), by_seed(base, field)) for field in ("loss", "accuracy"))
        if method == "adamw" or gap is None:
            cells += ["", "", ""]
        elif bad:
            cells += ["", f"{bad} of {len(losses)} runs not finite", ""]
        else:
            cells += [f"{max(losses[seed] / others[seed] for seed in losses):.2f}", f"{gap:.3f}"]
            cells += ["" if own[0]["accuracy"] is None else f"{100 * points.mean:+.1f} ± {100 * points.half:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
