"""A plan as a table, as JSON and as a picture."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fn.errors import expected
from fn.planner.network import Network, leaving
from fn.planner.predict import Plan, Prediction
from fn.planner.units import show_bytes, show_rate, show_seconds

TIMES = ("communication", "not hidden", "coding", "step", "x adamw")
HEAD = ("method", "topology", "rank sends", "inside a node", "node sends", "messages", *TIMES)


def describe(net: Network) -> str:
    """Return a line about a network."""
    if net.world == 1:
        return "1 rank, which has nobody to talk to"
    ranks = f"{net.world:,} ranks in {net.nodes:,} nodes of {net.per_node}" if net.nodes > 1 else f"{net.world} ranks"
    links = {"inside a node" if net.nodes > 1 else "between ranks": net.intra} if net.per_node > 1 else {}
    if net.nodes > 1:
        links["between nodes"] = net.inter
    texts = [f"{show_rate(link.cost.bandwidth)}, {show_seconds(link.cost.latency)} {at}" for at, link in links.items()]
    return f"{ranks}; {'; '.join(texts)}"


def table(plan: Plan, net: Network) -> str:
    """Return one line a prediction, the fastest first. Bytes and messages are of a step, in the mean."""
    base = plan.of("adamw").step
    rows = [HEAD, *(_row(prediction, base, net) for prediction in plan.predictions)]
    left_out = (3, 4) if net.nodes == 1 else (2,) if net.per_node > 1 else (2, 3)
    rows = [tuple(cell for place, cell in enumerate(row) if place not in left_out) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:], *([_COLUMNS] if net.nodes > 1 else [])])


_COLUMNS = """
Bytes and messages are of one step; of methods that exchange in few steps they are the mean. "inside a node" is what a
rank sends to others of its node, "node sends" what all ranks of a node send to other nodes."""


def _row(found: Prediction, base: float, net: Network) -> tuple[str, ...]:
    method = found.method
    out = sum(leaving(message, net) / steps for message, steps in method.sent)
    times = (found.communication, found.exposed, found.coding, found.step)
    return (
        method.title,
        method.topology,
        show_bytes(method.size),
        show_bytes(method.size - out / net.per_node),
        show_bytes(out),
        f"{sum(1 / steps for _, steps in method.sent):.3g}",
        *map(show_seconds, times),
        f"{base / found.step:.2f}",
    )


WARM_UP = 0.2
"""The part of a run that is taken for 1-bit Adam's warm-up."""


def about_warm_up(plan: Plan) -> str:
    """Say what 1-bit Adam's warm-up leaves of its gain, exact or in 8 bits: the table is of later steps."""
    base, in_bytes, after = (plan.of(name).step for name in ("adamw", "onebit_adam, int8", "onebit_adam"))

    def over_the_run(warm_up: float) -> str:
        return f"{base / (WARM_UP * warm_up + (1 - WARM_UP) * after):.2f}x"

    return (
        f"Steps are those after a warm-up, in which 1-bit methods send what adamw sends: onebit_adam is "
        f"{base / after:.2f}x as fast as adamw after it, {over_the_run(base)} over a run that it is "
        f"{100 * WARM_UP:.0f} % of, and {over_the_run(in_bytes)} with warmup=fn.int8()."
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's numbers: bytes, and seconds."""
    rows = [
        {
            "method": p.method.name,
            "alike": p.method.alike,
            "topology": p.method.topology,
            "bytes": p.method.size,
            "messages": sum(1 / steps for _, steps in p.method.sent),
            "communication": p.communication,
            "exposed": p.exposed,
            "coding": p.coding,
            "step": p.step,
            "limit": p.limit,
        }
        for p in plan.predictions
    ]
    return {"pays": plan.pays, "verdict": plan.verdict, "predictions": rows}


def check_paths(json: str | Path | None, png: str | Path | None, html: str | Path | None = None) -> None:
    """Refuse files that could not be written, before there is anything to write.

    Raises: OSError or ValueError that names the flag; ImportError if a picture is wanted and matplotlib not installed.
    """
    for flag, name in (("--json", json), ("--png", png), ("--html", html)):
        if name is None:
            continue
        path = Path(name)
        if path.is_dir():
            raise IsADirectoryError(f"{flag}: {str(name)!r}: Is a directory")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{flag}: {str(name)!r}: No such file or directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(f"{flag}: {str(name)!r}: Permission denied")
    if png is not None:
        _matplotlib()
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if Path(png).suffix[1:].lower() not in known:
            raise ValueError(expected("--png", f"a name that ends in {', '.join(known)}", f"{str(png)!r}"))


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--png needs matplotlib: pip install matplotlib") from error
    return matplotlib


def draw(plan: Plan, path: str | Path, title: str = "") -> None:
    """Write the steps as bars of computation, coding and exposed communication to a PNG.

    Raises: ImportError if matplotlib is not installed.
    """
    _matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.3 * len(plan.predictions)), layout="constrained")
    found: Sequence[Prediction] = plan.predictions[::-1]
    names = [f"{p.method.title} ({p.method.topology})" for p in found]
    left = [0.0] * len(found)
    parts = {"computation": "0.75", "coding": "C1", "communication, not hidden": "C3"}
    for (label, color), values in zip(
        parts.items(), ([p.compute for p in found], [p.coding for p in found], [p.exposed for p in found]), strict=True
    ):
        axes.barh(names, values, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]
    figure.suptitle(textwrap.fill(title, 130), fontsize="medium")
    axes.set(xlabel="seconds a step, predicted")
    axes.margins(y=0.02)
    axes.legend(loc="upper right")  # the fastest are at the top, and short
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
