"""Names in back quotes exist: those in docstrings of fn/, and those of modules and files on the pages.

A name in a docstring has to be one of these:
- an argument or another name of the function or class that the docstring is in, a name that its module defines or
  imports, a member of a class that it imports from fn, or an argument in a signature, `(state, read) -> None`;
- a module of fn, seen from the package of the docstring's module or from one above it;
- a name of the API reference, a member or an argument of one, or an op;
- a word of Python or torch.

So a name of another module is written with that module: `feedback.classic`, where `classic` were not public.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import keyword
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_docs import documented
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import fn
from fn.kernels.reference import REFERENCES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "fn").rglob("*.py"))
}
QUOTED = r"(?<!`)`([^`\n]+)`(?!`)"
NAME = r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?"
SIGNATURE = r"\((\w+(?:, \w+)*)\) ->"
A_PATH = r"\w[\w.-]*(?:/[\w.-]+)+/?"
HAVE_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
OF_TORCH = (
    builtins,
    torch,
    torch.Tensor,
    torch.nn,
    torch.nn.utils,
    torch.optim,
    torch.optim.lr_scheduler,
    torch.optim.lr_scheduler.LinearLR,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    torch.amp.GradScaler,
    ShardedGradScaler,
    DistributedDataParallel,
    FSDPModule,
    fully_shard,
    dist,
    dist.ProcessGroup,
    dist.init_process_group,
)
"""What is known by its name alone, with its members and arguments, to those who use torch."""

INSTANCES = ("p", "model", "optimizer")
"""What docstrings call a parameter, a module and an optimizer, where they name a member of one."""


def members(thing: object) -> set[str]:
    """Return the attributes of a thing, and its arguments if it is called."""
    try:
        return {*dir(thing), *inspect.signature(thing).parameters}  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set(dir(thing))


@functools.cache
def words() -> set[str]:
    """Return what a docstring of any module may name."""
    public = documented()
    found = {*keyword.kwlist, *fn.__all__, *REFERENCES, *(name.rpartition(".")[2] for name in public)}
    found |= {thing.__name__ for thing in OF_TORCH}
    return found.union(*map(members, (*OF_TORCH, *map(pydoc.locate, public))))


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def names(node: ast.AST) -> set[str]:
    """Return every name that a piece of code uses, keys and other strings of one word too."""
    found = set()
    for x in ast.walk(node):
        match x:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case ast.Constant(value=str(text)) if text.isidentifier():
                found.add(text)
    return found


@functools.cache
def names_of_module(module: str) -> set[str]:
    """Return the names of a module's own level, the arguments of its functions, and members of classes it imports."""
    found = set()
    for node in tree(module).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found |= {name, *(x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg))}
            case ast.ImportFrom(module=str(source)) if source in FILES:
                imported = {alias.name for alias in node.names}
                classes = [x for x in tree(source).body if isinstance(x, ast.ClassDef) and x.name in imported]
                found |= names(node).union(*(members_of(x) for x in classes))
            case _:
                found |= names(node)
    return found


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the methods and the annotated fields of a class, those of its source alone."""
    methods = {x.name for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)}
    return methods | {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}


def docstrings(module: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each docstring of a module, those of its fields and constants too, with the names around it."""

    def below(node: ast.AST, around: set[str]) -> Iterator[tuple[str, set[str]]]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text, around | {name for found in re.findall(SIGNATURE, text) for name in found.split(", ")}
            yield from below(child, around | names(child) if isinstance(child, HAVE_SCOPES) else around)

    return below(tree(module), names_of_module(module))


def as_module(name: str, package: str) -> tuple[str, str]:
    """Return the longest module of fn that a name begins with, seen from a package, and what follows; or two ''."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        above = package
        while True:
            module = ".".join(filter(None, [above, *parts[:end]]))
            if module in FILES:
                return module, ".".join(parts[end:])
            if not above:
                break
            above = above.rpartition(".")[0]
    return "", ""


def exists(name: str, module: str, around: set[str]) -> bool:
    """Return whether a dotted name means something in a docstring of a module."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    target, rest = as_module(name, package)
    if target and (not rest or set(rest.split(".")) <= names_of_module(target)):
        return True
    head, _, rest = name.partition(".")
    if head == "fn":
        return is_public(name)
    if not rest:
        return name in around or name in words()
    if target and head not in {*around, *INSTANCES}:
        return False
    if head not in {*around, *words(), *INSTANCES}:
        return is_importable(name)
    return set(rest.split(".")) <= around | words() | names(tree(module)) or is_importable(name)


def is_public(name: str) -> bool:
    """Return whether a name that begins with `fn.` leads somewhere."""
    try:
        functools.reduce(getattr, name.split(".")[1:], fn)
    except AttributeError:
        return False
    return True


def is_importable(name: str) -> bool:
    """Return whether a name leads somewhere in a package that is installed."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            functools.reduce(getattr, parts[end:], importlib.import_module(".".join(parts[:end])))
        except (ImportError, AttributeError):
            continue
        return True
    return False


def is_path(name: str) -> bool:
    """Return whether a name with slashes is a file, a folder or a module, of the repository or of fn."""
    return any((folder / f"{name}{suffix}").exists() for folder in (ROOT, ROOT / "fn") for suffix in ("", ".py"))


def missing(module: str) -> list[str]:
    """Return what docstrings of a module name that does not exist."""
    found = []
    for text, around in docstrings(module):
        for quoted in re.findall(QUOTED, text):
            name = re.fullmatch(NAME, quoted)
            if name and not exists(name[1], module, around) and not (FILES[module].parent / quoted).exists():
                found.append(quoted)
            if re.fullmatch(A_PATH, quoted) and not is_path(quoted):
                found.append(quoted)
    return found


def test_every_name_in_a_docstring_exists():
    found = {str(path.relative_to(ROOT)): missing(module) for module, path in FILES.items()}
    assert {file: quoted for file, quoted in found.items() if quoted} == {}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_module_and_file_that_a_page_names_exists(page: Path):
    top = {path.name for path in ROOT.iterdir()}
    for quoted in re.findall(QUOTED, page.read_text()):
        name = re.fullmatch(NAME, quoted)
        if name and name[1].startswith("fn.contrib."):  # whoever deletes a method finds it on one page only
            assert page.name == "contrib.md", quoted
        elif name and name[1].startswith("fn."):
            assert exists(name[1], "fn", set()), quoted
        if re.fullmatch(A_PATH, quoted) and quoted.partition("/")[0] in top:
            assert is_path(quoted), quoted


@pytest.mark.parametrize(
    "name", ["layout", "rules.adamw", "fn.kernels.rules", "p.grad", "zero_dim", "fn.Optimizer.step"]
)
def test_names_that_exist_are_found(name: str):
    assert exists(name, "fn.kernels.reference", {"zero_dim"})


@pytest.mark.parametrize(
    "name",
    ["overlapped", "moments.adam", "fn.kernels.moments", "fn.kernels.rules.adam", "p.slope", "transforms.moments"],
)
def test_names_that_do_not_exist_are_not_found(name: str):
    assert not exists(name, "fn.kernels.reference", {"moments"})
    assert not is_path("kernels/gpu/triton/moments")
    assert is_path("kernels/gpu/triton/signs")
