# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The arithmetic of every step, in Triton: the functions of `fn.kernels.rules`, compiled as they stand.

A rule is copied with other globals, in which the seven words that are no operators are Triton's.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from fn.kernels import rules

jit: Any = triton.jit


@jit
def where(condition, a, b):
    """See `rules.where`."""
    return tl.where(condition, a, b)


@jit
def root(x):
    """See `rules.root`. `tl.sqrt` is an approximation."""
    return tl.sqrt_rn(x)


@jit
def sign(x):
    """See `rules.sign`."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@jit
def power(x):
    """See `rules.power`."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@jit
def quotient(a, b):
    """See `rules.quotient`. `/` is an approximation."""
    return tl.div_rn(a, b)


@jit
def lerp(start, end, weight):
    """See `rules.lerp`."""
    near = weight < 0.5
    return tl.fma(end - start, tl.where(near, weight, weight - 1.0), tl.where(near, start, end))


@jit
def plus(a, b, weight):
    """See `rules.plus`."""
    return tl.fma(b, weight, a)


# Triton resolves the names in a function's source by its globals. So one dict is the globals of all copies: in it a
# rule finds the other rules as they are compiled here, and the words of torch nowhere.
_scope: dict[str, Any] = {
    "__name__": __name__,
    "tl": tl,  # the interpreter looks for it
    "Number": tl.tensor,
    **{word.__name__: word for word in (where, root, sign, power, quotient, lerp, plus)},
}
for _name, _rule in vars(rules).items():
    if getattr(_rule, "__module__", "") == rules.__name__ and _name not in _scope:
        _scope[_name] = jit(FunctionType(_rule.__code__, _scope, _name))

RULES = _scope
"""All rules by name, as they are compiled here."""

adamw, clamped, decayed, denominator, drift = (
    _scope[name] for name in ("adamw", "clamped", "decayed", "denominator", "drift")
)
implied_gradient, kept_at_zero, second_moment = (
    _scope[name] for name in ("implied_gradient", "kept_at_zero", "second_moment")
)
code_scale, compensated, damped, residual, shortened, signed = (
    _scope[name] for name in ("code_scale", "compensated", "damped", "residual", "shortened", "signed")
)
