"""Any rule on lists of tensors, and what is asked of lists: sums of squares and the largest magnitude."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn.errors import expected
from fn.kernels import rules
from fn.kernels.layout import scale_dtype


def elementwise_(
    rule: str, results: Sequence[Tensor], operands: Sequence[Tensor], scalars: Sequence[Tensor], places: Sequence[int],
    numbers: Sequence[float],
) -> None:  # fmt: skip
    """Apply a rule to the tensors of lists, and write what it returns. `fn.kernels.lists.elementwise` calls it.

    Args: rule: its name in `rules`; it takes lists first, then numbers. results: its K lists of results of S tensors
        each, one list behind the other; they are written, and may be operands. operands: its lists, in the same form,
        of tensors of one shape in each place. numbers: the numbers; scalars (one element, or S) stand in place of those
        at `places`.

    It is calculated in float32, or in the wider of the dtypes, and rounded once, to the dtype of the result.
    """
    wanted = rule_of(rule)
    size = len(results) // RESULTS[rule]
    for s in range(size):
        # One list lies behind the other: these are tensor s of each.
        row = operands[s::size]
        wide = max((scale_dtype(x) for x in row), key=lambda dtype: dtype.itemsize)
        given: list[Any] = [*numbers]
        for place, scalar in zip(places, scalars, strict=True):
            given[place] = scalar.reshape(-1)[s if scalar.numel() > 1 else 0].to(wide)
        found = wanted(*(x.to(wide) for x in row), *given)
        for to, x in zip(results[s::size], found if isinstance(found, tuple) else (found,), strict=True):
            to.copy_(x)


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor, (S,) float64. Args: tensors: S of one dtype."""
    squares = [x.double().square().sum() for x in tensors]
    return torch.stack(squares) if squares else torch.zeros(0, dtype=torch.float64, device="cpu")


def largest_magnitude(grads: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of all elements, 0-d; NaN where one of them is.

    Args: grads: tensors of one dtype. Raises: ValueError if there is none.
    """
    if not grads:
        raise ValueError("grads: expected at least one tensor, but got none")
    return torch.stack([x.abs().amax() if x.numel() else x.new_zeros(()) for x in grads]).amax()


def rule_of(name: str) -> Callable[..., Any]:
    """Return a rule by name. Raises: ValueError if there is none."""
    if name not in RESULTS:
        raise ValueError(expected("rule", "the name of a function of fn.kernels.rules", f"{name!r}"))
    rule: Callable[..., Any] = vars(rules)[name]
    return rule


RESULTS: dict[str, int] = {
    name: str(rule.__annotations__["return"]).count("Number")
    for name, rule in vars(rules).items()
    if getattr(rule, "__module__", "") == rules.__name__
}
"""How many numbers each rule returns."""
