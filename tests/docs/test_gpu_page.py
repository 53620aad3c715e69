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


def test_what_the_page_of_fsdp_says_of_matrices_layer_by_layer_is_what_was_counted():
    rows, page = json.loads(gpu_table.COUNTS.read_text()), gpu_table.PAGE.with_name("fsdp.md").read_text()
    together, apart = (rows[f"muon on shards, warmup, {how}"] for how in ("one group", "layer by layer"))
    for name, row in {"all together": together, "layer by layer": apart}.items():
        assert f"| {name} | {row['launches']} | {row['collectives']} | {row['waits']} |\n" in page
