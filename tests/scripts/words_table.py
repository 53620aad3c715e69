"""The table of words of docs/adding.md: which words a method may say of itself, who says them and who hears them.

    python tests/scripts/words_table.py        writes it anew, from the code; a test holds the page to it

Words are the fields of `fn.Roles`, `fn.Facts` and `fn.Transform`, what the class of a state declares beside its roles,
and what `fn.base.UpdateFn` lists for rules. Who says and who hears is read from the source, as no module that does
either has to be imported.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fn
from fn.base import UpdateFn

ROOT = Path(fn.__file__).parent
PAGE = ROOT.parent / "docs" / "adding.md"
BLOCK = re.compile(r"(<!-- table: words -->\n).*?(<!-- end -->)", re.DOTALL)

DECLARED = ("rank_local", "local_params")
FACTS, FIELDS, ROLES = fn.Facts._fields, fn.Transform._fields, fn.Roles._fields
OF_RULES = re.compile(r"^ {4}(\w+)(?:\(.*?\))? {2,}(.*(?:\n {20,}.*)*)", re.MULTILINE)
OF_FIELDS = re.compile(r"^((?:\w+, )*\w+): (.*(?:\n {4,}.*)*)", re.MULTILINE)

HELPERS = {
    "rank_local": DECLARED[:1], "has_local_params": DECLARED[1:], "check_same_params": DECLARED[1:],
    "agreed_of": DECLARED[1:], "is_shard": ("place",), "kinds": (*DECLARED, "errors", "place"), "name_of": ("name",),
    "inner_updates": ("inner",), "rules_in": ("inner",), "with_inner_updates": ("inner",),
    "update_in": FIELDS[1:4], "has_phase": FIELDS[1:4], "facts_of": ("facts",),
}  # fmt: skip
"""Functions that hear a word for whoever calls them."""
FINDERS = {"find", "replace", "_with_role", "count_of", "clip_late"}
"""Functions that are given a role."""
OF_TRANSFORM = re.compile(r"transform|^tx$|^whole$|^direction$|^then$|^inner$|^link$|^made$")


class Word(NamedTuple):
    """A word, the kind of what it belongs to, and what it says."""

    kind: str
    name: str
    text: str


def words() -> list[Word]:
    """Return all words, in the order in which the code lists them."""
    declared = {
        "rank_local": "fields that differ between ranks",
        "local_params": "whether params differ, too, or a function that returns those that all ranks agree on",
    }
    found = [Word("state", name, declared[name]) for name in DECLARED]
    for kind, owner in (("role", fn.Roles), ("fact", fn.Facts), ("transform", fn.Transform)):
        texts = {name: text for names, text in OF_FIELDS.findall(inspect.getdoc(owner)) for name in names.split(", ")}
        found += [Word(kind, name, texts[name]) for name in owner._fields]
    rules = OF_RULES.findall(inspect.getdoc(UpdateFn))
    return found + [Word("rule", name, text) for name, text in rules]


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def _strings(node: ast.AST) -> set[str]:
    return {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}


def _said(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the words, each with its kind, that a call or a class says."""
    if isinstance(node, ast.Call):
        name, given = _name(node), {keyword.arg: keyword for keyword in node.keywords if keyword.arg}
        places = next((i for i, x in enumerate(node.args) if isinstance(x, ast.Starred)), len(node.args))
        if name in ("declare", "Roles"):
            yield from (("role" if word in ROLES else "state", word) for word in given if word in ROLES + DECLARED)
        if name == "Facts" or (name == "_replace" and not given.keys() - {*FACTS}):
            yield from (("fact", word) for word in (*FACTS[: places if name == "Facts" else 0], *given))
        if name in ("Transform", "combine") or (name == "_replace" and not given.keys() - {*FIELDS}):
            places = places if name == "Transform" else 0
            yield from (("transform", word) for word in (*FIELDS[:places], *given) if word in FIELDS)
        if name == "declare_rule":
            yield from (("rule", word) for word in given)
    if isinstance(node, ast.ClassDef):
        made = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
        fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
        fields |= {x.id for y in node.body if isinstance(y, ast.Assign) for x in y.targets if isinstance(x, ast.Name)}
        yield from (("state", word) for word in DECLARED if word in made | fields)
        if "__call__" in made:
            yield from (("rule", word) for word in ("branches", "inner") if word in made | fields)


def _heard(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the words, each with its kind, that a statement or an expression asks for."""
    if isinstance(node, ast.Call):
        name = _name(node)
        for word in HELPERS.get(name, ()):
            kinds = {"role": ROLES, "state": DECLARED, "fact": FACTS, "transform": FIELDS}
            yield next((kind for kind, those in kinds.items() if word in those), "rule"), word
        if name in ("getattr", "hasattr") and ast.unparse(node.args[0]) in ("update", "rule", "inner", "body"):
            yield from (("rule", word) for word in _strings(node.args[1]))
    if isinstance(node, ast.stmt):
        heads = [getattr(node, part) for part in ("iter", "test") if hasattr(node, part)]  # without what is inside
        for head in heads if hasattr(node, "body") else [node]:
            if any(isinstance(x, ast.Call) and _name(x) in FINDERS for x in ast.walk(head)):
                yield from (("role", word) for word in _strings(head) & {*ROLES})
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if re.search(r"roles_of|^declared$", owner):
            yield "role", node.attr
        if re.search(r"facts|^one$", owner):
            yield "fact", {"averaged": "averages", "in_slices": "batched"}.get(node.attr, node.attr)
        if OF_TRANSFORM.search(owner):
            yield "transform", node.attr


def said_and_heard() -> tuple[dict[tuple[str, str], set[str]], dict[tuple[str, str], set[str]]]:
    """Return of each word, with its kind, the modules that say it and those that hear it."""
    said: dict[tuple[str, str], set[str]] = defaultdict(set)
    heard: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            for word in _said(node):
                said[word].add(module)
            for word in _heard(node):
                heard[word].add(module)
    return said, heard


def _cell(text: str) -> str:
    """Return what a word says, up to the end of its first clause."""
    text = re.split(r"[.;:](?:\s|$)", re.sub(r"\s+", " ", text), maxsplit=1)[0]
    return text.replace("|", "\\|")


def table() -> str:
    """Return the table in Markdown, a row for each word."""
    said, heard = said_and_heard()
    lines = ["| of | word | what it says | who says it | who hears it |", "|---|---|---|---|---|"]
    for kind, name, text in words():
        says, hears = (", ".join(sorted(found[kind, name])) for found in (said, heard))
        lines.append(f"| {kind} | `{name}` | {_cell(text)} | {says} | {hears} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with the table in its place."""
    return BLOCK.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
