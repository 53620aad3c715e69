"""Numbers with units: what is read, what is refused and with which words, and how they are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fn.planner import units


@pytest.mark.parametrize(
    ("text", "bits"),
    [("900gbit", 9e11), ("10Gbit/s", 1e10), ("100mbit", 1e8), ("1.5tbyte", 1.2e13), ("25 gbps", 2.5e10), ("8bit", 8)],
)
def test_bandwidths(text, bits):
    assert units.bits_per_second(text) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("text", "time"), [("350ms", 0.35), ("1.2s", 1.2), ("5us", 5e-6), ("5µs", 5e-6), ("80ns", 8e-8), ("1e-3s", 1e-3)]
)
def test_durations(text, time):
    assert units.seconds(text) == pytest.approx(time)


@pytest.mark.parametrize(
    ("text", "number"), [("1.3e9", 1_300_000_000), ("64", 64), ("340m", 340_000_000), ("1.3b", 1_300_000_000)]
)
def test_counts(text, number):
    assert units.count(text) == number


def test_ranks_of_factors_and_parts():
    assert [units.rank(text) for text in ("4", "1", "1/4", "0.25", "1.0")] == [4, 1, 0.25, 0.25, 1.0]
    assert [type(units.rank(text)) for text in ("1", "1.0")] == [int, float]
    assert units.part("1/100") == units.part("0.01") == 0.01


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (units.bits_per_second, "10gb", "unknown unit 'gb'; expected a bandwidth such as 100mbit"),
        (units.bits_per_second, "10GBps", "'10GBps' may mean bits or bytes; expected a bandwidth such as 100mbit"),
        (units.bits_per_second, "10", "has no unit"),
        (units.bits_per_second, "-1gbit", "above 0"),
        (units.bits_per_second, "fast", "'fast' is not a bandwidth"),
        (units.seconds, "350", "has no unit; expected a duration such as 5us"),
        (units.seconds, "0ms", "above 0"),
        (units.seconds, "1e999s", "out of range"),
        (units.seconds, "", "'' is not a duration"),
        (units.rank, "0", "'0' is not a rank such as 4, 1/4 or 0.25"),
        (units.rank, "1.5", "'1.5' is not a rank"),
        (units.part, "2", "'2' is not a part such as 1/100 or 0.01, above 0 and at most 1"),
        (units.part, "1/0", "is not a part"),
        (units.count, "1.5", "not a whole number"),
        (units.count, "1e", "unknown unit 'e'"),
        (units.count, "64 ranks", "unknown unit 'ranks'"),
    ],
)
def test_what_is_refused_says_what_is_wanted(parse, text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


@given(st.floats(1e-6, 1e3))
def test_what_is_shown_is_within_half_a_percent(time):
    number, unit = units.show_seconds(time).replace(",", "").split()
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] == pytest.approx(time, rel=5e-3)


def test_how_numbers_are_shown():
    assert units.show_bytes(1_250_000) == "1.25 MB"
    assert units.show_bytes(5.2e12) == "5.2 TB"
    assert units.show_rate(9e11) == "900 Gbit/s"
    assert units.show_rate(7.2e12) == "7.2 Tbit/s"
    assert units.show_seconds(0.0) == "0 us"
    assert units.show_seconds(1823) == "1,823 s"
