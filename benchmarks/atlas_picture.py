"""The atlas' pictures: loss against bytes, and loss against the time that the planner predicts on four links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from atlas_methods import METHODS, H
from atlas_summary import MAIN, Row, summary
from atlas_tasks import TASKS
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

import fn
from fn.planner import traffic
from fn.planner.methods import Method, methods
from fn.planner.network import Cost, network
from fn.planner.predict import Plan, plan

LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
LATENCY = 30e-6

PARAMS, COMPUTE, MEMORY = 124_000_000, 0.25, 1.6e13
"""Of the model whose steps are predicted: GPT-2's smallest, a quarter of a second a step without communication."""

COLORS = {
    "exact": "black", "integers": "C0", "signs": "C3", "local steps": "C2", "low rank": "C4", "sparse": "C1",
    "votes": "C5",
}  # fmt: skip


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both coordinates, from left to right."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def scatter(axes: Axes, found: list[Row], xs: Sequence[float], top: float) -> None:
    """Draw methods as numbers, the range of their seeds, and the Pareto front. Losses above `top` lie on its line."""
    numbers = {name: place for place, name in enumerate(METHODS, 1)}
    places = []
    for row, x in zip(found, xs, strict=True):
        color, (low, high), above = COLORS[row["family"]], row["range"], not row["loss"] <= top
        y = top if above else row["loss"]
        if not above:
            axes.plot([x, x], [low, min(high, top)], color=color, linewidth=1, alpha=0.6)
            places.append((x, y))
        axes.plot(x, y, "^" if above else "o", color=color, markersize=5)
        axes.annotate(f"{numbers[row['method']]}", (x, y), (4, 3), textcoords="offset points", fontsize=8, color=color)
    if places:
        axes.step(*zip(*front(places), strict=True), where="post", color="0.6", linewidth=1, linestyle="--", zorder=0)
    if max(xs) > 2 * min(xs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)


def ceiling(found: list[Row]) -> float:
    """Return up to where losses are drawn: 15 % above AdamW's, or above the best, or twice as far as the middle one."""
    losses = {row["method"]: row["loss"] for row in found if not math.isnan(row["loss"])}
    if not losses:
        return 1.0
    base = losses.get("adamw", min(losses.values()))
    return max(1.15 * base, base + 2 * (statistics.median(losses.values()) - base))


def legend(figure: Any, found: list[Row]) -> None:
    """Write the methods' numbers and names beside the panels."""
    shown = [row["method"] for row in found]
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color=COLORS[method.family], label=f"{place}  {name}")
        for place, (name, method) in enumerate(METHODS.items(), 1)
        if name in shown
    ]
    handles.append(plt.Line2D([], [], color="0.6", linestyle="--", label="no method is better in both"))
    figure.legend(handles=handles, loc="outside right center", fontsize=8)


def over_bytes(panels: list[tuple[str, str, list[Row]]], path: Path) -> None:
    """Draw loss against the bytes of the whole run, a panel for each (title, unit, summary)."""
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(2.4 + 4.8 * len(panels), 5), layout="constrained", squeeze=False
    )
    for axes, (title, unit, found) in zip(all_axes[0], panels, strict=True):
        scatter(axes, found, [row["bytes"] / 1e6 for row in found], ceiling(found))
        axes.set(xlabel="MB that a rank sends in the run", ylabel=f"loss on held-out data, {unit}", title=title)
    legend(figure, [row for _, _, found in panels for row in found])
    figure.savefig(path, dpi=130)
    plt.close(figure)


@cache
def sent(ranks: int) -> list[Method]:
    """Return what each method of the planner sends of the larger model, whatever the links are."""
    net = network(ranks, ranks, Cost(LATENCY, 1.0))
    return methods(traffic.model(PARAMS), net, local_steps=H, interval=4)


def predicted(ranks: int, rate: float) -> Plan:
    """Return the planner's steps of the larger model on one link of so many bit/s."""
    net = network(ranks, ranks, Cost(LATENCY, rate))
    return plan(sent(ranks), net, COMPUTE, PARAMS, memory=MEMORY)


def slowdown(name: str, made: Plan, steps: int) -> float:
    """Return the predicted time of a run, as a multiple of its computation alone.

    Each step costs what its phase sends: a warm-up, an exchange, or nothing.
    """
    method = METHODS[name]
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
    return sum(costs[kind] for kind in kinds) / (COMPUTE * steps)


def over_time(found: list[Row], ranks: int, path: Path) -> None:
    """Draw loss against predicted time, a panel for each link."""
    figure, all_axes = plt.subplots(2, 2, figsize=(12, 8.4), layout="constrained", sharey=True)
    for axes, (title, rate) in zip(all_axes.flat, LINKS.items(), strict=True):
        made = predicted(ranks, rate)
        scatter(axes, found, [slowdown(row["method"], made, row["steps"]) for row in found], ceiling(found))
        axes.set(xlabel="time, computation alone = 1", ylabel="loss, nats per byte", title=title)
    figure.suptitle(f"predicted for {PARAMS / 1e6:.0f} million parameters on {ranks} ranks; losses of the small model")
    legend(figure, found)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw(rows: list[Row], folder: Path) -> list[str]:
    """Write the pictures that the rows allow, of the longest runs of each task; return a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {task: max(((r["steps"], r["workers"]) for r in rows if r["task"] == task), default=None) for task in TASKS}
    lines = []
    if sizes[MAIN]:
        steps, ranks = sizes[MAIN]
        found = summary(rows, MAIN, ranks, steps)
        title = f"{MAIN}, {ranks} workers, {steps} steps, seeds: {max(row['seeds'] for row in found)}"
        over_bytes([(title, TASKS[MAIN][2], found)], folder / "atlas.png")
        over_time(found, ranks, folder / "atlas_links.png")
        lines += [f"picture: {folder / name}" for name in ("atlas.png", "atlas_links.png")]
    panels = [
        (f"{task}, {size[1]} workers, {size[0]} steps", TASKS[task][2], summary(rows, task, size[1], size[0]))
        for task, size in sizes.items()
        if size and task != MAIN
    ]
    if panels:
        over_bytes(panels, folder / "atlas_tasks.png")
        lines.append(f"picture: {folder / 'atlas_tasks.png'}")
    return lines
