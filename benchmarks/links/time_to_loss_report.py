"""What `time_to_loss.py` says and draws: losses over seconds, and the seconds until a loss is reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.atlas.methods import ADAM_RATE
from benchmarks.atlas.paired import difference, rate_at, search
from benchmarks.links.time_to_loss_rank import BASE, EXACT, METHODS, Part
from benchmarks.measure import markdown, measured_on

FULL = "100 Mbit/s"
"""The link on which methods train in full."""

RATES = {FULL: 1e8, "10 Mbit/s": 1e7, "1 Gbit/s": 1e9}
"""What is measured, in the order in which it is."""

MARGIN = 1.01
"""The loss to reach, as a multiple of AdamW's last one."""

Result = dict[str, Any]
Curve = list[tuple[int, float, float]]
"""Steps, seconds and loss of each look."""


def key(method: str, part: str) -> str:
    """Return the name of a run in the file."""
    return f"{method}, {part}"


def together(part: Part, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the ranks of a run saw: by the clock of rank 0, which waits, or by the slowest of each step."""
    about = {"lr": part.lr, "seed": part.seed, "steps": part.steps, "measured": ranks[0]["measured"]}
    if part.looks is not None:
        return about | {"looks": ranks[0]["looks"]}
    seconds = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return about | {"seconds": seconds, "payload": ranks[0]["payload"]}


def chosen(result: Result, method: str) -> float | None:
    """Return the learning rate with the lowest loss where it was searched; None before the search is over."""
    tried = result["tuned"].get(method, {})
    losses = {float(lr): math.inf if loss is None else loss for lr, loss in tried.items()}
    place = search(ADAM_RATE, losses).chosen
    return None if place is None else rate_at(ADAM_RATE, place)


class Pace(NamedTuple):
    """Seconds of a step in the warm-up, which sends float32, and of one of the method's own."""

    exact: float
    own: float


def pace(method: str, point: dict[str, Any]) -> Pace:
    """Return what steps took where they were only timed: medians; of rounds the mean of the last one.

    The first step of the warm-up opens connections and is left out.
    """
    seconds, own = point["seconds"], METHODS[method]
    if own.make is None:
        return Pace(math.nan, statistics.median(seconds[1:]))
    exact = statistics.median(seconds[1:EXACT])
    return Pace(exact, statistics.fmean(seconds[-own.steps :]) if own.steps > 1 else statistics.median(seconds[EXACT:]))


def curve(result: Result, method: str, rate: str) -> Curve | None:
    """Return a method's losses over seconds: measured in full, or computed from the timed steps; None if unknown."""
    full, point = (result["runs"].get(key(method, name)) for name in (FULL, rate))
    if full is None or point is None:
        return None
    losses = [(seen["step"], math.nan if seen["loss"] is None else seen["loss"]) for seen in full["looks"]]
    if rate == FULL:
        return [(step, seen["seconds"], loss) for (step, loss), seen in zip(losses, full["looks"], strict=True)]
    exact = METHODS[method].exact(full["steps"])
    took = pace(method, point)

    def seconds(step: int) -> float:
        return (min(step, exact) * took.exact if exact else 0.0) + max(0, step - exact) * took.own

    return [(step, seconds(step), loss) for step, loss in losses]


def target(result: Result) -> float | None:
    """Return the loss to reach: AdamW's last one and 1 %; None before it has run."""
    found = curve(result, BASE, FULL)
    return None if found is None else MARGIN * found[-1][2]


def seconds_to(found: Curve, loss: float) -> float | None:
    """Return the seconds until a loss is reached, linear between two looks; None if it never is.

    >>> seconds_to([(50, 10.0, 3.0), (100, 20.0, 2.0)], 2.5)
    15.0
    """
    before: tuple[float, float] | None = None
    for _, seconds, seen in found:
        if seen <= loss:
            if before is None:
                return seconds
            part = (before[1] - loss) / (before[1] - seen)
            return before[0] + part * (seconds - before[0])
        before = None if math.isnan(seen) else (seconds, seen)
    return None


def last_losses(result: Result, method: str) -> dict[int, float]:
    """Return the loss at the end by seed: over the link, and of the runs without a clock."""
    found = {}
    points = [result["runs"].get(key(method, FULL))]
    points += [point for name, point in result["seeds"].items() if name.startswith(f"{method}, seed ")]
    for point in filter(None, points):
        loss = point["looks"][-1]["loss"]
        found[point["seed"]] = math.nan if loss is None else loss
    return found


def _gap(result: Result, method: str) -> str:
    """Return how far the last losses are from AdamW's of the same seeds: their mean, and their range."""
    own, base = last_losses(result, method), last_losses(result, BASE)
    pairs = [own[seed] - base[seed] for seed in own if seed in base]
    if method == BASE or not pairs:
        return ""
    if len(pairs) == 1:
        return f"{pairs[0]:+.4f} (one seed)"
    found = difference(own, base)
    assert found is not None
    return f"{found.mean:+.4f} ({min(pairs):+.4f} to {max(pairs):+.4f}, {len(pairs)} seeds)"


class Reached(NamedTuple):
    """A method on a link.

    seconds: of a step, in the mean of the run. at: seconds until the target is reached, or None. share: of AdamW's.
    """

    method: str
    seconds: float
    at: float | None
    share: float | None


def reached(result: Result, rate: str) -> list[Reached]:
    """Return the methods that are known on a link, in the order of tables."""
    curves = {method: found for method in METHODS if (found := curve(result, method, rate)) is not None}
    loss, rows = target(result), []
    base = seconds_to(curves[BASE], loss) if BASE in curves and loss is not None else None
    for method, found in curves.items():
        at = None if loss is None else seconds_to(found, loss)
        rows.append(Reached(method, found[-1][1] / found[-1][0], at, at / base if at and base else None))
    return rows


def table(result: Result) -> str:
    """Return Markdown: for each method its loss at the end, and the seconds until the loss is reached on each link."""
    size, loss = result.get("size", []), target(result)
    lines = []
    if not result.get("throttled", True):
        lines.append("No link was throttled: the ranks ran over loopback.")
    if result["runs"]:
        lines.append(measured_on(point["about"] for point in result["runs"].values()))
    if size:
        text = f"{result['ranks']} ranks, {result['steps']} steps of {size[-1]} sequences of {size[-2]} bytes."
        goal = "" if loss is None else f" The loss to reach is {loss:.4f}, AdamW's last one and 1 %."
        lines.append(text + goal)
    links = {rate: {row.method: row for row in reached(result, rate)} for rate in RATES}
    rows = []
    for method in METHODS:
        point = result["runs"].get(key(method, FULL))
        if point:
            end = point["looks"][-1]
            spelled = "diverged" if end["loss"] is None else f"{end['loss']:.4f}"
            cells = [method, f"{point['lr']:.3g}", spelled, _gap(result, method), f"{end['payload'] / 1e6:.1f}"]
            rows.append([*cells, *(_seconds(found.get(method)) for found in links.values())])
    head = [f"{rate}{'' if rate == FULL else ', computed'}: s (times as fast)" for rate in links]
    if rows:
        lines.append(markdown(" | ".join(["method", "lr", "last loss", "- AdamW's (range)", "MB sent", *head]), rows))
    return "\n\n".join(lines)


def _seconds(row: Reached | None) -> str:
    if row is None:
        return ""
    if row.at is None:
        return "not reached"
    return f"{row.at:.0f}" if row.share is None else f"{row.at:.0f} ({1 / row.share:.2f})"


COLORS = {
    BASE: "0.25",
    "int4 gradients": "C0",
    "1-bit Adam": "C3",
    "DiLoCo, int8, late": "C2",
    "DiLoCo, 3 x the steps": "C4",
}
MOST, MOST_SMALL = 1.8, 2.3
"""How many times the target is the highest loss that is drawn; small panels leave more room for their names."""


def draw(result: Result, path: str) -> None:
    """Write the losses over seconds on the link that was measured in full, and small panels of the computed ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    others = [rate for rate in ("10 Mbit/s", "1 Gbit/s") if reached(result, rate)]
    figure = plt.figure(figsize=(9.6, 5.6), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(max(1, len(others)), 2 if others else 1, width_ratios=(2.1, 1) if others else (1,))
    loss = target(result)
    for rate in (FULL, *others):
        big = rate == FULL
        axes = figure.add_subplot(grid[:, 0] if big else grid[others.index(rate), 1])
        for row in reached(result, rate):
            found, color = curve(result, row.method, rate) or [], COLORS[row.method]
            label = f"{row.method}: {'not reached' if row.at is None else _short(row.at)}"
            axes.plot([x for _, x, _ in found], [y for *_, y in found], color=color, linewidth=2 if big else 1.5,
                      linestyle="-" if big else (0, (4, 1)), label=label)  # fmt: skip
            if row.at is not None and loss is not None:
                axes.plot(row.at, loss, "o", color=color, markersize=7 if big else 5, zorder=3)
        if loss is not None:
            axes.axhline(loss, color="0.4", linestyle="--", linewidth=1.2)
            axes.set_ylim(0.95 * loss, (MOST if big else MOST_SMALL) * loss)
            if big:
                axes.text(0.01, loss, f"target: AdamW's last loss + 1 % = {loss:.3f}", va="bottom", fontsize=10,
                          color="0.3", transform=axes.get_yaxis_transform())  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=11 if big else 9)
        if big:
            axes.set_xlabel("seconds of training", fontsize=12)
            axes.set_ylabel("loss on held-out data, nats per byte", fontsize=12)
            axes.set_title("measured; time to the target:", fontsize=11, loc="left")
        else:
            axes.set_title(f"{rate}, computed", fontsize=11, loc="left")
        axes.legend(fontsize=11 if big else 8, loc="upper right", framealpha=0.9)
    figure.suptitle(f"{result['ranks']} workers, {FULL}, 0.85 M parameters, two cores", fontsize=14)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _short(seconds: float) -> str:
    """Spell seconds, or minutes from two of them on.

    >>> _short(42.4), _short(300.0)
    ('42 s', '5.0 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
