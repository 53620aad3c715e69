"""What `fn.contrib` promises: names that are found when used, files that import public names only."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import registry

import fn

HERE = Path(fn.__file__).parent / "contrib"
FILES = sorted(HERE.glob("_[a-z]*.py"))
PUBLIC = (
    "fn.base",
    "fn.errors",
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
def test_a_method_imports_names_without_an_underscore_of_fn_and_of_the_modules_for_writers(path: Path) -> None:
    """And none of another method, so that each can be deleted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(x.name == "fn" or not x.name.startswith("fn.") for x in node.names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fn":
            assert node.module == "fn" or str(node.module).startswith(PUBLIC), node.module
            assert not any(part.startswith("_") for x in node.names for part in (*str(node.module).split("."), x.name))
