"""Draws the first hour: how far each method ends from AdamW, as it comes and at the rate that its docstring recommends.

    python -m benchmarks.first_hour_picture --png docs/first_hour.png

It shows the larger table's numbers, `benchmarks/results/first_hour.json`, on the smaller batches: draw it again when
that file changes. To the right is worse in all parts: nats of loss above AdamW's, or points of accuracy below it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.atlas.paired import Difference
from benchmarks.first_hour import BASE, METHODS, TASKS, Rows, default_rate, gap, recommended_rate, scores, tuned_rate
from benchmarks.measure import ROOT

SHOWN = ("names", "language model", "digits")
"""The tasks on which methods are chosen, see `benchmarks.first_hour`."""

RESULT = ROOT / "benchmarks/results/first_hour.json"

MARKS: dict[str, dict[str, Any]] = {
    "at its default rate": {"marker": "o", "color": "#0072B2"},
    "at the rate that its docstring recommends": {"marker": "D", "color": "#D55E00", "markerfacecolor": "white"},
}
"""Rates in colours that colour-blind people tell apart, and in shapes."""


class Point(NamedTuple):
    """Where a method stands. worse: nats above AdamW, or points of accuracy below. seeds: of the mean."""

    method: str
    rate: str
    worse: Difference
    seeds: int


def points(rows: Rows, task: str) -> list[Point]:
    """Return what one part of the picture shows. Where both rates are one, it is the default's."""
    setting, found = TASKS[task], []
    batch, sign = setting.batches[0], math.copysign(1, setting.bound)
    best, _ = tuned_rate(rows, task, batch)
    for method in METHODS:
        rates = [default_rate(method)] if best is None else [default_rate(method), recommended_rate(method, best)]
        for rate, lr in zip(MARKS, dict.fromkeys(rates), strict=False):
            if method != BASE and (off := gap(rows, task, batch, method, lr)) is not None:
                seeds = len(scores(rows, task, batch, method, lr))
                found.append(Point(method, rate, off._replace(mean=sign * off.mean), seeds))
    return found


def draw(rows: Rows, path: Path) -> None:
    """Draw a part for each task, and a row for each method."""
    import matplotlib.pyplot as plt

    names = [name for name in METHODS if name != BASE]
    figure, parts = plt.subplots(1, len(SHOWN), figsize=(11, 6.2), sharey=True, layout="constrained")
    for axes, task in zip(parts, SHOWN, strict=True):
        setting, shown = TASKS[task], points(rows, task)
        for rate, place in zip(MARKS, (-0.14, 0.14), strict=True):
            own = [point for point in shown if point.rate == rate]
            means, halves = [point.worse.mean for point in own], [point.worse.half for point in own]
            heights = [names.index(point.method) + place for point in own]
            axes.errorbar(means, heights, xerr=halves, ls="", ms=5.5, capsize=2.5, lw=1.2, label=rate, **MARKS[rate])
        axes.axvline(0, color="black", linewidth=1)
        axes.axvspan(-abs(setting.bound), abs(setting.bound), color="0.5", alpha=0.15, linewidth=0)
        for k, name in enumerate(names):
            finite = [math.isfinite(point.worse.mean) for point in shown if point.method == name]
            if not finite or not all(finite):
                said = "diverged on a seed" if finite else "not run"
                right = {"ha": "right", "va": "center", "transform": axes.get_yaxis_transform()}
                axes.text(0.98, k, said, color="0.4", fontsize=8, **right)
        # Of two seeds an interval is twelve times their spread: it leaves the picture, which means keep readable.
        means = [0.0, *(point.worse.mean for point in shown if math.isfinite(point.worse.mean))]
        room = 0.12 * (max(means) - min(means)) + abs(setting.bound)
        axes.set_xlim(min(means) - room, max(means) + room)
        seeds = " or ".join(map(str, sorted({point.seeds for point in shown})))
        unit = "nats above AdamW" if setting.score == "loss" else "accuracy below AdamW's"
        axes.set_xlabel(f"{unit} (right is worse)")
        axes.set_title(f"{task}, {setting.batches[0]} samples a step\n{seeds} seeds", fontsize=10)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    parts[0].set_yticks(range(len(names)), names)
    parts[0].set_ylim(len(names) - 0.5, -0.5)
    handles, labels = parts[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help="the first hour's runs")
    parser.add_argument("--png", type=Path, metavar="FILE", required=True)
    args = parser.parse_args()
    draw(json.loads(args.json.read_text())["rows"], args.png)


if __name__ == "__main__":
    main()
