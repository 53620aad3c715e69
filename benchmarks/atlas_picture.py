"""The atlas' pictures: loss against bytes, and loss against the time that the planner predicts on four links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from atlas_methods import METHODS, H
from atlas_summary import MAIN, Row, summary
from atlas_tasks import TASKS

import fn
from fn.planner import traffic
from fn.planner.methods import Method, methods
from fn.planner.network import Cost, network
from fn.planner.predict import Plan, plan

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

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
        y, color, (low, high) = min(row["loss"], top), COLORS[row["family"]], row["range"]
        above = not row["loss"] <= top
        y = top if above else y
        if not above:
            axes.plot([x, x], [low, min(high, top)], color=color, linewidth=1, alpha=0.6)
            places.append((x, y))
        axes.plot(x, y, "^" if above else "o", color=color, markersize=5)
        axes.annotate(f"{numbers[row['method']]}", (x, y), (4, 3), textcoords="offset points", fontsize=8, color=color)
    best = front(places)
    axes.step(*zip(*best, strict=True), where="post", color="0.6", linewidth=1, linestyle="--", zorder=0)
    axes.set_xscale("log")
    axes.grid(alpha=0.25)


def ceiling(found: list[Row]) -> float:
    """Return up to where losses are drawn: 15 % above AdamW's, or twice as far as the middle method."""
    losses = sorted(row["loss"] for row in found if not math.isnan(row["loss"]))
    base = next((row["loss"] for row in found if row["method"] == "adamw"), losses[0])
    return max(1.15 * base, base + 2 * (losses[len(losses) // 2] - base))


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
    legend(figure, panels[0][2])
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
        "warm-up": warm.step,
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
        axes.set(xlabel="predicted time, computation alone = 1", ylabel="loss, nats per byte", title=title)
    legend(figure, found)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw(rows: list[Row], folder: Path) -> list[str]:
    """Write the pictures that the rows allow; return a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    worlds = sorted({row["workers"] for row in rows if row["task"] == MAIN})
    lines = []
    if worlds:
        found, ranks = summary(rows, MAIN, worlds[-1]), worlds[-1]
        title = f"{MAIN}, {ranks} workers, {found[0]['steps']} steps, {found[0]['seeds']} seeds"
        over_bytes([(title, TASKS[MAIN][2], found)], folder / "atlas.png")
        over_time(found, ranks, folder / "atlas_links.png")
        lines += [f"picture: {folder / name}" for name in ("atlas.png", "atlas_links.png")]
    others = [task for task in TASKS if task != MAIN and any(row["task"] == task for row in rows)]
    if others:
        panels = [(f"{task}, 4 workers", TASKS[task][2], summary(rows, task, 4)) for task in others]
        over_bytes(panels, folder / "atlas_tasks.png")
        lines.append(f"picture: {folder / 'atlas_tasks.png'}")
    return lines
