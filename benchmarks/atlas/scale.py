"""Measures what more workers cost at equal tokens, to lie beside the losses that others published for larger models.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.scale --json benchmarks/results/scale.json --hours 0.15
    python -m benchmarks.atlas.scale --json benchmarks/results/scale.json --show --png docs/scale.png

A transformer learns the source code of Python's standard library, 11 MB, from 20 bytes a parameter: data parallel, and
with 1, 2, 4 and 8 workers that exchange every 30 steps, AdamW and Muon inside, the outer step by `rounds=`. All runs of
a width have the same tokens in the same steps. One worker whose outer step averages is data parallelism, so with one
worker the outer step is that of MuLoCo's program for K = 1, 0.7 and 0.6. The inner rate is chosen data parallel, once
for each optimizer, on a seed and split that the table does not show.

Runs that the file holds are not taken again; `--hours` ends the script before the next group of runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.atlas import runs as atlas
from benchmarks.atlas.paired import Difference, difference, rate_at, search
from benchmarks.atlas.rounds import RULES, Run, train
from benchmarks.atlas.summary import Row
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.atlas.tasks import Size, fresh, language_model
from benchmarks.measure import markdown
from fn.planner.evidence import published

H, TOKENS, START = 30, 20, 3e-3
"""Steps of a round, bytes a parameter, and the rate that a search begins at."""

CHOOSING, SEEDS = 0, (1, 2, 3)

INNER = {"diloco": "AdamW", "muloco": "Muon"}

WORKERS = {"data parallel": 1, "K = 1": 1, "M = 2": 2, "M = 4": 4, "M = 8": 8}

SOURCES = {
    "DiLoCo's scaling laws": "arXiv 2503.09799, C4, 20 tokens a parameter",
    "MuLoCo": "arXiv 2505.23725, its notes",
}


def scaling_laws() -> Iterator[tuple[str, float, str, float, Mapping[str, float]]]:
    """Yield the rows of DiLoCo's scaling laws, from the planner's table of them."""
    table = next(each for each in published()["losses"] if "2503.09799" in each["source"])
    for i, (params, base) in enumerate(zip(table["params"], table["adamw"], strict=True)):
        above = {name: 100 * (table["replicas"][str(k)][i] / base - 1) for name, k in list(WORKERS.items())[1:]}
        yield "DiLoCo's scaling laws", params, "AdamW", base, above


PUBLISHED: Sequence[tuple[str, float, str, float, Mapping[str, float]]] = (
    *scaling_laws(),
    ("MuLoCo", 150e6, "AdamW", 3.158, {"K = 1": 100 * (3.142 / 3.158 - 1)}),
    ("MuLoCo", 150e6, "Muon", 3.124, {"K = 1": 100 * (3.120 / 3.124 - 1)}),
    ("MuLoCo", 1.76e9, "AdamW", 2.266, {"K = 1": 100 * (2.265 / 2.266 - 1)}),
    ("MuLoCo", 1.76e9, "Muon", 2.246, {"K = 1": 100 * (2.238 / 2.246 - 1)}),
)
"""Who, parameters, the inner optimizer, its loss data parallel, and percents above it; H = 30 in all."""


def size_of(width: int) -> Size:
    """Return the model and batch of a width."""
    return Size(2, width, max(1, width // 16), context=64, sequences=16)


def parameters(width: int) -> int:
    """Return how many parameters a model of a width has."""
    return sum(p.numel() for p in fresh(0, size_of(width)).values())


def run_of(method: str, row: str, width: int, seed: int, lr: float) -> Run:
    """Return the run of a row of the table."""
    size = size_of(width)
    rounds = round(TOKENS * parameters(width) / (size.context * size.sequences * H))
    outer = {"data parallel": (1.0, 0.0), "K = 1": (0.7, 0.6)}.get(row, RULES[method](rounds))
    return Run(method, rounds, H, WORKERS[row], seed, lr, *outer)


def losses(rows: Sequence[Row], run: Run, width: int, split: str, over: str = "seed") -> dict[Any, float]:
    """Return the losses of runs that are alike but for a field, by that field; NaN where one diverged."""
    alike = {name: x for name, x in run._asdict().items() if name != over}
    return {row[over]: math.nan if row[split] is None else row[split] for row in runs_of(rows, width=width, **alike)}


def tuned(rows: Sequence[Row], method: str, width: int) -> tuple[float, list[float]]:
    """Return the rate that is chosen, NaN before the search is over; and the rates that it lacks."""
    run = run_of(method, "data parallel", width, CHOOSING, START)
    found = search(START, losses(rows, run, width, "tuning", over="lr"))
    lr = math.nan if found.chosen is None else rate_at(START, found.chosen)
    return lr, [rate_at(START, place) for place in found.missing]


def missing(rows: Sequence[Row], width: int) -> list[Run]:
    """Return the next group of runs that a width lacks: first the search, then seed 1 of all rows; none at the end."""
    done = {tuple(row[name] for name in Run._fields) for row in runs_of(rows, width=width)}
    for method in INNER:
        if rates := tuned(rows, method, width)[1]:
            return [run_of(method, "data parallel", width, CHOOSING, lr) for lr in rates]
    for seeds in (SEEDS[:1], SEEDS[1:]):
        for row in WORKERS:
            for method in INNER:
                runs = [run_of(method, row, width, seed, tuned(rows, method, width)[0]) for seed in seeds]
                if group := [run for run in runs if run not in done]:
                    return group
    return []


Percents = Mapping[str, "float | Difference"]
Line = tuple[str, float, str, float, Percents]


def ours(rows: Sequence[Row]) -> list[Line]:
    """Return lines as those of `PUBLISHED`, of what was measured: the mean of paired seeds, with its interval."""
    lines: list[Line] = []
    for width in sorted({row["width"] for row in rows}):
        for method, inner in INNER.items():
            found = {
                name: losses(rows, run_of(method, name, width, CHOOSING, tuned(rows, method, width)[0]), width, "loss")
                for name in WORKERS
            }
            base = {seed: loss for seed, loss in found.pop("data parallel").items() if seed in SEEDS}
            percents: dict[str, float | Difference] = {}
            for name, own in found.items():
                above = {seed: 100 * (own[seed] / base[seed] - 1) for seed in base if seed in own}
                if above:
                    percents[name] = difference(above, dict.fromkeys(above, 0.0)) or above[min(above)]
            if base:
                lines.append(("ours", parameters(width), inner, statistics.fmean(base.values()), percents))
    return lines


def table(rows: Sequence[Row]) -> str:
    """Return ours beside what is published."""
    names = list(WORKERS)[1:]

    def cells(line: Line) -> list[str]:
        who, n, inner, loss, percents = line
        spelt = [percents.get(name) for name in names]
        return [
            SOURCES.get(who, who), f"{n / 1e6:,.6g} M", inner, f"{loss:.3f}",
            *("" if x is None else f"{x:.1f} %" if isinstance(x, Difference) else f"{x:+.1f} %" for x in spelt),
        ]  # fmt: skip

    lines = [cells(line) for line in (*ours(rows), *PUBLISHED)]
    return markdown(" | ".join(["whose", "parameters", "inside", "data parallel", *names]), lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw percents above data parallelism over parameters."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    found = (*ours(rows), *PUBLISHED)
    for color, name in zip(("C7", "C0", "C1", "C3"), list(WORKERS)[1:], strict=True):
        for inner, marker in zip(INNER.values(), "os", strict=True):
            for who in ("ours", *SOURCES):
                lines = [line for line in found if line[0] == who and line[2] == inner and name in line[4]]
                ys = [x.mean if isinstance(x := line[4][name], Difference) else x for line in lines]
                errors = [x.half if isinstance(x := line[4][name], Difference) else 0.0 for line in lines]
                axes.errorbar(
                    [line[1] for line in lines], ys, errors, marker=marker, color=color, linewidth=1, capsize=2,
                    mfc=color if who == "ours" else "white",
                    label=f"{name}, {inner} inside" if who == "ours" and lines else None,
                )  # fmt: skip
    axes.axhline(0, color="0.6", linewidth=1)
    axes.set(xscale="log", xlabel="parameters", ylabel="% above data parallelism")
    axes.set_title("filled: ours, open: published", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Take the runs that are missing, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, default=Path("benchmarks/results/scale.json"), metavar="FILE", help="where rows are kept")
    add("--hours", type=float, default=math.inf, metavar="X", help="begin no group of runs after so many hours")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="on which models train")
    add("--width", nargs="+", type=int, default=[32, 64, 96], metavar="W", help="of the models, multiples of 16")
    add("--show", action="store_true", help="take no runs")
    add("--png", type=Path, metavar="FILE", help="where the picture goes")
    args = parser.parse_args()
    rows, end = atlas.read(args.json), time.monotonic() + 3600 * args.hours
    bar = tqdm(desc="groups of runs")
    for width in args.width:
        while not args.show and time.monotonic() < end and (group := missing(rows, width)):
            rows += [{"width": width, **row} for row in train(group, language_model(size_of(width)), args.device)]
            atlas.write(args.json, rows)
            bar.update()
    print(table(rows))
    if args.png:
        draw(rows, args.png)


if __name__ == "__main__":
    main()
