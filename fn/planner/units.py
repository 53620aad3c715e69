"""Numbers with units, as people write them on a command line: `900gbit`, `350ms`, `1.3e9`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Zµ/]*)\s*")

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATES = {
    f"{prefix}{unit}": factor * bits
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("bit", 1), ("bit/s", 1), ("bps", 1), ("byte", 8), ("byte/s", 8))
}
_DURATIONS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}

LEAST, LARGEST = 1e-12, 1e24
"""Between these are bandwidths and durations: in the product of those that are left no number overflows."""

MOST = 10**15
"""The largest count. What is predicted for more, bytes times ranks, is beyond what torch keeps in a size."""


def bits_per_second(text: str) -> float:
    """Return a bandwidth in bit/s: "10gbit", "100mbit/s", "1.5tbyte".

        >>> bits_per_second("10gbit"), bits_per_second("1.25gbyte")
        (10000000000.0, 10000000000.0)

    Raises: ValueError that says what is wrong, so for "10gb" and "10GBps", which may mean bits or bytes.
    """
    wanted = "a bandwidth such as 100mbit, 10gbit or 25gbyte"
    if text.rstrip().endswith(("Bps", "BPS")):
        raise ValueError(f"{text!r} may mean bits or bytes; expected {wanted}")
    return _in_range(text, _parse(text, _RATES, wanted), wanted)


def seconds(text: str) -> float:
    """Return a duration in seconds: "350ms", "1.2s", "5us". Raises: ValueError as `bits_per_second`."""
    wanted = "a duration such as 5us, 350ms or 1.2s"
    return _in_range(text, _parse(text, _DURATIONS, wanted), wanted)


def count(text: str) -> int:
    """Return a number of things: "1.3e9", "64", "110m". Raises: ValueError as `bits_per_second`."""
    number = _parse(text, _COUNTS, "a number such as 64, 1.3e9 or 340m")
    if number > MOST:
        raise ValueError(f"{text!r} is too large; expected at most {MOST:g}")
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def rank(text: str) -> int | float:
    """Return a rank of factors: "4", or a part of the smaller side, "1/4" or "0.25". Raises: ValueError otherwise."""
    return int(text) if text.isdecimal() and int(text) else part(text, "a rank such as 4, 1/4 or 0.25")


def part(text: str, wanted: str = "a part such as 1/100 or 0.01, above 0 and at most 1") -> float:
    """Return a part of a whole: "1/100", "0.01". Raises: ValueError if it is none."""
    number = _fraction(text)
    if not 0 < number <= 1:
        raise ValueError(f"{text!r} is not {wanted}")
    return number


def share(text: str) -> float:
    """Return a part of a whole that may be all of it or nothing: "9/10", "0". Raises: ValueError if it is none."""
    number = _fraction(text)
    if not 0 <= number <= 1:
        raise ValueError(f"{text!r} is not a part such as 9/10 or 0.9, from 0 to 1")
    return number


def _fraction(text: str) -> float:
    """Return a fraction or a decimal number; what is neither is no number."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        return math.nan


def _in_range(text: str, number: float, wanted: str) -> float:
    if not LEAST <= number <= LARGEST:
        raise ValueError(f"{text!r} is out of range; expected {wanted}, from {LEAST:g} to {LARGEST:g}")
    return number


def ratio(text: str) -> float:
    """Return a ratio: "0.75", "1.1". Raises: ValueError if it is none."""
    number = _fraction(text)
    if not 0.01 <= number <= 100:
        raise ValueError(f"{text!r} is not a ratio such as 0.75 or 1.1, from 0.01 to 100")
    return number


def _parse(text: str, units: Mapping[str, float], wanted: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    digits, unit = float(match[1]), match[2].lower()
    if unit not in units:
        problem = f"has the unknown unit {match[2]!r}" if unit else "has no unit"
        raise ValueError(f"{text!r} {problem}; expected {wanted}")
    number = digits * units[unit]
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} is out of range; expected {wanted}, above 0")
    return number


def show_bytes(size: float) -> str:
    """Spell a number of bytes, with three digits."""
    return _spell(size, "B", "kB", "MB", "GB", "TB")


def show_seconds(time: float) -> str:
    """Spell a duration, with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time * factor >= 0.9995 or unit == "us":
            return f"{time * factor:.3g} {unit}" if time * factor < 999.5 else f"{time * factor:,.0f} {unit}"
    raise AssertionError  # the loop returns


def show_rate(bits: float) -> str:
    """Spell a bandwidth."""
    return _spell(bits, "bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def _spell(number: float, *units: str) -> str:
    *smaller, largest = units
    for unit in smaller:
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {largest}" if number < 999.5 else f"{number:.0f} {largest}"
