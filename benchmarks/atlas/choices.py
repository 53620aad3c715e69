"""Tables from the atlas' rows: what codes cost beside the same without codes, and which learning rate to start with.

`report.py` writes them into the pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.atlas.methods import CORE, H
from benchmarks.atlas.paired import difference
from benchmarks.atlas.summary import BASE, Row, by_seed, chosen_rate, runs, two_digits
from benchmarks.atlas.tasks import TASKS
from benchmarks.measure import markdown

RATE_TASKS = ("language model", "fine-tuning", "digits")
"""Tasks on which rates are compared."""

COUNTERPARTS = (
    ("muon, int8", "muon"),
    ("dion", "muon"),
    ("muloco, 2 bits", "muon"),
    ("lion_vote", "lion"),
    ("onebit_lamb", "lamb"),
    ("diloco, int8", "diloco"),
    ("diloco", "adamw, one worker"),
    ("diloco", f"adamw, a step in {H}"),
)
"""Methods, and what each is compared with: the same without codes, or the same bytes and no method."""


def counterparts(rows: Sequence[Row]) -> str:
    """Return how far the losses of methods are from those of what they are to be compared with, paired by seed."""
    tasks = RATE_TASKS[:2]
    lines = []
    for pair in COUNTERPARTS:
        gaps = [difference(*(by_seed(shown(rows, task, method), "loss") for method in pair)) for task in tasks]
        lines.append([*pair, *("" if gap is None else gap.bold() for gap in gaps)])
    return markdown(" | ".join(["method", "compared with", *tasks]), lines)


def shown(rows: Sequence[Row], task: str, method: str) -> list[Row]:
    """Return the runs of a method that the table of a task shows."""
    setting, lr = TASKS[task], chosen_rate(rows, task, method)
    own = runs(rows, task=task, method=method, workers=setting.workers, steps=setting.steps, lr=lr)
    return [row for row in own if row["seed"] in setting.seeds]


def start(rows: Sequence[Row], method: str) -> float:
    """Return the factor on AdamW's learning rate to start with, in one digit: the median of the tasks'."""
    return float(f"{statistics.median(factors(rows, method).values()):.0e}")


def factors(rows: Sequence[Row], method: str) -> dict[str, float]:
    """Return a method's tuned learning rate as a multiple of AdamW's, by task."""
    tuned = {task: (chosen_rate(rows, task, method), chosen_rate(rows, task, BASE)) for task in RATE_TASKS}
    return {task: own / base for task, (own, base) in tuned.items() if own is not None and base is not None}


def rates(rows: Sequence[Row]) -> str:
    """Return each core method's tuned learning rate on each task, as a multiple of AdamW's."""
    head = ["method", *RATE_TASKS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, method in CORE.items():
        if name != BASE and method.family != "baseline" and set(method.tasks) & set(RATE_TASKS):
            own = factors(rows, name)
            cells = [name, *(two_digits(own[task]) if task in own else "" for task in RATE_TASKS)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
