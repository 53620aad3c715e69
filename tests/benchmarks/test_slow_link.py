"""The slow-link benchmark, without its link: every contender steps on two ranks, and ours send what is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import python

pytestmark = pytest.mark.reliability

ROOT = Path(__file__).parents[2]


def test_every_contender_is_in_the_table_and_ours_send_what_is_planned(tmp_path):
    small = (
        f"--loopback --model 1 32 2 --batch 1 --context 8 --rounds 2 --json {tmp_path}/x.json --png {tmp_path}/x.png"
    )
    ended = python("-m", "benchmarks.links.slow_link", *small.split(), cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "x.json").read_text())["rates"]["unthrottled"]["rows"]
    alone = next(row["seconds"] for row in rows if row["name"] == "no communication")
    for row in rows:
        assert f"| {row['name']} |" in ended.stdout
        assert row["seconds"] > 0
        assert row["predicted"] > 0
        assert row["limit"] == alone  # without a rate the computation is the limit
    ours = [row for row in rows if row["name"].startswith("fn ")]
    assert len(ours) == 7
    for row in ours:
        assert row["ledger"] == pytest.approx(row["planned"], rel=1e-9), row["name"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
