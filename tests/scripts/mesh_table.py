"""The table of docs/fsdp.md: which methods of whole matrices run on which meshes, exactly and in codes.

    python tests/scripts/mesh_table.py        writes it anew, from what the tests run; a test holds the page to it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mesh_cells import MESHES, METHODS

import fn

PAGE = Path(fn.__file__).parents[1] / "docs" / "fsdp.md"
BLOCK = re.compile(r"(<!-- table: meshes -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """Return the table in Markdown, two rows for each method."""
    lines = [f"| method | form | {' | '.join(MESHES)} |", "|---" * (2 + len(MESHES)) + "|"]
    for name, method in METHODS.items():
        for form in ("exact", "int8"):
            cell = getattr(method, form)
            cells = " | ".join([cell if isinstance(cell, str) else "runs"] * len(MESHES))
            lines.append(f"| `{name}` | {form} | {cells} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with the table in its place."""
    return BLOCK.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
