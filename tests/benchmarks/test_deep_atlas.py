"""`benchmarks/deep_atlas.py` and `paired.py`: rates are chosen elsewhere, differences carry their interval."""

from __future__ import annotations

import doctest
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import deep_atlas  # noqa: E402
import paired  # noqa: E402
from deep_atlas import METHODS, SEARCH_STEPS, SEEDS, STEPS, Run, chosen_rate, missing, reported, table  # noqa: E402
from paired import Difference, difference, rate_at  # noqa: E402


def test_examples() -> None:
    assert doctest.testmod(paired).failed == 0


def test_differences_are_paired() -> None:
    ours, base = {1: 2.1, 2: 2.2, 3: 2.41}, {1: 2.0, 2: 2.1, 3: 2.3, 4: 9.0}
    gap = difference(ours, base)
    wanted = ttest_rel([2.1, 2.2, 2.41], [2.0, 2.1, 2.3]).confidence_interval(0.95)
    assert (gap.mean - gap.half, gap.mean + gap.half) == pytest.approx(tuple(wanted))
    assert gap.verdict == "higher"
    assert difference({1: 2.1, 2: 1.9}, {1: 2.0, 2: 2.1}).verdict == "not told apart"
    assert difference({1: 2.0, 2: math.nan}, base).verdict == "diverged on a seed"
    assert difference({1: 2.0}, base) is None
    assert Difference(-0.2, 0.1).verdict == "lower"


def row(method: str, place: int, loss: float | None, seed: int = 0, steps: int = SEARCH_STEPS) -> dict[str, Any]:
    run = Run(method, seed, steps, rate_at(METHODS[method].rate, place))
    curve = [(look, look * 1000, loss) for look in (250, 500)]
    return {**run._asdict(), "tuning": loss, "loss": loss, "bytes": 500_000, "seconds": 1.0, "curve": curve}


def test_a_rate_is_searched_until_it_is_at_no_edge_and_then_the_seeds_run() -> None:
    falling = [row("adamw", place, 2.0 - 0.1 * place) for place in (-1, 0, 1)]
    runs = [run for run in missing(falling) if run.method == "adamw"]
    assert runs == [Run("adamw", 0, SEARCH_STEPS, rate_at(METHODS["adamw"].rate, 2))]
    rows = [*falling, row("adamw", 2, None)]  # it diverged
    assert chosen_rate(rows, "adamw") == rate_at(METHODS["adamw"].rate, 1)
    runs = [run for run in missing(rows) if run.method == "adamw"]
    assert runs == [Run("adamw", seed, STEPS, rate_at(METHODS["adamw"].rate, 1)) for seed in SEEDS]


def test_what_is_reported_chooses_no_rate() -> None:
    rows = [row("adamw", place, abs(place)) for place in (-1, 0, 1)]
    shown = [row("adamw", 1, -5.0, seed=seed, steps=STEPS) for seed in SEEDS]
    assert 0 not in SEEDS
    assert chosen_rate([*rows, *shown], "adamw") == rate_at(METHODS["adamw"].rate, 0)
    assert reported([*rows, *shown], "adamw") == {}


def test_the_table_says_what_is_missing() -> None:
    rows = [row(name, place, abs(place)) for name in ("adamw", "demo") for place in (-1, 0, 1)]
    rows += [row("adamw", 0, 2.0 + seed / 10, seed, STEPS) for seed in SEEDS]
    rows += [row("demo", 0, 2.1 + seed / 10, seed, STEPS) for seed in SEEDS[:2]]
    lines = table(rows).splitlines()
    assert lines[2] == "| adamw | float32 | 0.003 | 1 | 2.2000 |  |  | 0.5 | 3 of 3 |"
    assert lines[-1].startswith("| demo | 32 cosines of a tile | 0.01 | 3.3 | 2.2500 | +0.1000 ± 0.0000 | higher |")
    assert lines[-1].endswith("| 2 of 3 |")
    assert lines[-2].endswith("| searched |  |  |  |  |  | 0 of 3 |")


def test_a_run_is_a_file_and_is_not_made_again(tmp_path: Path) -> None:
    rows = [row("adamw, one worker", 0, 2.0), row("adamw", 0, 2.0)]
    for each in rows:
        deep_atlas.write(tmp_path, each)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"adamw-0-750-0.003.json", "adamw-one-worker-0-750-0.003.json"}
    runs = deep_atlas.missing(deep_atlas.read(tmp_path))
    assert Run("adamw", 0, SEARCH_STEPS, 0.003) not in runs
    assert Run("demo", 0, SEARCH_STEPS, 0.01) in runs


@pytest.mark.parametrize("name", METHODS)
def test_the_picture_has_a_clock_for_every_method(name: str) -> None:
    from deep_atlas_picture import times

    slow, fast = (times(name, bits)[-1] / STEPS for bits in (1e8, 1e11))
    assert 1 == fast == slow if METHODS[name].alone else 1 <= fast < slow


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_atlas, "MODEL", (1, 16, 2))
    monkeypatch.setattr(deep_atlas, "LOOKS", 16)
    found = deep_atlas.train(Run(name, 1, 48, METHODS[name].rate))
    first, *_, last = (loss for *_, loss in found["curve"])
    assert last < first < 6
    assert (found["bytes"] == 0) is METHODS[name].alone
