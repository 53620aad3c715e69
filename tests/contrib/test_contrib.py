"""What `fn.contrib` promises: names that are found when used, files that import public names only."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import registry

import fn
from fn.__main__ import main
from fn.planner import methods

ROOT = Path(fn.__file__).parents[1]
HERE = ROOT / "fn/contrib"
FILES = sorted(HERE.glob("_[a-z]*.py"))
PUBLIC = (
    "fn.base",
    "fn.arguments",
    "fn.errors",
    "fn.facts",
    "fn.roles",
    "fn.schedules",
    "fn.tree",
    "fn.kernels",
    "fn.collectives",
    "fn.transforms",
)
"""What docs/adding.md names for writers of methods, beside `fn` itself; packages with their modules."""


def test_every_file_is_a_method_of_its_name_that_the_registry_lists() -> None:
    assert {path.stem[1:] for path in FILES} <= {*dir(fn.contrib)}
    assert {path.stem[1:] for path in FILES} <= {named.name.partition(",")[0] for named in registry.CONTRIB}
    lists = [name for path in FILES for name in import_module(f"fn.contrib.{path.stem}").__all__]
    assert sorted(lists) == dir(fn.contrib), "two files list one name"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_method_is_one_file_whose_docstring_says_what_it_is_in_one_order(path: Path) -> None:
    """And its named optimizer, or link, takes at most 12 arguments."""
    made = getattr(fn.contrib, path.stem[1:])
    assert len(inspect.signature(made).parameters) <= 12
    words = ("Take it ", ">>> ", "Args:", "Returns:", "Raises:", "Paper:")
    places = [made.__doc__.find(word) for word in words]
    assert min(places) > 0, [word for word, place in zip(words, places, strict=True) if place < 0]
    assert places == sorted(places)
    assert len(path.read_text().splitlines()) <= 600


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"fn.contrib has no 'adamw'; it has "):
        fn.contrib.adamw  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'fn' has no attribute 'demo'"):
        fn.demo  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_method_has_a_paragraph_that_names_all_that_is_public_and_its_paper(path: Path) -> None:
    """The page alone names it, so that a paragraph whose method was deleted misleads, but fails nowhere."""
    page = (ROOT / "docs/contrib.md").read_text()
    (paragraph,) = [text for text in page.split("\n\n") if text.startswith(f"**`fn.contrib.{path.stem[1:]}`**")]
    names = import_module(f"fn.contrib.{path.stem}").__all__
    assert [name for name in names if not re.search(rf"`fn\.contrib\.{name}\b", paragraph)] == []
    paper = re.search(r"\d{4}\.\d{5}", getattr(fn.contrib, path.stem[1:]).__doc__.partition("Paper:")[2])
    assert paper is None or paper[0] in paragraph


@pytest.mark.parametrize("path", [*FILES, HERE / "metrics.py"], ids=lambda path: path.stem)
def test_a_file_imports_names_without_an_underscore_of_fn_and_of_the_modules_for_writers(path: Path) -> None:
    """And none of another method, so that each can be deleted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(x.name == "fn" or not x.name.startswith("fn.") for x in node.names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fn":
            assert node.module == "fn" or str(node.module).startswith(PUBLIC), node.module
            assert not any(part.startswith("_") for x in node.names for part in (*str(node.module).split("."), x.name))


def test_the_plan_shows_methods_of_contrib_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--params", "1e8", "--world", "4", "--inter", "1gbit", "--compute", "350ms"]
    shown = []
    for more in ([], ["--contrib"]):
        main([*line, *more])
        shown.append({row.split("  ")[0] for row in capsys.readouterr().out.splitlines()})
    rows = {row.name for row in methods.rows(contrib=True)} - {row.name for row in methods.rows()}
    assert not shown[0] & rows
    assert rows <= shown[1]
