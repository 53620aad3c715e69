"""Full names and paths in back quotes exist: in docstrings of fn/, and on the pages."""

from __future__ import annotations

import ast
import pydoc
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOTS = (ROOT, ROOT / "fn", ROOT / "tests")
TOP = {path.name for path in ROOT.iterdir()}
QUOTED = r"(?<!`)`([^`\n]+)`(?!`)"
NAME = r"(fn(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?"
A_PATH = r"\w[\w.-]*(?:/[\w.-]+)+/?"


def docstrings(path: Path) -> str:
    """Return the docstrings of a module, those of its fields and constants too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return "\n".join(
        x.value.value
        for x in nodes
        if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) and isinstance(x.value.value, str)
    )


def missing(text: str, folder: Path) -> list[str]:
    """Return the names that begin with `fn.`, and the paths of the repository or of a folder, that lead nowhere."""
    quoted = re.findall(QUOTED, text)
    names = [found[1] for found in (re.fullmatch(NAME, each) for each in quoted) if found]
    paths = [each for each in quoted if re.fullmatch(A_PATH, each)]
    return [name for name in names if pydoc.locate(name) is None] + [
        path
        for path in paths
        if (path.partition("/")[0] in TOP or folder != ROOT)
        and not any((where / f"{path}{end}").exists() for where in (*ROOTS, folder) for end in ("", ".py"))
    ]


def test_what_a_docstring_names_in_full_exists():
    found = {str(path): missing(docstrings(path), path.parent) for path in sorted((ROOT / "fn").rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_in_full_exists(page: Path):
    text = page.read_text()
    assert missing(text, ROOT) == []
    if page.name != "contrib.md":  # whoever deletes a method finds it on one page only
        assert re.findall(r"(?<!`)`fn\.contrib\.[^`\n]+`(?!`)", text) == []
