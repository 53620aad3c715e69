"""Every sentence in which a docstring says `Differs:` is quoted by a test that shows the difference, and no other is.

A test quotes a sentence in its own docstring, behind the full name of what it is said of:

    Differs: fn.collectives.codecs.sign.sign: padding is neither counted nor given an error; in the authors' code, and
        in DeepSpeed's, it is both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
HOUSE = TESTS.parent / "fn"


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the full name and the docstring of every module, class and function below a folder."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield name, ast.get_docstring(node) or ""
        for child in ast.iter_child_nodes(node):
            yield from inside(child, f"{name}.{child.name}" if hasattr(child, "name") else name)

    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        yield from inside(ast.parse(path.read_text()), module)


def differences(docstring: str) -> list[str]:
    """Return the paragraphs that begin with `Differs:`, each on one line."""
    found = re.findall(r"^Differs: (.*(?:\n +.*)*)", docstring, re.MULTILINE)
    return [" ".join(text.split()) for text in found]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) (?=[A-Z`])", text)


def said() -> set[tuple[str, str]]:
    return {(name, s) for name, doc in docstrings(HOUSE) for text in differences(doc) for s in sentences(text)}


def shown() -> set[tuple[str, str]]:
    """Return what tests quote: the name up to the first colon, then sentences."""
    quotes = [
        text.partition(": ")[::2]
        for name, doc in docstrings(TESTS)
        if name.rpartition(".")[2].startswith("test_") and name != "tests.docs.test_differs"
        for text in differences(doc)
    ]
    return {(name, s) for name, text in quotes for s in sentences(text)}


def test_every_difference_is_shown_by_a_test_and_every_quote_is_current():
    not_shown = [f"{name}: {s}" for name, s in sorted(said() - shown())]
    assert not not_shown, "no test quotes these sentences:\n" + "\n".join(not_shown)
    not_said = [f"{name}: {s}" for name, s in sorted(shown() - said())]
    assert not not_said, "tests quote what no docstring says:\n" + "\n".join(not_said)
