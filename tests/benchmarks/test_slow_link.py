"""The slow-link benchmark, without its link: every contender steps on two ranks, and ours send what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

pytestmark = pytest.mark.reliability

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("slow_link")
    small = f"--loopback --model 1 32 2 --batch 1 --context 8 --rounds 2 --json {out}/x.json --png {out}/x.png"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.links.slow_link", *small.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    return {**json.loads((out / "x.json").read_text()), "printed": ended.stdout, "said": ended.stderr, "folder": out}


def rows(result):
    return result["rates"]["unthrottled"]["rows"]


def test_without_a_link_it_says_so(result):
    assert "no throttled link here" in result["said"]
    assert result["throttled"] is False
    assert set(result["rates"]) == {"unthrottled"}
    assert "No link was throttled" in result["printed"]


def test_ours_send_what_is_planned(result):
    sent = {row["name"]: (row["ledger"], row["planned"]) for row in rows(result) if row["name"].startswith("fn ")}
    assert len(sent) == 7
    for name, (counted, planned) in sent.items():
        assert counted == pytest.approx(planned, rel=1e-9), name
    assert all(planned > 0 for _, planned in sent.values())


def test_everything_is_in_the_table_and_the_picture(result):
    alone = next(row["seconds"] for row in rows(result) if row["name"] == "no communication")
    for row in rows(result):
        assert f"| {row['name']} |" in result["printed"]
        assert row["seconds"] > 0
        assert row["predicted"] > 0
        assert row["limit"] == alone  # without a rate the computation is the limit
    assert (result["folder"] / "x.png").read_bytes().startswith(b"\x89PNG")
