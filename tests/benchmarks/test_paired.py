"""`benchmarks/atlas/paired.py`: differences are paired by seed, and carry their interval."""

from __future__ import annotations

import doctest
import math

import pytest
from scipy.stats import ttest_rel

from benchmarks.atlas import paired
from benchmarks.atlas.paired import Difference, difference


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
