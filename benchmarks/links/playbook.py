"""Tables of docs/choosing.md: what to take for a link, a model and a step, predicted, and one step of the grid.

`report.py` writes them into the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.links import grid_report
from benchmarks.links.grid_methods import DDP
from benchmarks.measure import markdown
from fn.planner import traffic
from fn.planner.efficiency import over_tcp
from fn.planner.methods import method, rows
from fn.planner.network import Cost, Link, network
from fn.planner.predict import Prediction, Rates, predict
from fn.planner.units import show_seconds

MACHINES = 4
LINKS = {
    "20 Mbit/s, 40 ms: between sites": Cost(40e-3, 2e7),
    "200 Mbit/s, 2 ms: Wi-Fi, a fast line": Cost(2e-3, 2e8),
    "1 Gbit/s, 100 µs: Ethernet": Cost(1e-4, 1e9),
    "10 Gbit/s, 30 µs: Ethernet": Cost(3e-5, 1e10),
}
SIZES = {"10 M": 10_000_000, "124 M": 124_000_000, "1.3 B": 1_300_000_000}
STEPS = (0.3, 1.0, 10.0)
"""Seconds of computation in a step."""

MEMORY = 4e12
"""Bit/s of the memory of a consumer's graphics card, from which the seconds of coding are estimated."""

ROUNDS = (32, 100, 320, 1000)
"""Steps of a round that are tried, from the shortest."""

ENOUGH = 1.25
"""A method is fast enough if its step is at most so many times the computation."""


class Take(NamedTuple):
    """A method that the page may name. name: on the page. row: the planner's. rounds: steps of a round, or None."""

    name: str
    row: str
    rounds: int | None = None


TAKES = (
    Take("AdamW", "adamw"),
    Take("bf16", "bf16 gradients"),
    Take("int4", "adamw, int4 gradients"),
    Take("sign_muon", "sign_muon"),
    *(Take(f"DiLoCo, H = {h}", "diloco, int8, delayed", h) for h in ROUNDS),
    Take(f"DiLoCo, H = {ROUNDS[-1]}, late", "diloco, int8, late", ROUNDS[-1]),
)
"""From what changes least of what is learned to what changes most; the first that is fast enough is taken."""


def predictions(cost: Cost, params: int, compute: float) -> Iterator[tuple[Take, Prediction]]:
    """Yield each method's predicted step, in their order."""
    link = Link(cost, efficiency=over_tcp())
    shapes, net = traffic.model(params), network(MACHINES, 1, link, link)
    for take in TAKES:
        table = rows() if take.rounds is None else rows(local_steps=take.rounds)
        own = method(next(row for row in table if row.name == take.row), shapes, MACHINES)
        yield take, predict(own, net, compute, 8 * own.passes * params / MEMORY, Rates(MEMORY).own(own))


def choice(cost: Cost, params: int, compute: float) -> tuple[Take, Prediction, float]:
    """Return what to take, its step, and how many times as fast it is as AdamW in float32."""
    every = list(predictions(cost, params, compute))
    take, found = next((pair for pair in every if pair[1].step <= ENOUGH * compute), every[-1])
    return take, found, every[0][1].step / found.step


def table() -> str:
    """Return a table for each link: what to take for a model's size and a step's computation."""
    parts = []
    for title, cost in LINKS.items():
        lines = []
        for size, params in SIZES.items():
            cells = []
            for compute in STEPS:
                take, found, times = choice(cost, params, compute)
                gain = f", {times:,.0f}x" if times >= 9.5 else f", {times:.1f}x" if times >= 1.05 else ""
                cells.append(f"{take.name}: {show_seconds(found.step)}{gain}")
            lines.append([size, *cells])
        head = " | ".join(["parameters", *(f"a step computes {show_seconds(compute)}" for compute in STEPS)])
        parts += [f"**{title}**", markdown(head, lines)]
    return "\n\n".join(parts)


SHOWN = "200 Mbit/s"
"""The link of a sentence."""


def headline(result: dict[str, Any]) -> str:
    """Return the sentence of the page: seconds a step on one of the grid's links."""
    here = {cell.step.method: cell for cell in grid_report.cells(result) if (cell.ranks, cell.rate) == (2, SHOWN)}
    ddp, half, four, one, late = (
        f"{here[name].step.seconds:.2g}"
        for name in (DDP, "DDP bf16", "int4 gradients", "1-bit Adam, overlapped", "DiLoCo, int8, late")
    )
    alone = f"{here[DDP].alone.seconds:.2g}"
    return (
        f"With GPT-2's 124 million and a wait in place of a GPU, a step over {SHOWN} takes {ddp} s under DDP, {half} s "
        f"in bf16, {four} s with int4 gradients, {one} s with 1-bit Adam of one scale a tensor behind the backward "
        f"pass, {late} s with late means of DiLoCo in int8, and {alone} s alone."
    )
