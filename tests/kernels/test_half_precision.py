"""Params and gradients in half precision, moments in float32: computed in float32, and params rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fn.kernels import known_answers
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
