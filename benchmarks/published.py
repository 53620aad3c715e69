"""What README and docs say of steps and time to the same loss: the planner's numbers, published ones and our own.

    python -m benchmarks.published --png docs/picks.png    # the picture; python benchmarks/report.py writes the tables
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.measure import markdown
from fn.planner import traffic
from fn.planner.efficiency import over_tcp
from fn.planner.evidence import SMALL, evidence, published, show_parts
from fn.planner.methods import methods
from fn.planner.network import Cost, Link, network
from fn.planner.predict import Plan, plan
from fn.planner.recommend import EXACT_MUON, PICKS, Candidate, Recommendation, expected_time, recommend
from fn.planner.units import show_seconds

MACHINES, SPEED, MODEL, COMPUTE, MEMORY = 8, 1e9, 124_000_000, 0.3, 4e12
"""Of the picture: GPT-2's smallest, on consumers' graphics cards behind links of 1 Gbit/s."""

SIZES = (124_000_000, 1_300_000_000, 7_000_000_000)


def picture() -> tuple[Plan, Recommendation]:
    """Return the plan that the picture shows."""
    link = Link(Cost(1e-4, SPEED), efficiency=over_tcp())
    net = network(MACHINES, 1, link, link)
    made = plan(methods(traffic.model(MODEL), net), net, COMPUTE, MODEL, memory=MEMORY)
    return made, recommend(made)


def headline() -> str:
    """Return the README's sentence about a step."""
    made, said = picture()
    base, first = made.of("adamw"), said.picks[0]
    return (
        f"On {MACHINES} machines with 1 Gbit/s a step of {MODEL / 1e6:.0f} million parameters takes "
        f"{show_seconds(base.step)} under DDP, {show_seconds(base.exposed)} of it waiting, and "
        f"{show_seconds(first.prediction.step)} with gradients in 4 bits."
    )


def table() -> str:
    """Return the steps of exact Muon and of the picks at some sizes, with the grades of what is known."""
    lines = []
    for pick in (EXACT_MUON, *PICKS):
        known = [evidence(pick.name, n, replicas=MACHINES, local_steps=30) for n in SIZES]
        cells = [f"{show_parts(each.steps)}, {each.grade}" if each.steps else each.grade for each in known]
        lines.append([pick.name, *cells])
    return markdown(f"steps over AdamW's | {' | '.join(f'{n / 1e6:,.0f} M' for n in SIZES)}", lines)


def losses() -> str:
    """Return the published losses of MuLoCo and DiLoCo over data-parallel AdamW's."""
    (muloco,) = (each for each in published()["losses"] if each["method"] == "muloco")
    lines = []
    for n, loss in zip(muloco["params"], muloco["adamw"], strict=True):
        cells = []
        for name, replicas in (("muloco, int8", 1), ("muloco, int8", 16), ("diloco, int8", 16)):
            gap = evidence(name, n, replicas=replicas, local_steps=30).gap
            assert gap is not None, f"{name} has no loss at {n}"
            cells.append(f"{gap[0]:+.3f}, {100 * gap[1]:+.1f} %")
        lines.append([f"{n / 1e6:,.0f} M", f"{loss:.3f}", *cells])
    return markdown("parameters | data parallel, AdamW | MuLoCo, K = 1 | MuLoCo, K = 16 | DiLoCo, K = 16", lines)


def points() -> Iterator[tuple[str, tuple[float, ...], str]]:
    """Yield the rows of the picture: a name, the time to AdamW's loss over AdamW's with its range, and the mark."""
    _, said = picture()
    yield "AdamW under DDP", (1.0,), "published"
    for c in (said.exact, *said.picks):
        name = "exact Muon under DDP" if c is said.exact else c.name
        mark = "published" if c.evidence.grade != SMALL else "borrowed" if c.evidence.steps else "own"
        yield name, _time(c), mark


def _time(c: Candidate) -> tuple[float, ...]:
    own = c.evidence.own
    return c.time or ((expected_time(c),) if own is None else tuple(x * c.share for x in own))


MARKS = {
    "published": ("o", "full", "published steps of the method"),
    "borrowed": ("o", "none", "exact Muon's published steps, of votes no published run"),
    "own": ("s", "none", "our runs of 0.13 million parameters"),
}


def draw(path: Path) -> None:
    """Draw the time to AdamW's loss of exact Muon and of the picks, as the planner says it for one network."""
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    seen = set()
    rows = [*points()]
    for place, (name, (mean, *ends), mark) in enumerate(reversed(rows)):
        marker, fill, text = MARKS[mark]
        low, high = ends or (mean, mean)
        color = "black" if name.endswith("DDP") else "C0"
        axes.plot([100 * low, 100 * high], [place, place], color=color, lw=1.5)
        axes.plot(
            100 * mean, place, marker, fillstyle=fill, color=color, ms=8, label="" if mark in seen else text,
            markerfacecolor=None if fill == "full" else "white",
        )  # fmt: skip
        seen.add(mark)
        axes.annotate(show_parts((mean, *ends)), (100 * high, place), (10, 0), textcoords="offset points", va="center")
    axes.set(
        xscale="log", xlabel=f"time to AdamW's loss, % of AdamW's under DDP: predicted for {MODEL / 1e6:.0f} million "
        f"parameters\non {MACHINES} machines with 1 Gbit/s, {show_seconds(COMPUTE)} of computation a step",
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
    axes.margins(x=0.15, y=0.08)
    axes.set_xlim(right=400)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g} %")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", fontsize="small", ncols=3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, metavar="FILE", required=True)
    draw(parser.parse_args().png)


if __name__ == "__main__":
    main()
