"""Plans of a step are found again in the next one, whatever the number of tensors and param groups."""

from __future__ import annotations

import pytest
import torch

from fn.kernels import places
from fn.kernels.eager import remembered

MANY = 1000
"""Vectors of a step: more than a model has param groups in `ddp.bucketed`, or tensors for `layout="per_tensor"`."""


def places_of(number: int) -> object:
    return places.places((1, 8 * (number + 1)))


def counts_of(number: int) -> object:
    return places.places_of_segments((1, 8 * (number + 1)), 4096, torch.device("cpu"))


def table_of(number: int) -> object:
    pytest.importorskip("triton", reason="triton is not installed")
    from fn.kernels import triton

    return triton._cut((1, 8 * (number + 1)), 4096, torch.device("cpu"))[1]


@pytest.mark.parametrize("make", [remembered(lambda n: [n]), places_of, counts_of, table_of])
def test_a_second_step_plans_nothing_again(make):
    first, second = ([make(n) for n in range(MANY)] for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))
