"""The time to a loss: a tiny run trains, and is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import python

from benchmarks.links.time_to_loss_rank import BASE, METHODS
from benchmarks.links.time_to_loss_report import FULL, curve, key, reached

ROOT = Path(__file__).parents[2]

SMALL = ("--tiny", "--loopback", "--ranks", "2", "--steps", "60", "--looks", "20", "--short", "12")
SOME = (BASE, "DiLoCo, int8, late", "DiLoCo, 3 x the steps")


@pytest.mark.reliability
def test_methods_train_and_are_drawn(tmp_path: Path) -> None:
    out = ("--json", str(tmp_path / "x.json"), "--png", str(tmp_path / "x.png"))
    ended = python("-m", "benchmarks.links.time_to_loss", *SMALL, "--untuned", "--only", *SOME, *out, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    for name in SOME:
        seen = found["runs"][key(name, FULL)]["looks"]
        assert [look["step"] for look in seen] == [20 * i for i in range(1, 3 * METHODS[name].times + 1)]
        assert seen[-1]["loss"] < seen[0]["loss"]
        assert len(curve(found, name, "10 Mbit/s") or []) == len(seen)
    assert [row.method for row in reached(found, "1 Gbit/s")] == [*SOME]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
