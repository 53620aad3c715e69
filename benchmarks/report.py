"""Writes the tables of benchmarks/README.md anew, from the JSON that lies beside it. Everything around them stays.

    python benchmarks/report.py

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`. Tables without such comments are figures
whose JSON was not kept; the page names their commits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import against
import atlas_summary
import deep_atlas
import max_step

HERE = Path(__file__).parent
PAGE = HERE / "README.md"

BLOCK = re.compile(r"(<!-- table: (.+?) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def tables() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each table, and what makes it."""
    rows = json.loads((HERE / "atlas.json").read_text())["rows"]
    for task, workers, steps in dict.fromkeys((row["task"], row["workers"], row["steps"]) for row in rows):
        found = atlas_summary.summary(rows, task, workers, steps)
        yield f"{task}, {workers} workers", partial(atlas_summary.table, found)
    yield "deep atlas", partial(deep_atlas.table, deep_atlas.read(HERE / "deep_atlas"))
    against_commit = json.loads((HERE / "against.json").read_text())
    yield "against", partial(against.table, against_commit)
    yield "max_step", partial(max_step.table, json.loads((HERE / "max_step.json").read_text()))


def renewed(page: str) -> str:
    """Return the page with its tables made anew. Raises: KeyError for a table that no file has."""
    makers = dict(tables())
    return BLOCK.sub(lambda block: block[1] + makers[block[2]]() + block[3], page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
