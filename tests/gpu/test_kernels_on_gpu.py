"""The kernels of the device conform where vectors are large, hold NaN, or lie strided or misaligned in memory."""

from __future__ import annotations

from functools import partial

import pytest
from gpu_device import PLACES, device
from kernel_checks import (
    HUGE,
    LARGE,
    against_the_reference,
    huge_adamw,
    huge_integers,
    huge_needs,
    huge_signs,
)

import fn
from fn.kernels.reference import REFERENCES
from fn.kernels.table import cells, rows

HERE = device()
SMALL = 4096 * 3 + 5
PROVES = HERE is not None and HERE.type == "cpu"  # only these tests themselves: vectors stay small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HERE is None, reason="no accelerator is here; FN_TEST_DEVICE=cpu proves the tests themselves"),
]


@pytest.mark.filterwarnings("ignore:.*is not used:UserWarning")
def test_no_row_claims_a_kernel_that_gives_wrong_answers():
    refused = [
        (row.name, op) for row in rows(HERE.type) for op in row.kernels
        if row.name not in {cell.provider for cell in cells(op, HERE.type)}
    ]  # fmt: skip
    assert refused == []


@pytest.mark.skipif(PROVES, reason="the conformance of the CPU's rows is tested elsewhere")
@pytest.mark.parametrize("place", range(3))
def test_every_row_conforms(place):
    found = rows(HERE.type)
    if place >= len(found):
        pytest.skip("there are fewer rows here")
    assert (report := fn.testing.conformance(found[place])), report


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", REFERENCES)
def test_a_kernel_gives_the_references_answer_wherever_its_arguments_lie(op, place, special):
    assert against_the_reference(op, HERE, SMALL, place, special) is None


@pytest.mark.slow
@pytest.mark.parametrize("op", REFERENCES)
def test_a_kernel_gives_the_references_answer_for_large_vectors(op):
    n = SMALL if PROVES else LARGE
    assert against_the_reference(op, HERE, n, on_device=True) is None


@pytest.mark.slow
@pytest.mark.parametrize("check", [huge_signs, partial(huge_signs, block=64), huge_integers, huge_adamw],
                         ids=["signs", "signs in blocks", "integers", "adamw"])  # fmt: skip
def test_offsets_do_not_overflow_above_two_to_the_31(check):
    n = SMALL if PROVES else HUGE
    if reason := huge_needs(HERE, n):
        pytest.skip(reason)
    assert check(HERE, n) is None
