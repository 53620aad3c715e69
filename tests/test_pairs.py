"""Every pair of values occurs in the cases of `pairs`, and few other combinations do."""

from __future__ import annotations

import itertools

import pytest
from pairs import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 4), (2, 3, 5, 17), (5, 4, 3, 6), (6, 20, 3), (1, 1)], ids=str)
def test_every_pair_occurs_and_few_combinations_do(sizes):
    parameters = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    cases = pairwise(*parameters)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(parameters[a], parameters[b]))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(cases) <= 1.3 * largest * second
    assert len(set(cases)) == len(cases)


def test_the_cases_are_the_same_in_every_call():
    """Else the processes of pytest-xdist would not agree on what to run."""
    assert pairwise("ab", range(3), "xyz") == pairwise("ab", range(3), "xyz")


def test_a_parameter_without_values_leaves_no_cases():
    assert pairwise("", "ab") == []
