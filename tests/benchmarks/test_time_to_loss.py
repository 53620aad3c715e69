"""The time to a loss: where a curve reaches it, what is computed from timed steps, and a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import python

from benchmarks.links import time_to_loss_report as report
from benchmarks.links.time_to_loss_rank import BASE, EXACT, METHODS
from benchmarks.links.time_to_loss_report import FULL, curve, key, reached, target
from benchmarks.measure import machine

ROOT = Path(__file__).parents[2]

SMALL = ("--tiny", "--loopback", "--ranks", "2", "--steps", "60", "--looks", "20", "--short", "12")
ONEBIT, SOME = "1-bit Adam", (BASE, "DiLoCo, int8, late", "DiLoCo, 3 x the steps")


def about() -> dict[str, Any]:
    return {**machine(), "commit": "abcdef0"}


def looks(*seen: tuple[int, float, float]) -> dict[str, Any]:
    names = ("step", "seconds", "loss")
    found = [dict(zip(names, look, strict=True)) | {"payload": 1e6, "ledger": 2e6} for look in seen]
    return {"lr": 1e-3, "seed": 1, "steps": seen[-1][0], "looks": found, "about": about()}


def result() -> dict[str, Any]:
    """Return runs of 100 steps, of which 1-bit Adam's warm-up is 20, and 50 or more that were only timed."""
    timed = {BASE: [9.0] + [4.0] * 49, ONEBIT: [9.0] + [5.0] * (EXACT - 1) + [0.5] * 45}
    runs = {key(name, "10 Mbit/s"): {"seconds": seconds, "about": about()} for name, seconds in timed.items()}
    runs[key(BASE, FULL)] = looks((50, 20.0, 3.0), (100, 40.0, 2.0))
    runs[key(ONEBIT, FULL)] = looks((50, 10.0, 3.04), (100, 15.0, 2.04))
    return {"runs": runs, "seeds": {}, "tuned": {}}


def test_a_loss_that_is_not_reached_has_no_seconds() -> None:
    slow, fast = reached(result(), FULL)
    assert target(result()) == pytest.approx(2.02)
    assert (slow.method, slow.at, slow.share) == (BASE, pytest.approx(39.6), 1.0)
    assert (fast.method, fast.at, fast.share) == (ONEBIT, None, None)
    assert "| 1-bit Adam | 0.001 | 2.0400 | +0.0400 (one seed) | 1.0 | not reached |" in report.table(result())


def test_a_computed_curve_has_losses_by_step_and_seconds_of_timed_steps() -> None:
    assert curve(result(), BASE, "10 Mbit/s") == [(50, 200.0, 3.0), (100, 400.0, 2.0)]
    warm_up = METHODS[ONEBIT].exact(100)
    assert warm_up == 20
    seconds = [x for _, x, _ in curve(result(), ONEBIT, "10 Mbit/s") or []]
    assert seconds == [warm_up * 5.0 + (step - warm_up) * 0.5 for step in (50, 100)]
    assert curve(result(), BASE, "1 Gbit/s") is None


def test_differences_are_of_the_same_seeds() -> None:
    found = result()
    for name, loss in ((BASE, 2.1), (ONEBIT, 2.12)):
        found["seeds"][key(name, "seed 2")] = looks((100, 0.0, loss)) | {"seed": 2}
    assert "+0.0300 (+0.0200 to +0.0400, 2 seeds)" in report.table(found)


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
