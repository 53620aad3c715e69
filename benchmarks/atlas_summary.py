"""What the atlas' rows say: the best learning rate of a method, the mean and range of its seeds, and a table."""

from __future__ import annotations

import math
import statistics
from typing import Any

from atlas_methods import METHODS

Row = dict[str, Any]

MAIN = "language model"
"""The task that runs on several numbers of workers."""

TUNED_ON = 4
"""Workers of the runs that choose a learning rate."""


def runs(rows: list[Row], **wanted: Any) -> list[Row]:
    """Return the rows of which these fields have these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def best(rows: list[Row], task: str, method: str, steps: int) -> float | None:
    """Return the learning rate with the lowest loss on seed 0, None before all were tried."""
    rates = METHODS[method].rates
    tried = runs(rows, task=task, method=method, workers=TUNED_ON, seed=0, steps=steps)
    losses = {row["lr"]: math.inf if row["loss"] is None else row["loss"] for row in tried if row["lr"] in rates}
    return min(losses, key=losses.__getitem__) if len(losses) == len(rates) else None


def summary(rows: list[Row], task: str, workers: int, steps: int) -> list[Row]:
    """Return a row for each method: its best learning rate, the mean and the range of its seeds, and its bytes.

    Of a method that diverged on a seed they are NaN. Before all learning rates were tried, the last one counts.
    """
    found = []
    for name, method in METHODS.items():
        own = runs(rows, task=task, method=name, workers=workers, steps=steps)
        if not own:
            continue
        lr = best(rows, task, name, steps)
        own = runs(own, lr=own[-1]["lr"] if lr is None else lr)
        if not own:
            continue
        losses = [math.nan if row["loss"] is None else row["loss"] for row in own]
        mean = statistics.mean(losses)
        ends = (mean, mean) if math.isnan(mean) else (min(losses), max(losses))
        more = {"lr": own[0]["lr"], "seeds": len(own), "bytes": own[0]["bytes"], "steps": steps}
        found.append({"method": name, "loss": mean, "range": ends, "family": method.family, **more})
    return found


def table(found: list[Row]) -> str:
    """Return the summary as Markdown. Percentages are against AdamW."""
    head = "| method | settings | lr | loss, mean (range of seeds) | against AdamW | MB per rank | fewer bytes |"
    lines = [head, "|" + "---|" * (head.count(" | ") + 1)]
    base = next((row for row in found if row["method"] == "adamw"), None)
    for row in found:
        against = (row["loss"] / base["loss"] - 1, base["bytes"] / row["bytes"]) if base else (float("nan"),) * 2
        low, high = row["range"]
        spread = f" ({low:.4f} – {high:.4f})" if row["seeds"] > 1 else ""
        loss = "diverged on a seed" if math.isnan(row["loss"]) else f"{row['loss']:.4f}{spread}"
        cells = (
            row["method"], METHODS[row["method"]].settings, f"{row['lr']:g}", loss,
            "" if math.isnan(row["loss"]) else f"{against[0]:+.1%}", f"{row['bytes'] / 1e6:.2f}", f"{against[1]:.1f}x",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
