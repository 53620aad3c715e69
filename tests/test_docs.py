"""The pages of `docs/`: their python blocks run, their links lead somewhere, and what is made from code is current."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import LIMIT, run

import fn

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


RUNNING = [page for page in PAGES if blocks(page)]
LINKING = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"))]


def test_there_are_pages() -> None:
    assert {"adding.md", "choosing.md", "concepts.md", "leaving-deepspeed.md"} <= {page.name for page in RUNNING}
    assert len(blocks(ROOT / "docs" / "leaving-deepspeed.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_the_readme_leads_to_every_page(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()


def test_the_api_page_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("docs_api", ROOT / "docs" / "api.py")
    assert spec is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    text = api.page()
    assert "### `fn.onebit_adam`" in text
    assert text == api.PAGE.read_text(), "docs/api.md is out of date: run `make docs`, or `python docs/api.py`"


def test_what_other_pages_use_and_docstrings_refer_to_is_in_the_api_page() -> None:
    entries = set(re.findall(r"^### `(.*)`$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    used = {name for page in RUNNING for block in blocks(page) for name in re.findall(r"\bfn(?:\.\w+)+(?=\()", block)}
    assert "fn.tree.map" in used
    assert used - entries == set()
    assert {f"fn.collectives.hierarchy.{name}" for name in ("hops", "initial_errors")} <= entries


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=[page.name for page in RUNNING])
def test_all_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"# block {number + 1}\n{block}" for number, block in enumerate(blocks(page))))
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
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


READ = [ROOT / "README.md", *(page for page in PAGES if page.name != "api.md")]
"""What somebody reads from the beginning to the end."""


def test_the_readme_says_what_it_is_how_to_get_it_and_how_to_use_it_first() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Install",
        "Under DDP, two ways",
        "A pure loop",
        "Where it pays",
        "Methods",
        "What you can rely on",
        "A map of the house",
        "Read on",
        "Limits",
    ]


def test_the_map_of_the_house_names_what_is_there() -> None:
    named = set(re.findall(r"^fn/\S*", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {f"fn/{folder.parent.name}/" for folder in (ROOT / "fn").glob("*/__init__.py")} <= named
    assert all((ROOT / name).exists() for name in named)


def test_readme_and_pages_are_short_enough_to_be_read() -> None:
    assert sum(len(page.read_text().split()) for page in READ) <= 14_000


@pytest.mark.parametrize("page", READ, ids=[page.name for page in READ])
def test_no_cell_of_a_table_is_longer_than_a_sentence(page: Path) -> None:
    rows = [line for line in prose(page).splitlines() if line.startswith("|")]
    long = [cell.strip() for row in rows for cell in row.split("|") if len(cell.split()) > 25]
    assert not long, f"expected at most 25 words in a cell; write prose below the table for the rest: {long}"


def test_every_fault_has_a_test_that_exists() -> None:
    faults = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.endswith(".py` |")]
    assert len(faults) > 40
    for line in faults:
        (test,) = re.findall(r"`([\w/]+\.py)` \|$", line)
        assert (ROOT / "tests" / test).exists(), f"expected a test of tests/, but got {test}: {line}"
    assert len({line.split("|")[1] for line in faults}) == len(faults), "expected every fault in one row only"
