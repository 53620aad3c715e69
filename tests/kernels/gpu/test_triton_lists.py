"""Steps on lists of tensors in the Triton row, in its interpreter, which a process of its own switches on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "scripts" / "triton_lists.py"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4),
        reason="Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses",
    ),
]


def interpret(*args: str | Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-W", "ignore::RuntimeWarning", *map(str, args)]
    found = subprocess.run(code, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_steps_layouts_numbers_and_sizes_of_every_kind_mean_what_the_reference_says():
    checks = "lists", "one_layout_is_not_the_other", "special_numbers", "whole_blocks"
    interpret(SCRIPT, *checks, "addresses", "no_elements", "known_answers")
