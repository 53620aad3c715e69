"""First sentences of docstrings, and errors, are read once and in a hurry: they say what a thing is in plain order.

No "of which", which asks the reader to look back; no ", too" and no ", say" behind what they are said of.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOUSE = Path(__file__).parents[2] / "fn"
BACKWARDS = re.compile(r"\bof which\b|, (?:too|say)(?=[,.;:)]|$)")


def first_sentences(module: ast.AST) -> Iterator[str]:
    """Yield the first sentence of every docstring, those below constants and fields included."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            paragraph = node.value.value.strip().partition("\n\n")[0]
            yield re.split(r"(?<=\.)\s", " ".join(paragraph.split()))[0]


def strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def makes_error(node: ast.AST) -> bool:
    """Return whether a node raises, makes an exception or words one, as `fn.errors.expected` does."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Raise) or called.endswith(("Error", "expected"))


def errors(module: ast.AST) -> Iterator[str]:
    """Yield the texts of errors, those that have a name first, as `cure = "..."`, included."""
    raised = [node for node in ast.walk(module) if makes_error(node)]
    names = {part.id for node in raised for part in ast.walk(node) if isinstance(part, ast.Name)}
    for node in raised:
        yield from strings(node)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            targets = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            if targets & names:
                yield from strings(node.value)


def said_backwards(source: str) -> list[str]:
    module = ast.parse(source)
    return sorted({text for text in (*first_sentences(module), *errors(module)) if BACKWARDS.search(text)})


def test_first_sentences_and_errors_are_in_plain_order() -> None:
    found = {str(path.relative_to(HOUSE)): said_backwards(path.read_text()) for path in sorted(HOUSE.rglob("*.py"))}
    assert {name: texts for name, texts in found.items() if texts} == {}
