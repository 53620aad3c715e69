"""What the atlas' rows say: each method's learning rate, its loss beside AdamW's, paired by seed, and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.atlas.methods import CORE, METHODS
from benchmarks.atlas.paired import Difference, difference, rate_at, search
from benchmarks.atlas.tasks import TASKS

Row = dict[str, Any]

MAIN = "language model"
"""The task whose pictures are shown first."""

BASE = "adamw"
"""What every method is compared with."""

TUNED_ON = 4
"""Workers of the runs that choose a learning rate."""


def runs(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows of which these fields have these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def tried(rows: Sequence[Row], task: str, method: str) -> dict[float, float]:
    """Return the mean losses on the split that chooses, by the rates that all seeds that choose have run with."""
    setting = TASKS[task]
    own = runs(rows, task=task, method=method, workers=TUNED_ON, steps=setting.steps)
    losses: dict[float, dict[int, float]] = {}
    for row in own:
        if row["seed"] in setting.choosing:
            losses.setdefault(row["lr"], {})[row["seed"]] = math.inf if row["tuning"] is None else row["tuning"]
    return {lr: statistics.fmean(x.values()) for lr, x in losses.items() if len(x) == len(setting.choosing)}


def rates_to_try(rows: Sequence[Row], task: str, method: str) -> list[float]:
    """Return the learning rates that a method's search lacks, as far as they are known."""
    start = METHODS[method].rate
    return [rate_at(start, place) for place in search(start, tried(rows, task, method)).missing]


def chosen_rate(rows: Sequence[Row], task: str, method: str) -> float | None:
    """Return the learning rate with the lowest loss where it was searched; None before the search is over."""
    place = search(METHODS[method].rate, tried(rows, task, method)).chosen
    return None if place is None else rate_at(METHODS[method].rate, place)


def by_seed(rows: Sequence[Row], name: str) -> dict[int, float]:
    """Return a field of the rows by their seeds, NaN where it is None."""
    return {row["seed"]: math.nan if row[name] is None else row[name] for row in rows}


def summary(rows: Sequence[Row], task: str, workers: int, steps: int) -> list[Row]:
    """Return a row for each method that has runs: means over the seeds that are shown, and differences to AdamW.

    Of a method that diverged on a seed the loss is NaN. Before its rate is chosen, that of its last run counts.
    """

    def shown(method: str) -> list[Row]:
        own = runs(rows, task=task, method=method, workers=workers, steps=steps)
        seeds = [row for row in own if row["seed"] in TASKS[task].seeds]
        return runs(seeds, lr=chosen_rate(rows, task, method)) or runs(seeds, lr=seeds[-1]["lr"] if seeds else None)

    base, found = shown(BASE), []
    for name, method in METHODS.items():
        if not (own := shown(name)):
            continue
        losses, accuracies = by_seed(own, "loss"), by_seed(own, "accuracy")
        classified = own[0]["accuracy"] is not None
        found.append({
            "method": name,
            "family": method.family,
            "lr": own[0]["lr"],
            "lr_factor": own[0]["lr"] / base[0]["lr"] if base else math.nan,
            "seeds": len(own),
            "loss": statistics.fmean(losses.values()),
            "range": (min(losses.values()), max(losses.values())),
            "difference": None if name == BASE else difference(losses, by_seed(base, "loss")),
            "accuracy": statistics.fmean(accuracies.values()) if classified else None,
            "accuracy_difference": difference(accuracies, by_seed(base, "accuracy")) if classified else None,
            "bytes": own[0]["bytes"],
            "steps": steps,
        })  # fmt: skip
    return found


def table(found: Sequence[Row]) -> str:
    """Return a summary as Markdown. Differences are to AdamW's loss of the same seed, with their 95 % interval."""
    base = next((row for row in found if row["method"] == BASE), None)
    classified = any(row["accuracy"] is not None for row in found)
    head = ["method", "settings", "lr", "lr / AdamW's", "loss", "loss - AdamW's", "which is"]
    head += ["accuracy"] * classified + ["MB per rank", "fewer bytes", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in found:
        diverged, gap = math.isnan(row["loss"]), row["difference"]
        cells = [row["method"], METHODS[row["method"]].settings, f"{row['lr']:.3g}", two_digits(row["lr_factor"])]
        cells += ["diverged on a seed" if diverged else f"{row['loss']:.4f}"]
        cells += ["", ""] if gap is None or diverged else [str(gap), gap.verdict]
        cells += [f"{row['accuracy']:.1%}"] if classified else []
        cells += [f"{row['bytes'] / 1e6:.2f}"]
        cells += [f"{base['bytes'] / row['bytes']:.1f}x" if base and row["bytes"] else "", str(row["seeds"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def two_digits(x: float) -> str:
    """Spell a number in two digits, without an exponent.

    >>> two_digits(103.4), two_digits(0.5555)
    ('100', '0.56')
    """
    return f"{float(f'{x:.2g}'):g}"


SHOWN = ("language model", "fine-tuning", "digits")
"""Tasks with a column in the table of all."""


def report(rows: Sequence[Row]) -> str:
    """Return what methods of the core lose on each task, a row for each; then the other tasks, and what is missing."""
    found = {task: summary(rows, task, TASKS[task].workers, TASKS[task].steps) for task in TASKS}
    by_name = {task: {row["method"]: row for row in own} for task, own in found.items()}
    base = by_name[MAIN][BASE]
    head = ["method", "settings", "fewer bytes", *(f"{task}, {TASKS[task].workers} workers" for task in SHOWN)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, method in CORE.items():
        if name in by_name[MAIN] or name in by_name[SHOWN[-1]]:
            sent = by_name[MAIN].get(name, base)["bytes"]
            cells = [name, method.settings, f"{base['bytes'] / sent:.1f}x" if sent else ""]
            lines.append(f"| {' | '.join([*cells, *(_loss(by_name[task].get(name)) for task in SHOWN)])} |")
    parts = ["\n".join(lines)]
    for task in (task for task in TASKS if task not in SHOWN):
        losses = [f"{row['method']} {_loss(row)}" for row in found[task]]
        parts.append(f"{task.capitalize()}, {TASKS[task].workers} workers: {', '.join(losses)}.")
    missing = sum(missing_runs(rows, task) for task in TASKS)
    return "\n\n".join(parts + [f"{missing} runs are missing, as far as they are known."] * bool(missing))


def _loss(row: Row | None) -> str:
    """Spell AdamW's loss, or a method's difference to it: bold where its interval does not hold zero."""
    if row is None:
        return ""
    if row["difference"] is None:
        return f"{row['loss']:.4f}"
    gap: Difference = row["difference"]
    return gap.bold()


def missing_runs(rows: Sequence[Row], task: str) -> int:
    """Return how many runs of a task's table are not there yet; searches that go on count with what is known."""
    setting, count = TASKS[task], 0
    for name, method in METHODS.items():
        if task in method.tasks:
            own = runs(rows, task=task, method=name, workers=setting.workers, steps=setting.steps)
            lr = chosen_rate(rows, task, name)
            count += len(rates_to_try(rows, task, name))
            count += len(setting.seeds) - len({row["seed"] for row in runs(own, lr=lr)} & set(setting.seeds))
    return count
