"""Measures whether the steps that a method saves are a matter of short runs: ratios to AdamW's steps, over the length.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.longer --json benchmarks/results/longer.json --jobs 2 --hours 1
    python -m benchmarks.atlas.longer --json benchmarks/results/longer.json --show --png docs/longer.png

Exact Muon, `sign_muon` and MuLoCo train the atlas's language model for 400, 800, 1600 and 3200 steps. AdamW does so for
as many and more, so that its loss over steps goes as far as theirs. Each run has its own schedule of the learning rate,
and none is looked into. A ratio is that of `same_loss`: the steps of a run over those in which AdamW has its final
loss, paired by seed. Rates are searched at 400 and at 1600 steps, AdamW's at 6400 as well: five or more rates, on a
seed and a split that are not reported; a run of another length takes what lies between, on a line over the logarithms.

Runs that the file holds are not taken again, so the script may be stopped and started.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from benchmarks.atlas import runs as atlas
from benchmarks.atlas.methods import METHODS, Method
from benchmarks.atlas.paired import rate_at, search
from benchmarks.atlas.same_loss import COMPARED, interval, steps_of_adamw
from benchmarks.atlas.summary import BASE, MAIN, Row
from benchmarks.atlas.tasks import TASKS
from benchmarks.atlas.train import Run, train
from benchmarks.measure import commit, markdown

LENGTHS = (400, 800, 1600, 3200)
"""Steps of a method's runs."""

OF_BASE = (280, 400, 560, 800, 1130, 1600, 2260, 3200, 4530, 6400, 9050)
"""Steps of AdamW's: no two neighbours are further apart than a factor of 1.5."""

CHOOSING, SEEDS, WORKERS = 0, (1, 2, 3), TASKS[MAIN].workers

MULOCO = "muloco, int8"

STARTS = {BASE: 5.4e-3, "muon": 5.4e-3, "sign_muon": 3e-2, MULOCO: 5.4e-3}
"""Method -> the rate at which the search begins."""

FIRST = range(-2, 3)
"""The places of the rates that are always tried."""


def made(name: str) -> Method:
    """Return a method; MuLoCo's rounds begin with the first step."""
    return COMPARED[name][0] if name in COMPARED else METHODS[name]


def tuned_at(name: str) -> tuple[int, ...]:
    """Return the lengths of run at which a method's rate is searched."""
    return (400, 1600, 6400) if name == BASE else (400, 1600)


def searched(rows: Sequence[Row], name: str, steps: int) -> tuple[float, tuple[float, ...]]:
    """Return the rate that is chosen for runs of so many steps, NaN before the search is over; and what it lacks."""
    losses = {
        row["lr"]: math.inf if row["tuning"] is None else row["tuning"]
        for row in rows
        if (row["method"], row["steps"], row["seed"]) == (name, steps, CHOOSING)
    }
    start = STARTS[name]
    if lacking := tuple(lr for place in FIRST if (lr := rate_at(start, place)) not in losses):
        return math.nan, lacking
    found = search(start, losses)
    chosen = math.nan if found.chosen is None else rate_at(start, found.chosen)
    return chosen, tuple(rate_at(start, place) for place in found.missing)


def rate_for(rates: Mapping[int, float], steps: int) -> float:
    """Return the rate of a run: that of the next length that was searched, or on a line between two over logarithms.

    >>> rate_for({400: 0.04, 1600: 0.01}, 800)
    0.02
    """
    shorter = max((n for n in rates if n <= steps), default=min(rates))
    longer = min((n for n in rates if n >= steps), default=max(rates))
    if longer <= shorter:
        return rates[shorter]
    share = math.log(steps / shorter) / math.log(longer / shorter)
    return float(f"{rates[shorter] ** (1 - share) * rates[longer] ** share:.3g}")


def missing(rows: Sequence[Row]) -> list[Run]:
    """Return the runs that can be taken now: what searches lack; behind them the seeds, one after the other."""
    chosen: dict[str, dict[int, float]] = {name: {} for name in STARTS}
    lacking = []
    for name in STARTS:
        for steps in tuned_at(name):
            chosen[name][steps], rates = searched(rows, name, steps)
            lacking += [Run(MAIN, name, WORKERS, CHOOSING, steps, lr) for lr in rates]
    if lacking:
        return sorted(lacking, key=lambda run: -run.steps)
    done = {Run(*(row[field] for field in Run._fields)) for row in rows}
    wanted = [
        Run(MAIN, name, WORKERS, seed, steps, rate_for(chosen[name], steps))
        for seed in SEEDS
        for name in STARTS
        for steps in sorted(OF_BASE if name == BASE else LENGTHS, reverse=True)
    ]
    return [run for run in wanted if run not in done]


def ratios(rows: Sequence[Row], name: str, steps: int) -> list[float]:
    """Return a method's steps over AdamW's to the same loss, for each seed; infinity where AdamW starts below it.

    Only seeds with all of AdamW's runs count.
    """
    found = []
    for seed in SEEDS:
        of_seed = [row for row in rows if row["seed"] == seed]
        curve = [(row["steps"], row["loss"]) for row in of_seed if row["method"] == BASE]
        own = [row["loss"] for row in of_seed if (row["method"], row["steps"]) == (name, steps)]
        if own and len(curve) == len(OF_BASE):
            needed = steps_of_adamw(own[0], curve)
            found.append(steps / needed if needed else math.inf)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the ratios by length, and the rates."""
    lines = []
    for name in STARTS:
        if name == BASE:
            continue
        cells = []
        for steps in LENGTHS:
            values = ratios(rows, name, steps)
            usable = len(values) > 1 and all(0 < x < math.inf for x in values)
            cells.append("{:.2f} ({:.2f} – {:.2f})".format(*interval(values)) if usable else "")
        lines.append([name, *cells])
    rates = [
        f"{name} " + ", ".join(f"{searched(rows, name, steps)[0]:g} at {steps}" for steps in tuned_at(name))
        for name in STARTS
    ]
    head = " | ".join(["steps / AdamW's to the same loss", *(f"{steps} steps" for steps in LENGTHS)])
    return f"{markdown(head, lines)}\n\n*{len(SEEDS)} seeds, 95 %. Rates searched: {'; '.join(rates)}.*"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the ratios over the length of runs."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for color, name in zip(("C7", "C3", "C2"), [name for name in STARTS if name != BASE], strict=True):
        points = [(n, *interval(values)) for n in LENGTHS if len(values := ratios(rows, name, n)) > 1]
        xs, means, lows, highs = zip(*points, strict=True)
        errors = [[abs(m - x) for m, x in zip(means, ends, strict=True)] for ends in (lows, highs)]
        axes.errorbar(xs, means, errors, marker="o", color=color, capsize=3, linewidth=1, label=name)
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set(xscale="log", xlabel="steps of the run", ylabel="its steps / AdamW's to the same loss", ylim=(0, None))
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def taken(run: Run) -> Row:
    """Train a run."""
    return train(run, method=made(run.method))


def take(path: Path, jobs: int, hours: float) -> None:
    """Take the runs that are missing, and write each as soon as it is there."""
    # Its processes keep the code with which they began, whatever is written meanwhile.
    rows, end, code = atlas.read(path), time.monotonic() + 3600 * hours, commit()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, tqdm(desc="runs") as bar:
        going: dict[Future[Row], Run] = {}
        while True:
            ahead = [run for run in missing(rows) if run not in going.values()]
            while ahead and len(going) < jobs and time.monotonic() < end:
                run = ahead.pop(0)
                going[pool.submit(taken, run)] = run
            if not going:
                return
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                del going[future]
                rows.append({**future.result(), "commit": code})
                atlas.write(path, rows)
                bar.update()


def main() -> None:
    """Take the runs that are missing, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="where runs are kept")
    add("--hours", type=float, default=math.inf, metavar="X", help="begin no run after so many hours")
    add("--jobs", type=int, default=1, metavar="N", help="processes")
    add("--show", action="store_true", help="take no runs")
    add("--png", type=Path, metavar="FILE", help="where the picture goes")
    args = parser.parse_args()
    if not args.show:
        take(args.json, args.jobs, args.hours)
    rows = atlas.read(args.json)
    print(table(rows))
    if args.png:
        draw(rows, args.png)


if __name__ == "__main__":
    main()
