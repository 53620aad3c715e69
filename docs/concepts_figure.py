"""Draw docs/concepts.png, the figure of docs/concepts.md: `python docs/concepts_figure.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

RANKS = 3
PIECES = ("#4c78a8", "#f58518", "#54a24b")
INK, SOFT = "#333333", "#8a8a8a"


def vector(at: Axes, x: float, y: float, colors: list[str], coded: bool = False, size: float = 0.5) -> None:
    """Draw pieces of a vector side by side; coded ones are thin and dotted."""
    for k, color in enumerate(colors):
        height = 0.16 if coded else 0.42
        box = Rectangle((x + k * size, y - height / 2), size * 0.94, height, facecolor=color, edgecolor="white")
        box.set(alpha=0.85 if coded else 1.0, hatch="||||" if coded else None)
        at.add_patch(box)


def arrow(at: Axes, start: tuple[float, float], end: tuple[float, float], color: str = SOFT, bend: float = 0.0) -> None:
    """Draw an arrow."""
    style = f"arc3,rad={bend}"
    at.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=color, connectionstyle=style, lw=1.1)
    )


def error(at: Axes, x: float, y: float, name: str) -> None:
    """Draw an error: what the encoding lost goes into a box, and back into the next step."""
    shape = {"boxstyle": "round,pad=0.04", "fc": "#fde9e7", "ec": "#c44e52"}
    at.add_patch(FancyBboxPatch((x - 0.42, y - 0.13), 0.84, 0.26, **shape))
    at.text(x, y, name, ha="center", va="center", fontsize=8, color="#c44e52")


def exchange(at: Axes) -> None:
    """Draw the two halves of a compressed mean on three ranks."""
    for r in range(RANKS):
        y = 2.6 - 1.35 * r
        at.text(-0.15, y, f"rank {r}", ha="right", va="center", fontsize=10, color=INK)
        vector(at, 0, y, list(PIECES))
        arrow(at, (1.55, y), (2.2, y))
        vector(at, 2.3, y, list(PIECES), coded=True)
        error(at, 1.8, y - 0.52, "worker error")
        arrow(at, (2.65, y - 0.14), (2.28, y - 0.48), "#c44e52", -0.3)
        arrow(at, (1.35, y - 0.52), (0.9, y - 0.25), "#c44e52", -0.3)
        for other in range(RANKS):
            arrow(at, (3.85, y), (5.0, 2.6 - 1.35 * other), PIECES[other])
        for k in range(RANKS):
            vector(at, 5.15, y + 0.2 * (1 - k), [PIECES[r]], coded=True)
        arrow(at, (5.75, y), (6.2, y))
        vector(at, 6.3, y, [PIECES[r]])
        arrow(at, (6.85, y), (7.4, y))
        vector(at, 7.5, y, [PIECES[r]], coded=True)
        error(at, 7.05, y - 0.52, "server error")
        arrow(at, (7.75, y - 0.14), (7.52, y - 0.48), "#c44e52", -0.3)
        arrow(at, (6.6, y - 0.52), (6.42, y - 0.25), "#c44e52", -0.3)
        for other in range(RANKS):
            arrow(at, (8.05, y), (9.2, 2.6 - 1.35 * other), PIECES[r])
        vector(at, 9.3, y, list(PIECES))
    for x, text in (
        (0.75, "momentum\nof each rank"),
        (3.0, "encoded,\na row for each rank"),
        (4.45, "all-to-all"),
        (5.4, "received"),
        (6.55, "mean of\none piece"),
        (7.75, "encoded"),
        (8.6, "all-gather"),
        (10.05, "mean, the same\non every rank"),
    ):
        at.text(x, 3.45, text, ha="center", va="center", fontsize=9, color=INK)
    for left, right, name in ((0, 6.8, "reduce_scatter_mean"), (6.95, 10.8, "all_gather_shards")):
        at.plot([left, right], [-0.95, -0.95], color=INK, lw=1.2)
        at.text((left + right) / 2, -1.13, name, ha="center", va="center", fontsize=10, family="monospace", color=INK)
    at.set(xlim=(-0.9, 11), ylim=(-1.3, 3.8))


def phases(at: Axes) -> None:
    """Draw what a rank sends in each step of a run of 0/1 Adam's kind."""
    sent = [1.0] * 8 + ([1 / 8] * 10) + [1 / 8, 0.0] * 4 + [1 / 8, 0, 0, 0] * 3
    colors = ["#4c78a8"] * 8 + ["#f58518"] * 30
    at.bar(range(len(sent)), sent, width=0.82, color=colors)
    for step, amount in enumerate(sent):
        if amount == 0:
            at.plot(step, 0.02, ".", color=SOFT, markersize=4)
    for x, text in (
        (3.5, "WARMUP\nexact mean"),
        (12.5, "COMPRESSED\nsigns: 1/32, drawn as 1/8"),
        (27.5, "COMPRESSED, and LOCAL in between:\nnothing is sent (dots)"),
    ):
        at.text(x, 1.12 if x < 8 else 0.32, text, ha="center", va="bottom", fontsize=9, color=INK)
    at.set(xlabel="step, in the phase that the schedule says", ylabel="bytes", ylim=(0, 1.6), yticks=[], xticks=[])


def main() -> None:
    """Draw and write the figure."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9.5, 6.2), height_ratios=(3.1, 1), layout="constrained")
    exchange(top)
    top.axis("off")
    phases(bottom)
    bottom.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("concepts.png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
