"""The deep atlas' picture: loss over steps, over bytes, and over the time that the planner predicts on four links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import atlas_picture
import matplotlib.pyplot as plt
from deep_atlas import METHODS, STEPS, WORKERS, Row, reported

COLORS = dict(zip(METHODS, ("black", "0.45", "C0", "C3", "C2", "C1"), strict=True))

Clock = Callable[[int, int], float]
"""(steps, bytes) of a look -> where it lies on the axis."""


def times(name: str, bits: float) -> list[float]:
    """Return the predicted time after each step on a link of so many bit/s, in steps of computation alone."""
    if METHODS[name].alone:
        return [float(step + 1) for step in range(STEPS)]
    return atlas_picture.times(METHODS[name].like, atlas_picture.predicted(WORKERS, bits), STEPS)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw the means of the seeds, and their range."""
    figure, all_axes = plt.subplots(2, 3, figsize=(17, 9), layout="constrained", sharey=True)
    clocks: list[tuple[str, str, Callable[[str], Clock]]] = [
        ("equal tokens", "steps", lambda name: lambda step, sent: step),
        ("equal bytes", "MB that a rank has sent", lambda name: lambda step, sent: sent / 1e6),
    ]
    for title, bits in atlas_picture.LINKS.items():

        def clock(name: str, bits: float = bits) -> Clock:
            after = times(name, bits)
            return lambda step, sent: after[step - 1]

        clocks.append((f"predicted, {title}", "time, a step of computation = 1", clock))
    for axes, (title, label, clock_of) in zip(all_axes.flat, clocks, strict=True):
        for name, method in METHODS.items():
            if not (runs := list(reported(rows, name).values())):
                continue
            looks = [[math.nan if loss is None else loss for *_, loss in run["curve"]] for run in runs]
            mean, low, high = ([*map(f, zip(*looks, strict=True))] for f in (statistics.fmean, min, max))
            xs = [clock_of(name)(step, sent) for step, sent, _ in runs[0]["curve"]]
            style = {"color": COLORS[name], "linestyle": "--" if method.alone else "-"}
            if not xs[-1]:  # nothing is sent, and a logarithmic axis has no zero
                axes.axhline(mean[-1], **style)
                continue
            axes.fill_between(xs, low, high, color=COLORS[name], alpha=0.2, linewidth=0)
            axes.plot(xs, mean, label=name, **style)
        axes.set(title=title, xlabel=label, xscale="linear" if label == "steps" else "log")
        axes.grid(alpha=0.25)
    for axes in all_axes[:, 0]:
        axes.set_ylabel("loss on held-out data, nats per byte")
    handles, names = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
