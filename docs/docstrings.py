"""A Sphinx extension that shows the docstrings of `fn`, which are plain text, as the API reference.

Backticks are code, and a public name links to its entry. `Args:`, `Raises:`, `Paper:` and the like become fields,
arguments the items of a list, and what stands four columns further in than the text around it is a block of code.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from typing import Any

import fn

LABELS = re.compile(r"(Args|Args and Raises|Returns|Raises|Paper|Differs|Not differentiable): ?(.*)")
NAMES = r"\*{0,2}\w+(?:, \*{0,2}\w+)*"
START = "\0"
"""Stands in front of a line that starts an argument."""


def rest(lines: list[str], names: frozenset[str] = frozenset()) -> list[str]:
    """Return a docstring in reST. names: the arguments, or the fields of a class."""
    out: list[str] = []
    for label, body in sections(lines, names):
        if label is None:
            out += blocks(body, 0, names)
        elif label in ("Args", "Attributes"):
            out += [f":{label}:", *indented(items(body, names)), ""]
        else:
            out += [f":{label}:", *indented(blocks(body, 4, names)), ""]
    return out


def sections(lines: list[str], names: frozenset[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Split lines where a label stands, or where text begins again behind what a label has indented."""
    label: str | None = None
    body: list[str] = []
    blank = True
    for line in lines:
        found = LABELS.fullmatch(line)
        field = re.match(rf"({NAMES}): ", line)
        if found:
            yield label, body
            label, body = found[1], [found[2]] if found[2] else []
        elif field and among(field[1], names) and (blank or label == "Attributes"):
            if label != "Attributes":
                yield label, body
                label, body = "Attributes", []
            body += [line]
        elif label and line[:1].strip() and (blank or label != "Attributes"):
            yield label, body
            label, body = None, [line]
        else:
            body += [line]
        blank = not line.strip()
    yield label, body


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Split lines where there are blank ones, and behind code that the next argument follows at once."""
    group: list[str] = []
    for line in [*lines, ""]:
        if group and (not line.strip() or margin(group) >= margin([line]) + 8):
            yield group
            group = []
        if line.strip():
            group += [line]


def margin(lines: list[str]) -> int:
    """Return by how many columns all lines are indented."""
    return min(len(line) - len(line.lstrip()) for line in lines)


def blocks(lines: list[str], base: int, names: frozenset[str]) -> list[str]:
    """Return paragraphs, with code at Python's prompt and where all lines stand at least four columns behind base."""
    out: list[str] = []
    for group in paragraphs(lines):
        is_code = margin(group) >= base + 4 or group[0].lstrip().startswith(">>>")
        out += code(group) if is_code else [inline(" ".join(map(str.strip, group)), names), ""]
    return out


def items(lines: list[str], names: frozenset[str]) -> list[str]:
    """Return arguments as a list. Each starts a line, or stands behind the end of a sentence in one."""
    item = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    out: list[str] = []
    for group in paragraphs(lines):
        if margin(group) >= item + 8:
            out += indented(code(group), 2)
            continue
        text = " ".join((START if margin([line]) == item else "") + line.strip() for line in group)
        for piece in split(text, names):
            found = re.match(rf"{START}?({NAMES}): (.*)", piece)
            if found:
                called = ", ".join(f"**{inline(name, names)}**" for name in found[1].split(", "))
                out += [f"* {called}: {inline(found[2], names)}", ""]
            else:
                out += indented([inline(piece.replace(START, ""), names), ""], 2 if out else 0)
    return out


def split(text: str, names: frozenset[str]) -> list[str]:
    """Split a paragraph in front of every argument."""
    cuts = [0]
    for found in re.finditer(rf"(?:{START}|(?<=[.?)] ))({NAMES}): ", text):
        if found[0].startswith(START) or among(found[1], names):
            cuts += [found.start()]
    pieces = (text[a:b].strip(" ") for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True))
    return [piece for piece in pieces if piece]


def among(listed: str, names: frozenset[str]) -> bool:
    """Return whether all names of a list, separated by commas, are among names."""
    return all(name.lstrip("*") in names for name in listed.split(", "))


def code(lines: list[str]) -> list[str]:
    """Return a block of code, of Python's prompt or of plain text."""
    language = "pycon" if lines[0].strip().startswith(">>>") else "text"
    return [f".. code-block:: {language}", "", *indented([line[margin(lines) :] for line in lines]), ""]


def inline(text: str, names: frozenset[str]) -> str:
    """Return text with code in place of what stands between backticks, and everything else as it is."""
    parts = re.split(r"`([^`]+)`", text.replace("\\", "\\\\"))
    out = re.sub(r"([*_|])", r"\\\1", parts[0])
    for quoted, plain in zip(parts[1::2], parts[2::2], strict=True):
        out += "\\ " * out[-1:].isalnum() + reference(quoted, names) + "\\ " * plain[:1].isalnum()
        out += re.sub(r"([*_|])", r"\\\1", plain)
    return out


def reference(quoted: str, names: frozenset[str]) -> str:
    """Return a link for a public name that is not an argument here, and code for anything else."""
    name = quoted.removesuffix("()").removeprefix("fn.")
    return f":py:obj:`{quoted} <fn.{name}>`" if name in set(fn.__all__) - names else f"``{quoted}``"


def indented(lines: list[str], columns: int = 4) -> list[str]:
    """Return lines further in."""
    return [" " * columns + line if line else line for line in lines]


def arguments(x: Any) -> frozenset[str]:
    """Return the names of what x is called with, or of its fields."""
    try:
        return frozenset(getattr(x, "_fields", None) or inspect.signature(x).parameters)
    except (TypeError, ValueError):
        return frozenset()


def process(app: Any, what: str, name: str, x: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place; Sphinx calls this for each."""
    lines[:] = rest(lines, arguments(x))


def skip(app: Any, what: str, name: str, x: Any, skipped: bool, options: Any) -> bool | None:
    """Show the members of an enum. Of other classes leave out what is no method, such as the fields of a tuple."""
    if isinstance(x, enum.Enum):
        return False
    return None if what != "class" or inspect.isroutine(x) or isinstance(x, property) else True


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
