"""Tables of docs/choosing.md, from the atlas' rows: what methods lose and save, and which learning rate to start with.

`report.py` writes them into the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.atlas import picture as atlas_picture
from benchmarks.atlas.methods import CORE, H
from benchmarks.atlas.paired import difference
from benchmarks.atlas.summary import BASE, MAIN, Row, by_seed, chosen_rate, runs, summary, two_digits
from benchmarks.atlas.tasks import TASKS

LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}

RATE_TASKS = ("language model", "fine-tuning", "digits")
"""Tasks on which rates are compared."""


class Choice(NamedTuple):
    """A line of the page. method: its name in the atlas."""

    situation: str
    take: str
    method: str


CHOICES = (
    Choice("any optimizer of torch under DDP", "`average_gradients(model, fn.int4(), ...)`", "adamw, int4"),
    Choice("the same, and nothing may be lost", "`average_gradients(model, fn.int8(), ...)`", "adamw, int8"),
    Choice("Adam over Ethernet, a model on every rank", "`fn.onebit_adam`, `fn.freeze_after(...)`", "onebit_adam"),
    Choice("the same, and the warm-up is too slow", "`warmup=fn.int8()`", "onebit_adam, int8 first"),
    Choice("the same, in few messages", "`fn.zero_one_adam`, `fn.zero_one_schedule(...)`", "zero_one_adam"),
    Choice("between sites, long runs", "`fn.diloco(codec=fn.int8())`, `fn.every(...)`", "diloco, int8"),
    Choice("the same, and every byte counts", "`fn.diloco(codec=fn.bins(4, 6))`", "diloco, 2 bits"),
    Choice("the same, 1/32 of the numbers", "`fn.sparse_loco`", "sparse_loco"),
    Choice("the same, with Muon inside", "`fn.muloco(labels=fn.labels_of(model))`", "muloco, 2 bits"),
    Choice("state in shards (ZeRO-1, 2)", "`fn.loco_adamw(gather=fn.int8(), master=True)`", "loco_adamw, int8 back"),
    Choice("the same, with 1-bit Adam's gradients", "`fn.sharded_onebit_adam`", "sharded_onebit_adam"),
    Choice("matrices dominate, many ranks", "`fn.powersgd_adamw(rank=4)`", "powersgd_adamw"),
    Choice("the same, with Muon's directions", "`fn.dion(labels=fn.labels_of(model))`", "dion"),
    Choice("Muon, its state divided among ranks", "`fn.muon(codec=fn.int8())`", "muon, int8"),
    Choice("Lion, one bit a number", "`fn.lion_vote`", "lion_vote"),
    Choice("large batches with LAMB", "`fn.onebit_lamb`", "onebit_lamb"),
)  # fmt: skip
"""In the order in which the page has them."""


def table(rows: Sequence[Row]) -> str:
    """Return what each choice loses on the language model, and what it saves: bytes, and predicted time."""
    setting = TASKS[MAIN]
    found = {row["method"]: row for row in summary(rows, MAIN, setting.workers, setting.steps)}
    plans = {title: atlas_picture.predicted(setting.workers, bits) for title, bits in LINKS.items()}
    head = ["your situation", "take", "loss - AdamW's", "which is", "fewer bytes"]
    head += [f"times as fast, {title}" for title in LINKS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for choice in CHOICES:
        row, base = found[choice.method], found[BASE]
        gap = row["difference"]
        cells = [choice.situation, choice.take, f"{gap:.3f}", gap.verdict, f"{base['bytes'] / row['bytes']:.1f}x"]
        for made in plans.values():
            slow, own = (atlas_picture.slowdown(name, made, setting.steps) for name in (BASE, choice.method))
            cells.append(f"{slow / own:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


COUNTERPARTS = (
    ("adamw, int8", "adamw"),
    ("adamw, fp8", "adamw"),
    ("adamw, int4", "adamw"),
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
    head = ["method", "compared with", *(part for task in tasks for part in (task, "which is"))]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for pair in COUNTERPARTS:
        cells = [*pair]
        for task in tasks:
            own, other = (by_seed(shown(rows, task, method), "loss") for method in pair)
            gap = difference(own, other)
            cells += ["", ""] if gap is None else [str(gap), gap.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
