"""Every module of `benchmarks` finds what it imports: most of them are run by hand, months apart."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.gpu.parts import FOLDERS

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
]


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_finds_what_it_imports(name, monkeypatch):
    for folder in FOLDERS:  # where parts of `benchmarks/gpu.py` have their checks
        monkeypatch.syspath_prepend(folder)
    import_module(name)
