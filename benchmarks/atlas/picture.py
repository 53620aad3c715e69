"""The atlas' pictures: loss against bytes, and loss against the time that the planner predicts on four links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox

import fn
from benchmarks.atlas.methods import METHODS, H
from benchmarks.atlas.summary import MAIN, Row, summary
from benchmarks.atlas.tasks import TASKS
from fn.planner import traffic
from fn.planner.methods import Method, methods
from fn.planner.network import Cost, network
from fn.planner.predict import Plan, plan

LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
LATENCY = 30e-6

PARAMS, COMPUTE, MEMORY = 124_000_000, 0.25, 1.6e13
"""Of the model whose steps are predicted: GPT-2's smallest, a quarter of a second a step without communication."""

COLORS = {
    "exact": "black", "baseline": "0.45", "4 or 8 bits": "C0", "signs": "C3", "local steps": "C2", "low rank": "C4",
    "sparse": "C1", "votes": "C5",
}  # fmt: skip


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both coordinates, from left to right."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


class Point(NamedTuple):
    """A method in a panel. above: its loss is higher than the panel is."""

    name: str
    x: float
    y: float
    color: str
    above: bool


Panel = tuple[Axes, list[Point], list[tuple[float, float]]]
"""What is drawn where, and the points of the Pareto front."""


def scatter(axes: Axes, found: list[Row], xs: Sequence[float], top: float) -> Panel:
    """Draw methods, the range of their seeds, and the Pareto front. Losses above `top` lie on its line.

    A method of which nothing is sent is a line across the panel.
    """
    points = []
    for row, x in zip(found, xs, strict=True):
        if not x:  # no place on an axis of powers of ten
            axes.axhline(min(row["loss"], top), color=COLORS[row["family"]], linewidth=1, linestyle=":")
            text, where = f"{row['method']}: {row['loss']:.3f}", (0.99, min(row["loss"], top))
            axes.text(*where, text, transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
            continue
        color, (low, high), above = COLORS[row["family"]], row["range"], not row["loss"] <= top
        y = top if above else row["loss"]
        if not above:
            axes.plot([x, x], [low, min(high, top)], color=color, linewidth=1, alpha=0.6)
        axes.plot(x, y, "^" if above else "o", color=color, markersize=5)
        points.append(Point(row["method"], x, y, color, above))
    best = front([(p.x, p.y) for p in points if not p.above])
    if best:
        axes.step(*zip(*best, strict=True), where="post", color="0.6", linewidth=1, linestyle="--", zorder=0)
    if max(xs) > 2 * min(x for x in xs if x):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.margins(x=0.08, y=0.06)
    return axes, points, best


OFFSETS = [
    (dx, dy, side)
    for far in (6, 12, 18, 26, 36, 48, 60, 75, 90)
    for dx, dy, side in ((far, 0, "left"), (-far, 0, "right"), (0, far, "center"), (0, -far, "center"),
                         (far, far, "left"), (far, -far, "left"), (-far, far, "right"), (-far, -far, "right"))
]  # fmt: skip
"""Where a name may stand, in points of its marker, the nearest first, and which of its ends is there."""


def write_names(axes: Axes, points: list[Point], best: list[tuple[float, float]]) -> None:
    """Write every method's name beside its marker, those of the Pareto front first and bold, none over another.

    A name that has no room anywhere stands at the nearest place: it is never left out.
    """
    panel, renderer = axes.get_window_extent(), axes.figure.canvas.get_renderer()
    taken = [Bbox.from_bounds(*(axes.transData.transform((p.x, p.y)) - 5), 10, 10) for p in points]
    for point in sorted(points, key=lambda p: ((p.x, p.y) not in best, p.y)):
        at_front = (point.x, point.y) in best
        # the line of the front leaves a point to the right, so its name stands below if it can
        offsets = sorted(OFFSETS, key=lambda offset: offset[1] >= 0) if at_front else OFFSETS
        for dx, dy, side in (*offsets, offsets[0]):  # the last one counts where none is free
            text = axes.annotate(
                point.name, (point.x, point.y), (dx, dy), textcoords="offset points", ha=side, va="center",
                fontsize=8, fontweight="bold" if at_front else "normal", color=point.color,
                arrowprops={"arrowstyle": "-", "color": point.color, "linewidth": 0.4},
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the arrow, which begins at the marker
            free = panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1
            if free and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            axes.add_artist(text)
        taken.append(box)


def ceiling(found: list[Row]) -> float:
    """Return up to where losses are drawn: 15 % above AdamW's, or above the best, or twice as far as the middle one."""
    losses = {row["method"]: row["loss"] for row in found if not math.isnan(row["loss"])}
    if not losses:
        return 1.0
    base = losses.get("adamw", min(losses.values()))
    return max(1.15 * base, base + 2 * (statistics.median(losses.values()) - base))


def finish(figure: Any, panels: list[Panel], found: list[Row], path: Path) -> None:
    """Say below the panels what the colours are, write the names, and save the picture."""
    shown = {row["family"] for row in found}
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color=color, label=family)
        for family, color in COLORS.items()
        if family in shown
    ]
    handles.append(plt.Line2D([], [], color="0.6", linestyle="--", label="no method is better in both"))
    columns = min(len(handles), 4 * len(figure.axes))
    figure.legend(handles=handles, loc="outside lower center", fontsize=8, ncols=columns)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # else the names, which go by positions on the page, would move the panels
    for panel in panels:
        write_names(*panel)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def over_bytes(panels: list[tuple[str, str, list[Row]]], path: Path) -> None:
    """Draw loss against the bytes of the whole run, a panel for each (title, unit, summary)."""
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(8 if len(panels) == 1 else 6.4 * len(panels), 5.4), layout="constrained", squeeze=False
    )
    drawn = []
    for axes, (title, unit, found) in zip(all_axes[0], panels, strict=True):
        drawn.append(scatter(axes, found, [row["bytes"] / 1e6 for row in found], ceiling(found)))
        axes.set(xlabel="MB that a rank sends in the run", ylabel=f"loss on held-out data, {unit}", title=title)
    finish(figure, drawn, [row for _, _, found in panels for row in found], path)


@cache
def sent(ranks: int) -> list[Method]:
    """Return what each method of the planner sends of the larger model, whatever the links are.

    Steps that are exact, one in so many, are left out: `times` counts them as those of the warm-up, which they are.
    """
    net = network(ranks, ranks, Cost(LATENCY, 1.0))
    made = methods(traffic.model(PARAMS), net, local_steps=H, interval=4, contrib=True)
    return [method._replace(exact=(), period=0) for method in made]


def predicted(ranks: int, rate: float) -> Plan:
    """Return the planner's steps of the larger model on one link of so many bit/s."""
    net = network(ranks, ranks, Cost(LATENCY, rate))
    return plan(sent(ranks), net, COMPUTE, PARAMS, memory=MEMORY)


def slowdown(name: str, made: Plan, steps: int) -> float:
    """Return the predicted time of a run, as a multiple of its computation alone."""
    return times(name, made, steps)[-1] / steps


def times(name: str, made: Plan, steps: int) -> list[float]:
    """Return the predicted time after each step, in steps of computation alone.

    Each step costs what its phase sends: a warm-up, an exchange, or nothing.
    """
    method = METHODS[name]
    if method.alone:
        return [float(step + 1) for step in range(steps)]
    warm, own, schedule = made.of(method.warm_up), made.of(method.row), method.schedule(steps)
    costs = {
        "warm-up": COMPUTE + (warm.step - COMPUTE) * method.more,
        "exchange": COMPUTE + (own.step - COMPUTE) * own.method.interval,
        "alone": COMPUTE,
    }
    phases = [schedule(step) for step in range(steps)]
    kinds = [
        "warm-up" if when is fn.Phase.WARMUP else "alone" if when in (fn.Phase.LOCAL, fn.Round()) else "exchange"
        for when in phases
    ]
    if method.schedule.__name__ == "never":
        kinds = ["exchange"] * steps
    if method.accumulate > 1:
        kinds = ["exchange" if (step + 1) % method.accumulate == 0 else "alone" for step in range(steps)]
    return [cost / COMPUTE for cost in accumulate(costs[kind] for kind in kinds)]


def over_time(found: list[Row], ranks: int, path: Path) -> None:
    """Draw loss against predicted time, a panel for each link."""
    figure, all_axes = plt.subplots(2, 2, figsize=(13, 10), layout="constrained", sharey=True)
    drawn = []
    for axes, (title, rate) in zip(all_axes.flat, LINKS.items(), strict=True):
        made = predicted(ranks, rate)
        drawn.append(scatter(axes, found, [slowdown(r["method"], made, r["steps"]) for r in found], ceiling(found)))
        axes.set(xlabel="time, computation alone = 1", ylabel="loss, nats per byte", title=title)
    figure.suptitle(f"predicted for {PARAMS / 1e6:.0f} million parameters on {ranks} ranks; losses of the small model")
    finish(figure, drawn, found, path)


def draw(rows: list[Row], folder: Path) -> list[str]:
    """Write the pictures that the rows allow, of the longest runs of each task; return a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = [row for row in rows if row["seed"] in TASKS[row["task"]].seeds]
    lengths = {task: [(row["steps"], row["workers"]) for row in shown if row["task"] == task] for task in TASKS}
    sizes = {task: max(found, default=None) for task, found in lengths.items()}
    lines = []
    if sizes[MAIN]:
        steps, ranks = sizes[MAIN]
        found = summary(rows, MAIN, ranks, steps)
        title = f"{MAIN}, {ranks} workers, {steps} steps, seeds: {max(row['seeds'] for row in found)}"
        over_bytes([(title, TASKS[MAIN].unit, found)], folder / "atlas.png")
        over_time(found, ranks, folder / "atlas_links.png")
        lines += [f"picture: {folder / name}" for name in ("atlas.png", "atlas_links.png")]
    panels = [
        (f"{task}, {size[1]} workers, {size[0]} steps", TASKS[task].unit, summary(rows, task, size[1], size[0]))
        for task, size in sizes.items()
        if size and task != MAIN
    ]
    if panels:
        over_bytes(panels, folder / "atlas_tasks.png")
        lines.append(f"picture: {folder / 'atlas_tasks.png'}")
    return lines
