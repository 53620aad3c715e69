"""What the documentation shows runs: the README's python blocks, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

import fn

README = Path(__file__).parent.parent / "README.md"
OPTIONAL = {"cupy", "deepspeed", "numba", "triton", "torch_npu", "intel_extension_for_pytorch", "mpi4py"}


def blocks() -> list[str]:
    """Return the README's ```python blocks, one after the other."""
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_readme_shows_python_and_all_of_it_runs_in_order(tmp_path):
    """All blocks in one file, as a reader goes through them, in a process as torchrun starts it."""
    assert len(blocks()) >= 4
    script = tmp_path / "readme.py"
    script.write_text("\n".join(f"# block {number + 1}\n{block}" for number, block in enumerate(blocks())))
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=README.parent,
        env={**os.environ, **torchrun, "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 0, run.stderr


def names() -> list[str]:
    return [
        "fn",
        *(info.name for info in pkgutil.walk_packages(fn.__path__, "fn.") if not info.name.endswith("__main__")),
    ]


def load(name: str):
    """Import a module; one that is for an optional package which is not installed may refuse."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{name} is for {error.name}, which is not installed")


@pytest.mark.parametrize("name", names())
def test_the_examples_in_docstrings_hold(name):
    result = doctest.testmod(load(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_doctests_of_the_core_are_found():
    """If the examples were lost, the test above would pass."""
    finder = doctest.DocTestFinder()
    for name in ("base", "schedules", "collectives.simulation", "collectives.ledger", "collectives.codecs.codec"):
        assert any(found.examples for found in finder.find(importlib.import_module(f"fn.{name}"))), name
