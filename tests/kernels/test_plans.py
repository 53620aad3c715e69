"""Plans of a step are found again in the next one, whatever the number of tensors and param groups."""

from __future__ import annotations

import pytest
import torch

from fn.kernels.cpu import blocks
from fn.kernels.tracing import cached_plan

MANY = 1000
"""Vectors of a step: more than a model has param groups in `ddp.bucketed`, or tensors for `layout="per_tensor"`."""


def table_on_the_host(number: int) -> object:
    return blocks.block_table((1, 8 * (number + 1)))


def counts_of(number: int) -> object:
    return blocks._blocks_of_segments((1, 8 * (number + 1)), torch.device("cpu"))


def table_of(number: int) -> object:
    pytest.importorskip("triton", reason="triton is not installed")
    from fn.kernels.gpu.triton import blocks

    return blocks.cut((1, 8 * (number + 1)), torch.device("cpu")).table


TENSORS = torch.zeros(MANY, 8).unbind()


def addresses_of(number: int) -> object:
    pytest.importorskip("triton", reason="triton is not installed")
    from fn.kernels.gpu.triton import blocks

    return blocks.addresses([TENSORS[number]])


@pytest.mark.parametrize("make", [cached_plan(lambda n: [n]), table_on_the_host, counts_of, table_of, addresses_of])
def test_a_second_step_plans_nothing_again(make):
    first, second = ([make(n) for n in range(MANY)] for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))
