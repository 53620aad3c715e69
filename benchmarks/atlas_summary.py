"""What the atlas' rows say: the best learning rate of a method, the mean and range of its seeds, and a table."""

from __future__ import annotations

import statistics
from typing import Any

from atlas_methods import METHODS

Row = dict[str, Any]

MAIN = "language model"
"""The task that runs on several numbers of workers."""

TUNED_ON = 4
"""Workers of the runs that choose a learning rate."""


def best(rows: list[Row], task: str, method: str) -> float | None:
    """Return the learning rate with the lowest loss on seed 0, None before all were tried."""
    rates = METHODS[method].rates
    tried = [r for r in rows if (r["task"], r["method"], r["workers"], r["seed"]) == (task, method, TUNED_ON, 0)]
    tried = [r for r in tried if r["lr"] in rates]
    if len(tried) < len(rates):
        return None
    return min(tried, key=lambda r: float("inf") if r["loss"] is None else r["loss"])["lr"]


def summary(rows: list[Row], task: str, workers: int) -> list[Row]:
    """Return a row for each method: its best learning rate, the mean and the range of its seeds, and its bytes."""
    found = []
    for name, method in METHODS.items():
        own = [r for r in rows if (r["task"], r["method"], r["workers"]) == (task, name, workers)]
        lr = best(rows, task, name)
        own = [r for r in own if lr is None or r["lr"] == lr]
        losses = [r["loss"] for r in own]
        if not own or None in losses:
            losses = []
        middle = statistics.mean(losses) if losses else float("nan")
        if own:
            ends = (min(losses), max(losses)) if losses else (middle, middle)
            more = {"lr": own[0]["lr"], "seeds": len(own), "bytes": own[0]["bytes"], "steps": own[0]["steps"]}
            found.append({"method": name, "loss": middle, "range": ends, "family": method.family, **more})
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
        cells = (
            row["method"], METHODS[row["method"]].settings, f"{row['lr']:g}", f"{row['loss']:.4f}{spread}",
            f"{against[0]:+.1%}", f"{row['bytes'] / 1e6:.2f}", f"{against[1]:.1f}x",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
