"""docs/gpu.md: its table is what `gpu_counts.py` has counted, and nobody writes it by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import gpu_table


def test_the_table_of_the_page_is_that_of_its_counts():
    page, rows = gpu_table.PAGE.read_text(), json.loads(gpu_table.COUNTS.read_text())
    assert len(gpu_table.BLOCK.findall(page)) == 1
    assert gpu_table.with_table(page, rows) == page
    assert "python tests/scripts/gpu_counts.py --json docs/gpu_counts.json" in page
