"""Kernels are compiled at construction for the dtypes of the params, and of gradients beside them."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import fn
from fn.kernels import known_answers
from fn.kernels.reference import REFERENCES
from fn.kernels.schemas import ON_LISTS, SCHEMAS
from fn.kernels.table import cells, warm, warm_halves

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32
SEEN = {
    "adamw_": {(HALF, FULL, FULL, FULL), (HALF, HALF, FULL, FULL)},
    "momentum_encode": {(FULL, HALF)},
    "largest_magnitude": {(HALF,)},
    "onebit_adam_": {(HALF, FULL, FULL), (FULL, FULL, FULL, HALF)},
    "lamb_step_": {(HALF, FULL, FULL)},
    "sign_encode": set(),
}


@contextmanager
def first_asked(op, before):
    """Put a kernel in front of the others, which calls `before(dtypes of its lists)` and is the reference."""

    def kernel(*args):
        before(tuple(a[0].dtype for a in args if isinstance(a, list) and a and isinstance(a[0], torch.Tensor)))
        return REFERENCES[op](*args)

    row = fn.kernels.Accelerator("cpu", {op: kernel}, provider="ours")
    fn.kernels.register(row)
    try:
        yield
    finally:
        fn.kernels.unregister(row)


@pytest.mark.parametrize("op", SEEN)
def test_kernels_see_params_and_gradients_in_half_precision(op):
    found = set()
    with first_asked(op, found.add):
        warm([op], "cpu")
        assert found
        found.clear()
        warm_halves([op], CPU, [FULL, HALF])
    assert found == SEEN[op]


def test_nothing_is_done_for_params_in_float32():
    with mock.patch.object(known_answers, "outcome") as asked:
        warm_halves(SCHEMAS, CPU, [FULL, torch.float64])
    assert not asked.called


def test_the_kernels_of_a_cpu_take_all_examples(caplog):
    with caplog.at_level(logging.WARNING, "fn"):
        warm_halves(ON_LISTS, CPU, [HALF, torch.float16])
    assert not caplog.records
    assert any(cells(op, "cpu") for op in ON_LISTS)


def test_a_kernel_that_fails_is_said_and_the_next_one_is_asked(caplog):
    def of_an_old_chip(dtypes):
        if HALF in dtypes:
            raise RuntimeError("no such instruction")

    with first_asked("largest_magnitude", of_an_old_chip):
        warm_halves(["largest_magnitude"], CPU, [HALF])
    assert "'largest_magnitude' of 'ours' fails in half precision: no such instruction" in caplog.text
