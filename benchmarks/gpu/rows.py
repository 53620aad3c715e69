"""What the checks of `gpu.py` say: rows with a value, what was wanted, and whether it was met; and their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

ON_CPU = "not judged on cpu"


class Options(NamedTuple):
    """What the checks are told.

    device: to run on. quick: small sizes, to try the script itself. elements: of the vectors of `kernels`. layers,
    width, vocabulary: of the model of `step`. rounds: of interleaved timing. write: what `sweep` finds into the table.
    """

    device: str = "cuda"
    quick: bool = False
    elements: int = 1 << 28
    layers: int = 24
    width: int = 2048
    vocabulary: int = 50257
    rounds: int = 15
    write: bool = False

    @property
    def torch_device(self) -> torch.device:
        """The device as torch has it."""
        return torch.device(self.device)

    @property
    def judges_speed(self) -> bool:
        """Whether speed and memory are held against the limits: on a CPU they are not."""
        return self.torch_device.type != "cpu"


class Row(NamedTuple):
    """One line of the table. ok: None where nothing was to be met, or nothing could be said; note says why."""

    name: str
    value: float | None = None
    unit: str = ""
    wanted: str = ""
    ok: bool | None = None
    note: str = ""


Check = Callable[[], Iterable[Row]]
Checks = Mapping[str, Check]
"""Checks by name, in the order in which they run. Each runs alone: what it raises is its own fault."""


def at_most(options: Options, name: str, value: float, limit: float, unit: str, note: str = "") -> Row:
    """Return a row whose value may not be larger than a limit."""
    return _judged(options, Row(name, value, unit, f"<= {limit:g}", value <= limit, note))


def at_least(options: Options, name: str, value: float, limit: float, unit: str, note: str = "") -> Row:
    """Return a row whose value may not be smaller than a limit."""
    return _judged(options, Row(name, value, unit, f">= {limit:g}", value >= limit, note))


def _judged(options: Options, row: Row) -> Row:
    return row if options.judges_speed else row._replace(ok=None, note=ON_CPU)


def outcome(name: str, fault: str | None) -> Row:
    """Return a row of what is right or wrong on any device. fault: what is wrong, or None."""
    return Row(name, wanted="right", ok=fault is None, note=fault or "")


def skipped(name: str, reason: str) -> Row:
    """Return a row of what could not be looked at."""
    return Row(name, note=f"skipped: {reason}")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as Markdown; what failed stands out."""
    lines = ["| part | what | value | wanted | met | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        value = "" if row["value"] is None else f"{row['value']:.4g} {row['unit']}".strip()
        met = {None: "-", True: "yes", False: "**NO**"}[row["ok"]]
        note = row["note"].strip().splitlines()
        cells = (row["part"], row["name"], value, row["wanted"], met, note[-1].replace("|", "/") if note else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
