"""Params and gradients in half precision, moments in float32: computed in float32, and params rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fn.kernels import known_answers, layout
from fn.kernels.reference import REFERENCES

OF_MODEL = {
    "momentum_encode": (1,),
    "drift": (0, 3),
    "onebit_adam_": (0, -1),
    "adamw_": (0, 1),
    "onebit_lamb_moments_": (0,),
    "lamb_step_": (0,),
    "largest_magnitude": (0,),
}
"""The arguments that have the dtype of a model: params, gradients, copies of params."""


def arguments(op: str, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Return arguments with lists in half precision, and the same numbers in float32."""
    args = known_answers.on_device(torch.device("cpu"), known_answers.examples(op)[-1])
    places = [place % len(args) for place in OF_MODEL[op]]
    half = [[x.to(dtype) for x in a] if i in places else a for i, a in enumerate(args)]
    wide = [[x.float() for x in a] if i in places else _copied(a) for i, a in enumerate(half)]
    return half, wide


def _copied(a: Any) -> Any:
    if isinstance(a, list):
        return [x.clone() if isinstance(x, Tensor) else x for x in a]
    return a.clone() if isinstance(a, Tensor) else a


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OF_MODEL)
def test_the_reference_computes_in_the_dtype_of_the_moments(op, dtype):
    half, wide = arguments(op, dtype)
    found, expected = (known_answers.as_tuple(REFERENCES[op](*args)) for args in (half, wide))
    for a, b in zip(found, expected, strict=True):
        assert a is b is None or torch.equal(a.to(b.dtype), b)
    for mine, theirs in zip(half, wide, strict=True):
        if isinstance(mine, list) and mine and isinstance(mine[0], Tensor):
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(mine, theirs, strict=True))
        elif isinstance(mine, Tensor):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("op", OF_MODEL)
def test_rows_that_know_only_float32_leave_it_to_the_reference(op):
    from fn.kernels import foreach

    rows = [foreach.row("cpu"), foreach.row("meta")]
    try:
        from fn.kernels.cpu import numba

        rows.append(numba.row("cpu"))
    except ImportError:
        pass
    for row in rows:
        kernel = row.kernels.get(op)
        if kernel is not None and kernel is not REFERENCES[op]:
            half, _ = arguments(op, torch.bfloat16)
            assert kernel(*half) is NotImplemented, row.name


def dense(*shape: int) -> Tensor:
    return torch.zeros(shape)


def test_tensors_are_alike_in_memory():
    last = dense(2, 3, 4, 4).to(memory_format=torch.channels_last)
    alike = layout.alike_in_memory
    assert alike([dense(3), dense(2, 0)], [dense(3), dense(2, 0)])
    assert alike([dense(3, 2)], [dense(6)]), "contiguous ones may differ in shape"
    assert alike([last], [last.clone()])
    assert alike([last, dense(3)], [last.half(), dense(3)])
    assert alike([dense(4, 3).t()], [dense(4, 3).t()])
    assert not alike([last], [dense(2, 3, 4, 4)])
    assert not alike([dense(4, 3).t()], [dense(3, 4)])
    assert not alike([dense(4, 4)[:, ::2]], [dense(4, 4)[:, ::2]])
    assert not alike([dense(1).expand(4)], [dense(1).expand(4)])


def test_a_dimension_of_one_has_no_stride_that_counts():
    last = dense(2, 3, 4, 4).to(memory_format=torch.channels_last)
    one, other = dense(2, 3, 1, 1), dense(2, 3, 1, 1).to(memory_format=torch.channels_last)
    assert layout.alike_in_memory([last, one], [last, other])
    odd = torch.empty_strided((0, 5), (7, 3))
    assert layout.alike_in_memory([last, odd], [last, odd])
