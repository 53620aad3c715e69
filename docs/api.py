"""Write docs/api.md from the signatures and docstrings of the public names: `python docs/api.py`, or `make docs`."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import fn

PAGE = Path(__file__).with_name("api.md")

SECTIONS = (
    ("Types and composition", ("fn.base", "fn.phases", "fn.updates")),
    (
        "Named optimizers",
        ("fn.optimizers", "fn.local_optimizers", "fn.low_rank_optimizers", "fn.vote_optimizers"),
    ),
    ("Schedules", ("fn.schedules",)),
    ("Transforms", ("fn.transforms",)),
    (
        "Axes and exact collectives",
        ("fn.collectives.axis", "fn.collectives.simulation", "fn.collectives.primitives", "fn.collectives.ledger"),
    ),
    ("Codecs, feedback, compressed collectives", ("fn.collectives",)),
    ("Adapters", ("fn.adapters",)),
    ("Errors", ("fn.errors",)),
)
"""Headings, and the modules whose public names stand below them; the first that fits counts."""

_ADAPTERS = ("checkpoint", "drift", "metrics", "ddp", "fsdp", "deepspeed", "torchft")
MODULES = (
    "fn.tree",
    "fn.collectives.hierarchy",
    "fn.kernels",
    "fn.adapters",
    "fn.adapters.ddp",
    "fn.adapters.fsdp",
    "fn.adapters.checkpoint",
    "fn.adapters.drift",
    "fn.adapters.metrics",
    "fn.adapters.deepspeed",
    "fn.adapters.torchft",
)
"""Modules that are used by their own name, in sections of their own."""

PARTS = {"fn.collectives.hierarchy": ("hops", "initial_errors")}
"""Of these modules only what docstrings refer to: the rest stands above, or is for the collectives themselves."""


def page() -> str:
    """Return the text of the page."""
    lines = [
        "# API reference",
        "",
        "Made from the docstrings by `make docs`; `import fn`. Shapes: W ranks, n flat length, R rows.",
        "",
    ]
    left = {name: getattr(fn, name) for name in fn.__all__ if not inspect.ismodule(getattr(fn, name))}
    for title, modules in SECTIONS:
        own = {n: x for n, x in left.items() if x.__module__.startswith(modules)}
        left = {n: x for n, x in left.items() if n not in own}
        lines += [f"## {title}", "", *(line for name, x in own.items() for line in entry(f"fn.{name}", x))]
    if left:
        raise ValueError(f"SECTIONS: no section has the modules of {sorted(left)}")
    for name in MODULES:
        lines += [f"## `{name}`", "", *module_section(name)]
    return "\n".join(lines)


def module_section(name: str) -> list[str]:
    """Return the lines of a module that is used by its own name."""
    module = importlib.import_module(name)
    own = [n for n, x in vars(module).items() if not n.startswith("_") and getattr(x, "__module__", None) == name]
    names = PARTS.get(name) or getattr(module, "__all__", None) or own
    public = {n: getattr(module, n) for n in names if callable(getattr(module, n))}
    head = [summary(module), ""]
    return [*head, *(line for n in sorted(public) for line in entry(f"{name}.{n}", public[n]))]


def summary(module: Any) -> str:
    """Return the first paragraph of a module's docstring."""
    return " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())


def entry(name: str, x: Any) -> list[str]:
    """Return heading, signature and docstring of a function or class, and its methods in short."""
    doc = inspect.getdoc(x) or ""
    first, _, rest = doc.partition("\n")
    lines = [f"### `{name}`", "", "```py", signature(name, x), "```", "", first, ""]
    if rest.strip():
        lines += ["```text", *rest.strip("\n").split("\n"), "```", ""]
    return lines + methods(x)


def methods(x: Any) -> list[str]:
    """Return a line for each public method and property of a class."""
    if not inspect.isclass(x) or issubclass(x, enum.Enum):
        return []
    found = []
    for name, member in vars(x).items():
        f = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(f) or not f.__doc__:
            continue
        if f.__qualname__ != f"{x.__qualname__}.{name}":  # torch puts a wrapped `step` into every class of optimizers
            continue
        shown = name if isinstance(member, property) else signature(name, f)
        found.append(f"- `{' '.join(shown.split())}`: {f.__doc__.strip().splitlines()[0]}")
    return [*found, ""] if found else []


def signature(name: str, x: Any) -> str:
    """Return the name with its parameters as they are written, one a line where they are many."""
    if inspect.isclass(x) and issubclass(x, enum.Enum):
        return f"{name}: {' | '.join(member.name for member in x)}"
    if inspect.isclass(x) and issubclass(x, tuple):
        defaults = x._field_defaults
        fields = (f"{field}={defaults[field]!r}" if field in defaults else field for field in x._fields)
        return f"{name}({', '.join(fields)})"
    called = x.__call__ if getattr(x, "_is_protocol", False) else x
    text = (name + str(inspect.signature(called))).replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"'([^']*)'", r"\1", text)
    if len(text) <= 110:
        return text
    body, _, result = text[len(name) + 1 :].rpartition(")")
    parts = re.split(r", (?=\*?\*?\w+(?::|=|,|$)|\*,|/,|/$)", body)
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


if __name__ == "__main__":
    PAGE.write_text(page())
