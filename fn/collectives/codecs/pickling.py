"""Codecs and feedbacks are functions inside of functions, which pickle does not take: they are made again instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound=type)


def invalidates(functions: set[str], told: set[str]) -> Callable[[_Kind], _Kind]:
    """Return a decorator of a NamedTuple: `_replace` of one of `functions` also sets the fields `told` to None.

    These belong to the old functions, such as a kernel, which would otherwise go on in place of the new ones. Fields
    that are given stay. A field `make`, a function that makes the value again, is set to None whatever is replaced.
    Where it is known, the repr is that call, and pickle takes it.
    """

    def decorate(kind: _Kind) -> _Kind:
        plain = kind._replace  # type: ignore[attr-defined]

        def replaced(self: Any, /, **fields: Any) -> Any:
            gone = set() if functions.isdisjoint(fields) else told
            gone = gone | ({"make"} if fields else set()).intersection(self._fields)
            return plain(self, **{**dict.fromkeys(gone), **fields})

        kind._replace = replaced  # type: ignore[attr-defined]
        kind.__repr__ = _spelled  # type: ignore[assignment]
        kind.__reduce__ = _reduced  # type: ignore[assignment]
        return kind

    return decorate


def _spelled(value: Any) -> str:
    """Return the call that makes a codec or a feedback; of one that nothing makes again, the names of its functions."""
    if (make := getattr(value, "make", None)) is not None:
        call = partial(make)  # a partial of a partial is one
        arguments = [*map(repr, call.args), *(f"{name}={value!r}" for name, value in call.keywords.items())]
        return f"fn.{call.func.__name__}({', '.join(arguments)})"
    names = [getattr(field, "__qualname__", None) or repr(field) for field in value]
    fields = ", ".join(f"{field}={name}" for field, name in zip(value._fields, names, strict=True))
    return f"{type(value).__name__}({fields})"


def _reduced(value: Any) -> tuple[Any, ...]:
    """Return what pickle needs; without `make` the value can be copied, and pickled if its functions can be."""
    make = getattr(value, "make", None)
    return (type(value), tuple(value)) if make is None else (make, ())
