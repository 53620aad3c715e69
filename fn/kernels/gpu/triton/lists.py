# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
"""Any rule of `fn.kernels.rules` on lists of tensors in the Triton row; sums of squares.

There is one kernel for all rules, compiled once for each.

The rule, the dtypes of its lists and what kind of number each number is are constants of the kernel. The numbers
themselves are arguments, so that a rate which changes from step to step compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fn.kernels.gpu.triton.blocks import add_up, block_of, jit, kernel, launch, lists_of, load, pointer, store
from fn.kernels.gpu.triton.rules import RULES
from fn.kernels.reference.lists import RESULTS as COUNTS

NUMBER, ONE, EACH = "number", "one", "each"
"""Kinds of numbers: an argument; one on the device; one for each tensor, on the device."""


@jit
def elementwise_block(tensor, numbers, s, offset, length, RULE: tl.constexpr, RESULTS: tl.constexpr,
                      OPERANDS: tl.constexpr, KINDS: tl.constexpr, BARRIER: tl.constexpr, ALIGNED: tl.constexpr,
                      FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Apply a rule to a block of each list."""
    i = tl.arange(0, BLOCK)
    values = ()
    for k in tl.static_range(len(OPERANDS)):
        x = load(pointer(tensor + len(RESULTS) + k, offset, OPERANDS[k], ALIGNED), i, length, FULL)
        values = values + (x,)  # noqa: RUF005  Triton knows no star in a tuple
    for k in tl.static_range(len(KINDS)):
        if KINDS[k] == "number":
            values = values + (numbers[k],)  # noqa: RUF005
        elif KINDS[k] == "one":
            values = values + (tl.load(numbers[k]).to(tl.float32),)  # noqa: RUF005
        else:
            values = values + (tl.load(numbers[k] + s).to(tl.float32),)  # noqa: RUF005
    found = RULE(*values)
    # All of the block is read before any of it is written: another thread may read what this one writes.
    if BARRIER:
        tl.debug_barrier()
    if len(RESULTS) == 1:
        store(pointer(tensor, offset, RESULTS[0], ALIGNED), i, found, length, FULL)
    else:
        for k in tl.static_range(len(RESULTS)):
            store(pointer(tensor + k, offset, RESULTS[k], ALIGNED), i, found[k], length, FULL)


@kernel
def elementwise_kernel(addresses, table, numbers, n, blocks, RULE: tl.constexpr, RESULTS: tl.constexpr,
                       OPERANDS: tl.constexpr, KINDS: tl.constexpr, BARRIER: tl.constexpr, ALIGNED: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Apply a rule to lists. addresses: of results, then operands, whose dtypes are RESULTS and OPERANDS.

    BARRIER: results are operands, and not all of one dtype: threads may then write what others read.
    """
    _, _, _, length, s, offset = block_of(table, n, blocks, ALIGNED)
    tensor = addresses + s * (len(RESULTS) + len(OPERANDS) + 2)
    if length == BLOCK:
        elementwise_block(tensor, numbers, s, offset, length, RULE, RESULTS, OPERANDS, KINDS, BARRIER, ALIGNED, True,
                          BLOCK)  # fmt: skip
    else:
        elementwise_block(tensor, numbers, s, offset, length, RULE, RESULTS, OPERANDS, KINDS, BARRIER, ALIGNED, False,
                          BLOCK)  # fmt: skip


@kernel
def squares_kernel(addresses, table, squares, n, blocks, P: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of squares of every block."""
    _, _, _, length, s, offset = block_of(table, n, blocks, False)
    # Not ALIGNED: vectors of another width would add in another order, and ranks would get other last digits.
    x, i = pointer(addresses + s * 3, offset, P, False), tl.arange(0, BLOCK)
    x = load(x, i, length, True) if length == BLOCK else load(x, i, length, False)
    tl.store(squares + tl.program_id(0), tl.sum(x * x).to(tl.float64))


def elementwise_(
    rule: str, results: Sequence[Tensor], operands: Sequence[Tensor], scalars: Sequence[Tensor], places: Sequence[int],
    numbers: Sequence[float],
) -> Any:  # fmt: skip
    """See `reference.lists.elementwise_`."""
    count = COUNTS[rule]
    size = len(results) // count
    if not size:
        return NotImplemented
    columns = [flat[first : first + size] for flat in (results, operands) for first in range(0, len(flat), size)]
    dtyped: dict[str, Any] = {str(place): column for place, column in enumerate(columns)}
    lists = lists_of(*columns, runs=None, **dtyped)
    if lists is None:
        return NotImplemented
    dtypes = tuple(lists.constants.pop(str(place)) for place in range(len(columns)))
    given: list[Any] = [*map(float, numbers)]
    kinds = [NUMBER] * len(given)
    for place, scalar in zip(places, scalars, strict=True):
        given[place], kinds[place] = scalar.contiguous(), EACH if scalar.numel() > 1 else ONE
    constants = {"RULE": RULES[rule], "RESULTS": dtypes[:count], "OPERANDS": dtypes[count:], "KINDS": tuple(kinds)}
    constants["BARRIER"] = len({*dtypes}) > 1 and not _apart(results, operands)
    args = lists.addresses, lists.row.table, tuple(given), *lists.row.sizes
    launch(elementwise_kernel, results[0], lists.row.blocks, *args, **lists.constants, **constants)
    return None


def _apart(results: Sequence[Tensor], operands: Sequence[Tensor]) -> bool:
    return {*map(Tensor.data_ptr, results)}.isdisjoint(map(Tensor.data_ptr, operands))


def sums_of_squares(tensors: Sequence[Tensor]) -> Any:
    """See `reference.lists.sums_of_squares`."""
    lists = lists_of(tensors, P=tensors)
    if lists is None:
        return NotImplemented
    squares = torch.empty((1, lists.row.blocks), dtype=torch.float64, device=tensors[0].device)
    args = lists.addresses, lists.row.table, squares, *lists.row.sizes
    launch(squares_kernel, squares, squares.numel(), *args, **lists.of_one_shape)
    # (1, S) -> (S,)
    return add_up(squares, lists.row)[0]


KERNELS = (elementwise_, sums_of_squares)
