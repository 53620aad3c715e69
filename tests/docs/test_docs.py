"""The pages of `docs/`: their python blocks run, links lead somewhere, and the API reference has every public name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import pydoc
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from ranks import python, run

import fn

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
API = sorted((ROOT / "docs" / "api").glob("*.md"))
MODULES = (
    "fn.tree",
    "fn.kernels",
    "fn.adapters",
    "fn.adapters.ddp",
    "fn.adapters.fsdp",
    "fn.adapters.checkpoint",
    "fn.adapters.drift",
    "fn.adapters.follow",
    "fn.adapters.deepspeed",
    "fn.adapters.torchft",
    "fn.adapters.trainers.hf",
    "fn.adapters.trainers.accelerate",
    "fn.adapters.trainers.lightning",
    "fn.contrib.metrics",
    "fn.testing.world",
)
"""Modules that are used by their own name."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


RUNNING = [page for page in PAGES if blocks(page)]
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
LINKING = [*PAGES, *API, *(ROOT / name for name in OTHERS)]


def test_there_are_pages() -> None:
    assert {"adding.md", "choosing.md", "concepts.md", "leaving-deepspeed.md"} <= {page.name for page in RUNNING}
    assert len(blocks(ROOT / "docs" / "leaving-deepspeed.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_the_readme_leads_to_every_page(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()


def documented() -> list[str]:
    """Return what the pages of the API reference show, of modules that are shown as a whole all public names."""
    found = []
    for page in API:
        for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)", page.read_text(), re.MULTILINE):
            found += public(importlib.import_module(name)) if kind == "module" else [name]
    return found


def public(module: ModuleType) -> list[str]:
    """Return the public names of a module, those that autodoc shows: without `__all__`, what it defines itself."""
    name = module.__name__
    own = [n for n, x in vars(module).items() if n[0] != "_" and getattr(x, "__module__", None) == name]
    return [f"{name}.{n}" for n in getattr(module, "__all__", own) if callable(getattr(module, n))]


def test_every_public_name_stands_once_in_the_api_reference() -> None:
    found = documented()
    assert len(found) == len(set(found))
    names = {f"fn.{name}" for name in fn.__all__ if callable(getattr(fn, name))}
    assert names == {name for name in found if name.count(".") == 1}
    for module in MODULES:
        assert set(public(importlib.import_module(module))) <= set(found), module


def test_everything_in_the_api_reference_has_a_docstring() -> None:
    missing = [name for name in documented() if not inspect.getdoc(pydoc.locate(name))]
    assert not missing


def test_what_other_pages_use_and_docstrings_refer_to_is_in_the_api_reference() -> None:
    used = {name for page in RUNNING for block in blocks(page) for name in re.findall(r"\bfn(?:\.\w+)+(?=\()", block)}
    assert "fn.tree.map" in used
    assert used - set(documented()) == set()
    assert {f"fn.collectives.hierarchy.{name}" for name in ("hops", "initial_errors")} <= set(documented())


def test_newcomers_find_the_named_optimizers_first_and_every_page_of_the_reference() -> None:
    links = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "api" / "index.md").read_text())
    assert links[0] == "optimizers.md"
    assert sorted(["index.md", *links]) == [page.name for page in API]


def test_every_page_stands_in_the_menu_of_the_site() -> None:
    menu = re.findall(r"^[\w./-]+$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert {page.stem for page in PAGES} - {"index"} <= set(menu)
    assert {"api/index", "../benchmarks/README", "../CHANGELOG", "../CONTRIBUTING"} <= set(menu)


DOCSTRING = """Send `x`, as `int8()` does.

    y = x * x

Args:
    x: (n,), see `fn.int4`. lazy: later,
        or never: for the `x`s.

            z = 2 x
    **more: for `sign`.
Raises: ValueError if
    `sign` is None.

>>> 1 + 1
2
"""

IN_REST = """Send ``x``, as :py:obj:`int8() <fn.int8>` does.

.. code-block:: text

    y = x * x

:Args:
    * **x**: (n,), see :py:obj:`fn.int4 <fn.int4>`.

    * **lazy**: later, or never: for the ``x``\\ s.

      .. code-block:: text

          z = 2 x

    * **\\*\\*more**: for ``sign``.


:Raises:
    ValueError if ``sign`` is None.


.. code-block:: pycon

    >>> 1 + 1
    2
"""


def test_docstrings_become_paragraphs_lists_links_and_blocks_of_code() -> None:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    names = frozenset({"x", "lazy", "sign", "more"})
    assert "\n".join(docstrings.rest(DOCSTRING.splitlines(), names)).strip() == IN_REST.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=[page.name for page in RUNNING])
def test_all_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"# block {number + 1}\n{block}" for number, block in enumerate(blocks(page))))
    ended = python("-W", "error::UserWarning", str(script), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def watched(optimizer: str) -> list[str]:
    """Return what the page about choosing prints on this rank, with an optimizer and data of its own."""
    (block,) = blocks(ROOT / "docs" / "choosing.md")
    block = block.replace("for _", f"torch.manual_seed({dist.get_rank()})\nfor _")
    with fn.bind({"data": dist.group.WORLD}), redirect_stdout(io.StringIO()) as out:
        exec(block.replace("fn.onebit_adam", optimizer), {})
    return out.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["fn.onebit_adam", "fn.loco_adamw"])
def test_the_norm_of_the_errors_to_watch_is_there_for_errors_in_8_bits_too(optimizer: str) -> None:
    for warm_up, compressed in run(2, watched, optimizer):
        assert warm_up.endswith("WARMUP 0 None")
        assert float(compressed.rpartition("COMPRESSED 0 ")[2]) > 0


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page in links to them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=[str(page.relative_to(ROOT)) for page in LINKING])
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose(page)):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_the_readme_is_short_and_says_first_how_to_get_it() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "Install"


def test_what_cites_the_version_and_lists_its_changes_is_about_this_version() -> None:
    assert f"\nversion: {fn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == fn.__version__


def test_the_map_of_the_house_names_what_is_there() -> None:
    named = set(re.findall(r"^fn/\S*", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {f"fn/{folder.parent.name}/" for folder in (ROOT / "fn").glob("*/__init__.py")} <= named
    assert all((ROOT / name).exists() for name in named)
    to_read = re.findall(r"`((?:\w+/)*\w+\.py)`", (ROOT / "README.md").read_text())
    assert "transforms/adam.py" in to_read
    assert [name for name in to_read if not (ROOT / "fn" / name).exists() and not (ROOT / name).exists()] == []


def test_every_fault_has_a_test_that_exists() -> None:
    faults = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.endswith(".py` |")]
    assert len(faults) > 40
    for line in faults:
        (test,) = re.findall(r"`([\w/]+\.py)` \|$", line)
        assert (ROOT / "tests" / test).exists(), f"expected a test of tests/, but got {test}: {line}"
    assert len({line.split("|")[1] for line in faults}) == len(faults), "expected every fault in one row only"
