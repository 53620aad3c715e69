"""What `grid.py` says and draws: seconds a step, the use of a GPU, bytes, and the planner's predictions beside them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.links.grid_methods import HALF, NONE, shapes
from benchmarks.links.grid_rank import CODING, EVERY
from benchmarks.measure import markdown, measured_on
from fn.planner.network import Cost, Link, Network, network
from fn.planner.predict import predict
from fn.planner.traffic import Model


class Step(NamedTuple):
    """A measured point: seconds a step in the mean of a period, its range, and what was sent in a step.

    local, exchange: seconds of the period's steps that send nothing, in the median, and of all the rest of it.
    processor: seconds of the processor in a step on the busiest rank. ledger, payload: bytes a rank sent, as counted
    by `fn.ledger` and by the interface.
    """

    method: str
    size: tuple[int, int]
    repeats: int
    seconds: float
    fastest: float
    slowest: float
    local: float
    exchange: float
    processor: float
    ledger: float
    payload: float


def _slowest(found: dict[str, Any]) -> list[list[float]]:
    """Return for each repeat the seconds of its steps, of the slowest rank."""
    ranks = [[period["seconds"] for period in rank["periods"]] for rank in found["seen"]]
    return [[max(step) for step in zip(*same, strict=True)] for same in zip(*ranks, strict=True)]


def step(found: dict[str, Any]) -> Step:
    """Return what a point says."""
    periods = _slowest(found)
    count = len(periods[0])
    means = [sum(period) / count for period in periods]
    seconds = statistics.median(means)
    local = statistics.median(x for period in periods for x in period[:-1]) if count > 1 else seconds
    sent = found["seen"][0]["periods"]
    return Step(
        found["method"], tuple(found["size"]), len(periods), seconds, min(means), max(means), local,
        count * (seconds - local),
        max(statistics.median(p["processor"] for p in rank["periods"]) for rank in found["seen"]) / count,
        *(statistics.median(p[key] for p in sent) / count for key in ("ledger", "payload")),
    )  # fmt: skip


def link(found: dict[str, Any]) -> Network:
    """Return the network that a point calibrated."""
    costs = {name: Cost(**cost) for name, cost in found["seen"][0]["costs"].items()}
    return network(found["ranks"], found["ranks"], Link(costs["all_to_all"], costs))


class Cell(NamedTuple):
    """A method on a link: what was measured, the computation beside it, and what the planner predicts for it."""

    ranks: int
    rate: str
    step: Step
    alone: Step
    planned: float
    predicted: float | None

    def used(self, compute: float) -> float:
        """Return the part of a step in which a GPU would compute."""
        return compute / self.step.seconds


def cells(result: dict[str, Any]) -> Iterator[Cell]:
    """Yield the measured points whose size has one without communication."""
    found = list(result["points"].values())
    nets = {(p["ranks"], p["part"]): link(p) for p in found if p["method"] is None}
    points = {(p["ranks"], p["part"], p["method"], tuple(p["size"])): p for p in found if p["method"] is not None}
    steps = {key: step(point) for key, point in points.items() if key[1] != CODING}
    for (ranks, rate, name, size), seen in steps.items():
        alone = steps.get((ranks, rate, NONE, size))
        if alone is None or name == NONE:
            continue
        method = EVERY[name].method(Model(tuple(shapes(*size, **result["words"]))), ranks)
        own, base = (points.get((ranks, CODING, key, size)) for key in (name, NONE))
        assert method is not None
        predicted = None
        if (ranks, rate) in nets and own and base:
            spent = statistics.median(sum(period) for period in _slowest(own))
            spent -= statistics.median(sum(period) for period in _slowest(base)) * EVERY[name].steps
            predicted = predict(method, nets[ranks, rate], alone.seconds, max(0.0, spent)).step
        yield Cell(ranks, rate, seen, alone, method.size, predicted)


def table(result: dict[str, Any]) -> str:
    """Return Markdown: seconds a step, a row for each method and a column for each link; then the planner's errors."""
    every, compute = list(cells(result)), result["compute"]
    parts = [measured_on(point["about"] for point in result["points"].values())]
    parts += [f"**A GPU's computation is a wait of {1e3 * compute:.0f} ms**; all else is real."]
    if not result["throttled"]:
        parts.append("No link was throttled: the ranks ran over loopback.")
    found = {(cell.ranks, cell.rate, cell.step.method): cell for cell in every}
    places = dict.fromkeys((cell.ranks, cell.rate) for cell in every)
    rows = []
    for name in dict.fromkeys(cell.step.method for cell in every):
        first = next(cell for cell in every if cell.step.method == name)
        row = [found.get((*place, name)) for place in places]
        rows.append([name, f"{first.planned / 1e6:.3g}", *(_seconds(cell, compute) for cell in row)])
    head = ["method", "MB a step", *(f"{ranks} ranks, {rate}" for ranks, rate in places)]
    return "\n\n".join([*parts, markdown(" | ".join(head), rows), *_errors(every)])


def _seconds(cell: Cell | None, compute: float) -> str:
    """Spell the seconds of a step, and the part of it in which a GPU would compute; a star for the smaller model."""
    if cell is None:
        return ""
    return f"{cell.step.seconds:.3g}{'*' if cell.step.size == HALF else ''} ({cell.used(compute):.0%})"


def _errors(every: list[Cell]) -> list[str]:
    """Return how far the planner's predictions are from what was measured."""
    ratios = {f"{c.step.method}, {c.ranks} ranks, {c.rate}": c.predicted / c.step.seconds for c in every if c.predicted}
    if not ratios:
        return []
    off = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 0.2}
    text = f"The planner's predictions are {min(ratios.values()):.2f} to {max(ratios.values()):.2f} of what was "
    text += f"measured; {len(ratios) - len(off)} of {len(ratios)} are within 20 %."
    if off:
        text += " Not: " + "; ".join(f"{name} ({ratio:.2f})" for name, ratio in off.items()) + "."
    return [text]


DRAWN = ("DDP float32", "DDP bf16", "int4 gradients", "1-bit Adam, overlapped", "DiLoCo, int8, late", "DiLoCo, signs")
"""Methods with a line in the picture; more could not be told apart."""

GAP = 5.0
"""Percent between two names in the picture."""


def draw(result: dict[str, Any], path: str) -> None:
    """Write how busy a GPU would be over the bandwidth, for two ranks, a line for each of `DRAWN`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    two, compute = [cell for cell in cells(result) if cell.ranks == 2], result["compute"]
    lines = {name: {c.rate: 100 * c.used(compute) for c in two if c.step.method == name} for name in DRAWN}
    lines[NONE] = {cell.rate: 100 * compute / cell.alone.seconds for cell in two}
    below = -GAP
    for name, seen in sorted(lines.items(), key=lambda line: list(line[1].values())[-1:]):
        if seen:
            gray, style = ("0.4" if name.startswith("DDP") or name == NONE else None), "--" if name == NONE else "o-"
            (line,) = axes.plot(list(seen), list(seen.values()), style, color=gray, linewidth=1.5)
            below = max(below + GAP, list(seen.values())[-1])
            axes.annotate(name, (len(seen) - 1, below), xytext=(8, 0), textcoords="offset points", fontsize=9,
                          va="center", color=line.get_color())  # fmt: skip
    axes.set(ylabel="percent of a step in which a GPU would compute", ylim=(0, 80), xlim=(-0.15, 3.1))
    axes.set_title(f"124 M parameters, 2 ranks, a computation of {1e3 * compute:.0f} ms", fontsize=10)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
