"""Steps to AdamW's loss: what is published for a model's size, what was measured on a small one, and how much it says.

Published numbers are those of `published.json`, our own those of `same_loss.json`. Between the sizes of a table a
number is linear in the logarithm of the parameters, beyond the largest and below the smallest it is that size's. Losses
are linear in the logarithm of the replicas, too; more replicas or longer rounds than a table has give no number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

AT_SIZE, OTHER_SIZE, SMALL, NONE = "published at this size", "published, other size", "small models only", "none"
"""Grades of evidence, the best first."""

GIVEN = "given"
"""The grade of a number of a flag."""

NEAR = 1.25
"""A published size is the model's own if neither is more than so many times the other."""

TINY = 1_000_000
"""Parameters up to which a number of our small model stands beside a published one."""

Range = tuple[float, float, float]
"""A number, and the ends of its range."""


class Evidence(NamedTuple):
    """What is known of a method's steps over AdamW's to the same loss.

    steps: the number, and the range that holds what other sources say; None without a published one. own: that of our
    small model, and its 95 % interval. gap: the published final loss over AdamW's at the same steps, in nats and as a
    part. sources: where numbers are from. words: all that in a sentence.
    """

    grade: str
    steps: Range | None
    own: Range | None
    gap: tuple[float, float] | None
    sources: tuple[str, ...]
    words: str


@cache
def published() -> dict[str, Any]:
    """Return the published tables."""
    return _read("published.json")


@cache
def measured() -> dict[str, Any]:
    """Return the steps of methods over AdamW's to the same loss, of whole runs of a small model, with their commit."""
    return _read("same_loss.json")


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("fn.planner").joinpath(name).read_text(encoding="utf-8"))
    return found


def evidence(name: str, params: int, *, replicas: int = 1, local_steps: int = 1) -> Evidence:
    """Return what is known of a method for a model of so many parameters.

    Args: name: as the picks and the planner's rows have it. replicas, local_steps: of a method that trains alone.
    """
    tables = published()["methods"].get(name, {})
    own = _own(name)
    if "steps" in tables:
        return _of_steps(name, published()["steps"][tables["steps"]], params, own, tables.get("small"))
    if "losses" in tables:
        if 1 <= replicas <= most_replicas(name) and local_steps <= most_local_steps(name):
            return _of_losses(name, params, replicas, own)
        said = f"published with at most {most_local_steps(name)} local steps and {most_replicas(name)} replicas"
    else:
        said = "no published run in our tables"
    if own is None:
        return Evidence(NONE, None, None, None, (), f"steps: none known; {said}")
    return Evidence(SMALL, None, own, None, (_here(),), f"steps: {SMALL}; {said}; {_said_of_own(name, own)}")


def given(ratio: float) -> Evidence:
    """Return the evidence of a number that the user gives."""
    return Evidence(GIVEN, (ratio,) * 3, None, None, ("--steps-ratio",), f"steps: {show_parts((ratio,))}, as given")


def most_local_steps(name: str) -> int:
    """Return the longest round of a method's published losses; 0 if it has none."""
    return max((table["local_steps"] for table in _losses(name)), default=0)


def most_replicas(name: str) -> int:
    """Return the most replicas of a method's published losses; 0 if it has none."""
    return max((int(count) for table in _losses(name) for count in table["replicas"]), default=0)


def _losses(name: str) -> list[dict[str, Any]]:
    wanted = published()["methods"].get(name, {}).get("losses")
    return [table for table in published()["losses"] if table["method"] == wanted]


def _own(name: str) -> Range | None:
    found = measured()["methods"].get(name)
    if found is None:
        return None
    low, high = found["interval"]
    return found["ratio"], low, high


def _here() -> str:
    return f"our runs of {measured()['params']:,} parameters, commit {measured()['commit']}"


def _said_of_own(name: str, own: Range) -> str:
    found = measured()["methods"][name]
    half = f", in a run of {found['steps']} steps" if found["steps"] != measured()["steps"] else ""
    return f"{show_parts(own)} on our model of {measured()['params']:,} parameters{half}"


def _of_steps(name: str, table: dict[str, Any], params: int, own: Range | None, small: str | None) -> Evidence:
    """Return what a table of ratios says; small: what is known of the method itself, on small models."""
    sizes = table["sizes"]
    at = [float(size["params"]) for size in sizes]
    ratio = between(math.log(params), [*map(math.log, at)], [fmean(size["ratio"]) for size in sizes])
    near = _around(params, at)
    cells = [x for i in near for x in sizes[i]["ratio"]] + [x for other in table["others"] for x in other["range"]]
    smallest = min(own["interval"][0] for own in measured()["methods"].values())  # of all that run at our size
    low = min(*cells, smallest) if params < at[0] / NEAR else min(cells)
    steps = (ratio, low, max(cells))
    grade = AT_SIZE if _is_near(params, at) else OTHER_SIZE
    sources = (table["source"], *(other["source"] for other in table["others"]))
    words = f"steps: {show_parts(steps)}, {grade if small is None else SMALL}"
    words += f" ({table['source']})" if small is None else f" (exact Muon's, {grade}: {table['source']}; {small})"
    return _beside_own(name, Evidence(grade if small is None else SMALL, steps, own, None, sources, words), params)


def _beside_own(name: str, known: Evidence, params: int) -> Evidence:
    """Return what is published, and our own number beside it for a model that is as tiny as ours."""
    if known.own is None or params > TINY:
        return known._replace(own=None)
    words = f"{known.words}; {_said_of_own(name, known.own)}"
    return known._replace(sources=(*known.sources, _here()), words=words)


def _of_losses(name: str, params: int, replicas: int, own: Range | None) -> Evidence:
    """Return what tables of losses say, each number of replicas by the table that has it."""
    curves = []
    for table in _losses(name):
        at = [math.log(n) for n in table["params"]]
        for count, losses in table["replicas"].items():
            over = [loss - base for loss, base in zip(losses, table["adamw"], strict=True)]
            parts = [x / base for x, base in zip(over, table["adamw"], strict=True)]
            x = math.log(params)
            curves.append((math.log(int(count)), between(x, at, over), between(x, at, parts), table))
    curves.sort(key=lambda curve: curve[0])
    counts, k = [curve[0] for curve in curves], math.log(replicas)
    nats, part = between(k, counts, [curve[1] for curve in curves]), between(k, counts, [curve[2] for curve in curves])
    near = _around(replicas, [math.exp(count) for count in counts])
    used = [curves[i][3] for i in near]
    grade = AT_SIZE if all(_is_near(params, table["params"]) for table in used) else OTHER_SIZE
    sources = tuple(dict.fromkeys(table["source"] for table in used))
    ratio, *ends = (math.exp(nats / slope) for slope in slope_of_adamw(params))
    if own is not None and params < min(min(table["params"]) for table in used) / NEAR:
        ends += own[1:]
    steps = (ratio, min(ends), max(ends))
    beside = "" if len(near) == 1 else f" (published: {' and '.join(f'{math.exp(counts[i]):.0f}' for i in near)})"
    words = (
        f"steps: {show_parts(steps)}, {grade} ({', '.join(sources)}: {nats:+.3f} nats, {100 * part:+.1f} %, with "
        f"{replicas} replica{'s' * (replicas > 1)}{beside} and {used[0]['local_steps']} local steps; in steps by the "
        f"slope of AdamW's loss at 130M)"
    )
    sources = (*sources, published()["steps"]["muon"]["source"])
    return _beside_own(name, Evidence(grade, steps, own, (nats, part), sources, words), params)


def slope_of_adamw(params: int) -> Range:
    """Return the nats that AdamW's loss falls by e times the tokens at the smallest published size, and the range.

    The range holds the stretches between that size's numbers of tokens, and the mean slopes of the sizes next to the
    params: those of large models are flatter, and the same gap is more steps there.
    """
    sizes = published()["steps"]["muon"]["sizes"]
    curves = [[*zip(map(math.log, size["chinchilla"]), size["adamw"], strict=True)] for size in sizes]
    slopes = [_slope(*ends) for ends in pairwise(curves[0])]
    slopes += [_slope(curves[i][0], curves[i][-1]) for i in _around(params, [size["params"] for size in sizes])]
    return _slope(curves[0][0], curves[0][-1]), min(slopes), max(slopes)


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    return (start[1] - end[1]) / (end[0] - start[0])


def between(x: float, at: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at x on straight lines between points; beyond them it is that of the nearest one.

    >>> between(2.5, [1, 2, 3], [10, 20, 40]), between(9, [1, 2, 3], [10, 20, 40])
    (30.0, 40)
    """
    if x <= at[0]:
        return values[0]
    for i in range(1, len(at)):
        if x <= at[i]:
            share = (x - at[i - 1]) / (at[i] - at[i - 1])
            return values[i - 1] * (1 - share) + values[i] * share
    return values[-1]


def _around(x: float, at: Sequence[float]) -> list[int]:
    """Return the places of the points next to x, from which its value is made."""
    below = [i for i, point in enumerate(at) if point <= x * (1 + 1e-9)][-1:]
    above = [i for i, point in enumerate(at) if point >= x * (1 - 1e-9)][:1]
    return sorted({*below, *above})


def _is_near(params: int, at: Sequence[float]) -> bool:
    return any(1 / NEAR <= params / size <= NEAR for size in at)


def show_parts(values: Sequence[float]) -> str:
    """Spell a part of a whole in per cent, and the ends of its range, if it has one.

    >>> show_parts((0.39, 0.336, 0.454)), show_parts((0.0234,)), show_parts((0.8, 0.8, 0.8))
    ('39 % (34 to 45 %)', '2.3 %', '80 %')
    """
    mean, *ends = (f"{x:.2g}" if x < 9.95 else f"{int(x + 0.5)}" for x in (100 * v for v in values))
    return f"{mean} % ({' to '.join(ends)} %)" if len({*values}) > 1 else f"{mean} %"
