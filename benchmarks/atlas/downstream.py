"""Fine-tunes what DiLoCo trained, and what AdamW trained with equal tokens, and until an equal loss.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.downstream --json benchmarks/results/downstream.json --hours 0.1

Bases learn source code as the atlas's language model does, 992 steps: DiLoCo with 8 workers, H = 16 and `rounds=`, and
AdamW with all batches, each at its rate. "Equal loss" is AdamW's run as it was when its loss first was DiLoCo's or
lower, on the split that chooses, looked at every 16 steps. All are fine-tuned alike, on Python's reference manual, by
300 exact steps of AdamW at the atlas's rate. Differences are paired by seed. Runs that the file holds are not taken
again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.atlas import runs as atlas
from benchmarks.atlas.methods import H
from benchmarks.atlas.paired import difference
from benchmarks.atlas.rounds import LR, RULES, Run, trained
from benchmarks.atlas.summary import Row, by_seed, chosen_rate
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.atlas.tasks import Params, fine_tuning, language_model
from benchmarks.measure import commit, markdown

ROUNDS, WORKERS, STEPS = 62, 8, 300
"""Of the bases; and the steps that fine-tune."""

SEEDS = ((1, 2), (3, 4, 5))
"""Trained together."""

BASES = ("adamw, equal tokens", "adamw, equal loss", "diloco")


def bases(seeds: Sequence[int]) -> Iterator[tuple[str, int, Params, int]]:
    """Yield each base: its name, seed, params and steps."""
    task, steps = language_model(), ROUNDS * H
    runs = [Run("diloco", ROUNDS, H, WORKERS, seed, LR, *RULES["diloco"](ROUNDS)) for seed in seeds]
    target = {}
    for run, params in trained(runs, task):
        target[run.seed] = task.score(params).tuning
        yield "diloco", run.seed, params, steps

    early: dict[int, tuple[Params, int]] = {}

    def watch(step: int, params: Params) -> None:
        for k, seed in enumerate(seeds):
            if step % H == 0 and seed not in early:
                own = {name: p[k, 0].clone() for name, p in params.items()}
                if task.score(own).tuning <= target[seed]:
                    early[seed] = own, step

    exact = [Run("diloco", ROUNDS, H, 1, seed, LR / 0.6, 1.0, 0.0) for seed in seeds]  # an average of one is AdamW
    for run, params in trained(exact, task, watch=watch):
        yield "adamw, equal tokens", run.seed, params, steps
        yield ("adamw, equal loss", run.seed, *early.get(run.seed, (params, steps)))


def train(seeds: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each base and seed."""
    lr = chosen_rate(atlas.read(atlas.FULL), "fine-tuning", "adamw") or math.nan
    found = list(bases(seeds))
    for name in BASES:
        own = {seed: (params, steps) for base, seed, params, steps in found if base == name}
        task = fine_tuning()._replace(params=lambda seed, own=own: own[seed][0])
        runs = [Run("diloco", STEPS, 1, 1, seed, lr, 1.0, 0.0) for seed in seeds]
        for run, params in trained(runs, task):
            before, steps = own[run.seed]
            row = {"base": name, "seed": run.seed, "steps": steps, "code": language_model().score(before).loss}
            row |= {"before": task.score(before).loss, "loss": task.score(params).loss, "lr": lr, "commit": commit()}
            yield row | {"code after": language_model().score(params).loss}


def table(rows: Sequence[Row]) -> str:
    """Return losses of AdamW's base of equal tokens, and the others' differences to them."""
    lines, names = [], ("code", "before", "loss", "code after")
    for base in BASES:
        own = runs_of(rows, base=base)
        line = [base, f"{statistics.fmean(row['steps'] for row in own):.0f}"] if own else [base, ""]
        for name in names:
            gap = difference(by_seed(own, name), by_seed(runs_of(rows, base=BASES[0]), name))
            mean = f"{statistics.fmean(row[name] for row in own):.3f}" if own else ""
            line.append(mean if gap is None or base == BASES[0] else gap.bold())
        lines.append(line)
    head = ["base", "steps", "code", "manual, before", "manual, fine-tuned", "code, after that"]
    return markdown(" | ".join(head), lines)


def main() -> None:
    """Take the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = Path("benchmarks/results/downstream.json")
    parser.add_argument("--json", type=Path, default=path, metavar="FILE", help="where rows are kept")
    parser.add_argument("--hours", type=float, default=math.inf, metavar="X", help="begin no runs after so many hours")
    parser.add_argument("--show", action="store_true", help="take no runs")
    args = parser.parse_args()
    rows, end = atlas.read(args.json), time.monotonic() + 3600 * args.hours
    for seeds in tqdm([seeds for seeds in SEEDS if not args.show]):
        if time.monotonic() < end and not runs_of(rows, seed=seeds[0]):
            rows += train(seeds)
            atlas.write(args.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
