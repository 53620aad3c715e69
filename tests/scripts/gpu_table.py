"""The table of docs/gpu.md: written by `gpu_counts.py --json`, from what it has counted, and held to that by a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
COUNTS = PAGE.with_name("gpu_counts.json")
BLOCK = re.compile(r"(<!-- table: counts -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ("step", "launches", "host waits", "collectives", "bytes a parameter")

Rows = dict[str, dict[str, Any]]
"""Step -> launches, waits, collectives, bytes."""


def table(rows: Rows) -> str:
    """Return the table in Markdown, a row for each step."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for step, row in rows.items():
        lines.append(f"| {step} | {row['launches']} | {row['waits']} | {row['collectives']} | {row['bytes']:.1f} |")
    return "\n".join(lines)


def with_table(page: str, rows: Rows) -> str:
    """Return the page with the table in its place."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(rows)}\n{found[2]}", page)


def write(counts: Path, found: Rows, steps: list[str]) -> None:
    """Write counts, those that were not counted now as they were, and the page if they are its own.

    Args: steps: all of them, in order.
    """
    known = json.loads(counts.read_text()) if counts.exists() else {}
    rows = {step: {**known, **found}[step] for step in steps if step in known or step in found}
    counts.write_text(json.dumps(rows, indent=1) + "\n")
    if counts.resolve() == COUNTS:
        PAGE.write_text(with_table(PAGE.read_text(), rows))
