"""Codecs and feedbacks are functions inside of functions, which pickle does not take: they are made again instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound=type)


def invalidates(functions: set[str], told: set[str]) -> Callable[[_Kind], _Kind]:
    """Return a decorator of a NamedTuple: `_replace` of one of `functions` also sets the fields `told` to None.

    These belong to the old functions, such as a kernel, which would otherwise go on in place of the new ones. Fields
    that are given stay. The repr becomes the call that makes the value, where that is known.
    """

    def decorate(kind: _Kind) -> _Kind:
        plain = kind._replace  # type: ignore[attr-defined]

        def replaced(self: Any, /, **fields: Any) -> Any:
            return plain(self, **{**({} if functions.isdisjoint(fields) else dict.fromkeys(told)), **fields})

        kind._replace = replaced  # type: ignore[attr-defined]
        kind.__repr__ = _spelled  # type: ignore[assignment]
        return kind

    return decorate


def _spelled(value: Any) -> str:
    """Return the call that makes a codec or a feedback; of one that nothing makes again, the names of its functions."""
    make = value[-1]
    if make is not None and _same(value[:-1], make()[:-1]):
        call = partial(make)  # a partial of a partial is one
        arguments = [*map(repr, call.args), *(f"{name}={value!r}" for name, value in call.keywords.items())]
        return f"fn.{call.func.__name__}({', '.join(arguments)})"
    names = [getattr(field, "__qualname__", None) or repr(field) for field in value]
    fields = ", ".join(f"{field}={name}" for field, name in zip(value._fields, names, strict=True))
    return f"{type(value).__name__}({fields})"


def reduced(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what pickle needs of a NamedTuple of functions, for its `__reduce__`.

    Args: value: the NamedTuple. Its last field is `make`, a function that makes it again, or None. A value that was
        changed since it was made is taken as it is: it can be copied, and pickled if its functions can be.
    """
    make = value[-1]
    # `_replace(align=...)` keeps `make`, which would make the value as it was before.
    if make is not None and _same(value[:-1], make()[:-1]):
        return make, ()
    return type(value), tuple(value)


def _same(a: Any, b: Any) -> bool:
    """Return whether two things are equal; functions are if their code is, and all that it closes over."""
    a, b = (inspect.unwrap(x) if callable(x) else x for x in (a, b))
    if inspect.isfunction(a) and inspect.isfunction(b):
        return a.__code__ == b.__code__ and _same(_closed_over(a), _closed_over(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or a == b)


def _closed_over(f: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in f.__closure__ or ())
