"""Measures what a step late costs in loss, on the atlas's tasks and on seeds that the atlas does not show.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.late --json benchmarks/results/late_losses.json

Each method trains in time, late with the whole correction, and late without one, on the same seeds, with the rate that
the atlas has tuned in time on other seeds and another split. Losses are paired by seed. Runs that the file holds are
not taken again, so the script may be stopped and started; `--show` takes none and prints the table.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import fn
from benchmarks import late as speed
from benchmarks.atlas import runs as atlas
from benchmarks.atlas import same_loss
from benchmarks.atlas.methods import METHODS, Method, muon
from benchmarks.atlas.paired import difference
from benchmarks.atlas.same_loss import STEPS
from benchmarks.atlas.summary import BASE, MAIN, Row, by_seed, chosen_rate, runs
from benchmarks.atlas.tasks import TASKS
from benchmarks.atlas.train import Run
from benchmarks.measure import ROOT, markdown

RESULTS = ROOT / "benchmarks" / "results"

SEEDS = (21, 22, 23, 24, 25)
WAYS = {"late": 1.0, "late, c = 0": 0.0}
"""Name -> the correction."""


def directions(lr: Any, axis: str) -> fn.Transform:
    """Return the atlas's Muon as it is, whose exact mean travels."""
    return muon(lr, axis, owned=False)


SPEEDS = {"muon": "muon, int8"}
"""Method -> the one whose steps were timed, where it is another one."""

STARTS = {"adamw": 0, "adamw, int4": 10, "onebit_adam": 80, "muon": 0, "sign_muon": 0}
"""Method of the atlas -> steps of the warm-up, as it has in time at 400 steps; none where that is exact anyway."""


def method_of(name: str, way: str) -> Method:
    """Return a method of the atlas, late."""
    method = METHODS[name]
    make = directions if name == "muon" else method.make
    start = STARTS[name]

    def schedule(steps: int) -> Any:
        # A share of the steps, as the atlas's own schedule of 1-bit Adam has it.
        return fn.every(1, delay=1, start=steps // 5 if start == 80 else start)

    return method._replace(make=partial(late, make, WAYS[way]), schedule=schedule)


def late(make: Any, correction: float, lr: Any, axis: str) -> fn.Transform:
    """Return what a method makes, late."""
    made: fn.Transform = fn.late(make(lr=lr, axis=axis), correction=correction)
    return made


def wanted() -> list[tuple[Run, Method]]:
    """Return all runs, the first seed of all methods first."""
    tuned, found = atlas.read(atlas.FULL), []
    for seed in SEEDS:
        for name in STARTS:
            for task in (task for task in ("language model", "digits", "fine-tuning") if task in METHODS[name].tasks):
                lr = chosen_rate(tuned, task, name)
                if lr is None:
                    continue
                setting = TASKS[task]
                for way in ("", *WAYS):
                    run = Run(task, f"{name}, {way}" if way else name, setting.workers, seed, setting.steps, lr)
                    found.append((run, method_of(name, way) if way else METHODS[name]))
    return found


def table(rows: list[Row]) -> str:
    """Return how far the losses are from those of the same method in time, paired by seed."""
    lines = []
    for task in ("language model", "fine-tuning", "digits"):
        for name in STARTS:
            own = by_seed(runs(rows, task=task, method=name), "loss")
            cells = []
            for way in WAYS:
                late = by_seed(runs(rows, task=task, method=f"{name}, {way}"), "loss")
                gaps = [late[seed] - own[seed] for seed in late if seed in own]
                gap = difference(late, own)
                cells.append(gap.bold() if gap else f"{gaps[0]:+.3f} (one seed)" if gaps else "")
            if any(cells):
                paired = {row["seed"] for row in runs(rows, task=task, method=f"{name}, late")} & own.keys()
                mean = sum(own[seed] for seed in paired) / max(1, len(paired))
                lines.append([task, name, str(len(paired)), f"{mean:.3f}", *cells])
    return markdown("| task | method | seeds | in time | late, c = 1 | late, c = 0 |", lines)


def times(rows: list[Row], curves: list[Row], points: dict[str, Any]) -> str:
    """Return how long a late method takes to AdamW's loss, as a part of DDP's time, on two links.

    Steps to AdamW's loss are of whole runs, as in `same_loss`; seconds of a late step are `benchmarks.late`'s. DDP's
    step is computed: its message begins behind a third of the computation, which is the forward pass.

    Args: rows: of this script. curves: of `same_loss`, with AdamW's runs of all lengths. points: of `benchmarks.late`.
    """
    measured = {(row["method"], row["rate"]): row for row in speed.table(points)}
    base = runs(curves, task=MAIN, method=BASE)
    lines = []
    for name in STARTS:
        own = runs(rows, task=MAIN, method=f"{name}, late")
        try:
            values = same_loss.ratios([*base, *own], f"{name}, late")
            steps = same_loss.interval(values) if len(values) > 1 else tuple(values)
        except ValueError:  # a loss below that of AdamW's longest run, of twice as many steps
            values = own
            steps = (STEPS / max(same_loss.LENGTHS),)
            spell = "below {:.2f}"
        else:
            spell = "{:.2f} ({:.2f} – {:.2f})" if len(values) > 1 else "{:.2f}"
        if not values:
            continue
        cells = [name, str(len(values)), spell.format(*steps)]
        for rate in speed.RATES:
            row, exact = (measured.get((method, rate)) for method in (SPEEDS.get(name, name), BASE))
            if row is None or exact is None:
                continue
            ddp = speed.WAIT / 3 + max(speed.WAIT * 2 / 3, exact["alone"] - exact["local"]) + exact["local"]
            cells.append(spell.format(*(x * row["late"] / ddp for x in steps)))
        lines.append(cells)
    head = ["late", "seeds", "its steps / AdamW's to the same loss", *(f"its time / DDP's, {r}" for r in speed.RATES)]
    return markdown(" | ".join(head), lines)


def report() -> str:
    """Return both tables of docs/late.md from the committed runs."""
    rows, curves = (atlas.read(RESULTS / f"{name}.json") for name in ("late_losses", "same_loss"))
    points = json.loads((RESULTS / "late.json").read_text())["wait"]
    return f"{table(rows)}\n\n{times(rows, curves, points)}"


if __name__ == "__main__":
    print(table(atlas.fill(__doc__ or "", RESULTS / "late_losses.json", wanted())))
