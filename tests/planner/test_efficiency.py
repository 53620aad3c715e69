"""The part of a link that messages reach: the published points are met, and faster links are not said to be slower."""

from __future__ import annotations

import math

import pytest

from fn.planner.efficiency import FULL, constant, over_tcp, transports
from fn.planner.evidence import published

POINTS = {("nccl", 1e10): 0.92, ("nccl", 2.5e10): 0.45, ("gloo", 1e10): 0.89, ("gloo", 2.5e10): 0.18}
SPEEDS = [10 ** (6 + k / 50) for k in range(301)]
"""1 Mbit/s to 1 Tbit/s."""


def reached(transport: str, speed: float) -> float:
    """Return the bit/s of whole messages."""
    return speed * over_tcp(transport).at(speed)[0]


@pytest.mark.parametrize(("point", "whole"), POINTS.items(), ids=str)
def test_the_published_points_are_met(point, whole):
    transport, speed = point
    assert over_tcp(transport).at(speed) == pytest.approx((whole, whole * 0.65 / 0.85))


@pytest.mark.parametrize("transport", transports())
@pytest.mark.parametrize("speed", [5e7, 1e9, 5e9])
def test_up_to_5_gigabits_the_public_grid_s_two_numbers_hold(transport, speed):
    assert over_tcp(transport).at(speed) == pytest.approx((0.85, 0.65))


def test_a_faster_link_reaches_less_only_where_that_was_published():
    """NCCL's points rise throughout; gloo's fall between 10 and 25 Gbit/s, and each such speed's line says so."""
    nccl, gloo = ([reached(name, speed) for speed in SPEEDS] for name in ("nccl", "gloo"))
    assert nccl == sorted(nccl)
    for before, after, speed in zip(gloo, gloo[1:], SPEEDS[1:], strict=False):
        assert after > before or 1e10 < speed <= 2.5e10 * (1 + 1e-9) * 10 ** (1 / 50)
    for speed, bits in zip(SPEEDS, gloo, strict=True):
        slower = speed > 1e10 and bits < 8.9e9 * (1 - 1e-6)
        assert ("so it was published" in over_tcp("gloo").words(speed)) == slower
        assert "so it was published" not in over_tcp("nccl").words(speed)


def test_every_point_has_a_source_and_a_licence():
    links = published()["links"]
    for transport, points in links["transports"].items():
        for point in (links["slow"], *points):
            assert point["url"].startswith("https://")
            assert point["licence"]
            assert f"{point['where']}, {point['source']}." in over_tcp(transport).words(point["bits_per_second"])


def test_given_parts_hold_at_every_speed():
    assert over_tcp(whole=0.9, buckets=0.8).at(1e9) == pytest.approx((0.9, 0.8))
    assert over_tcp(whole=0.9, buckets=0.8).at(1e11) == pytest.approx((0.9, 0.8))
    assert over_tcp("gloo", buckets=0.1).at(2.5e10) == pytest.approx((0.18, 0.1))
    assert FULL.at(3e9) == (1, 1)
    assert constant(0.5, 0.25, "").with_buckets(1.0).at(math.pi) == pytest.approx((0.5, 1))
