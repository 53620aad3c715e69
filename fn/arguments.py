"""Checks of arguments: what they raise names the argument and says what it should be."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fn.errors import expected

F = TypeVar("F", bound=Callable[..., Any])


def check_number(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a number, and not its text or a batch under vmap."""
    if not isinstance(value, numbers.Real | Tensor):
        raise TypeError(expected(argument, "a number", f"{value!r}"))
    if isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value):
        raise TypeError(expected(argument, "a number", "a tensor that vmap batches", "only lr may be batched"))
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(expected(argument, "a number", f"a tensor of shape {tuple(value.shape)}"))


def check_interval(argument: str, value: Any, interval: str) -> None:
    """Raise a ValueError that names the argument unless a number is in an interval, such as "[0, 1)"; else a TypeError.

    >>> check_interval("b1", 1.0, "[0, 1)")
    Traceback (most recent call last):
    ValueError: b1: expected a number in [0, 1), but got 1.0
    """
    check_number(argument, value)
    low, high = (float(end) for end in interval[1:-1].split(","))
    is_above = value >= low if interval[0] == "[" else value > low
    is_below = value <= high if interval[-1] == "]" else value < high
    if not (is_above and is_below):  # also for NaN
        raise ValueError(expected(argument, f"a number in {interval}", f"{value}"))


def check_whole(argument: str, value: Any, least: int | None = None) -> None:
    """Raise a TypeError that names the argument unless a value is a whole number, as 8.0 is none.

    A ValueError if it is less than `least`.
    """
    check_number(argument, value)
    if not isinstance(value, numbers.Integral):
        raise TypeError(expected(argument, "a whole number", f"{value!r}"))
    if least is not None and value < least:
        raise ValueError(expected(argument, f"a whole number of at least {least}", f"{value}"))


def check_flag(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(expected(argument, "True or False", f"{value!r}"))


def check_kind(argument: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise a TypeError that names the argument unless a value is an instance of one of some classes.

    A tensor and a text can be gone through, too, but are no sequence, mapping or iterable that anybody means.

    Args: kinds: classes. wanted: what they are, for the message.
    """
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    is_abstract = isinstance(value, Tensor | str | bytes) and type(value) not in listed
    if not isinstance(value, kinds) or (is_abstract and any(kind.__module__ == "collections.abc" for kind in listed)):
        raise TypeError(expected(argument, wanted, f"{value!r}"))


def check_function(argument: str, value: Any, wanted: str) -> None:
    """Raise a TypeError that names the argument unless a value can be called. wanted: with which arguments."""
    if not callable(value):
        raise TypeError(expected(argument, wanted, f"{value!r}"))


def check_is_transform(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a transform; a function that makes one is not."""
    if not hasattr(value, "warmup_update"):
        got = getattr(value, "__name__", type(value).__name__)
        raise TypeError(expected(argument, "a transform, such as fn.scale_by_adam()", got))


def checked(*arguments: str) -> Callable[[F], F]:
    """Let a function refuse what is of another kind than its annotations say, before it does anything.

        >>> @checked("count")
        ... def repeat(text: str, count: int | None = None): ...
        >>> repeat("a", 1.5)
        Traceback (most recent call last):
        TypeError: count: expected a whole number or None, but got 1.5

    Args: arguments: the names of those that it looks at: the others have checks of their own, in better words.
    """

    def decorate(f: F) -> F:
        signature, hints = inspect.signature(f), dict[str, Any]()

        @functools.wraps(f)
        def run(*args: Any, **options: Any) -> Any:
            # Read at the first call: some name classes that are defined below the function.
            hints.update(hints or typing.get_type_hints(f))
            given = signature.bind(*args, **options).arguments
            for argument in arguments:
                if argument in given and not _fits(hints[argument], given[argument]):
                    got = f"{given[argument]!r}"
                    is_nan = isinstance(given[argument], float) and math.isnan(given[argument])
                    raise (ValueError if is_nan else TypeError)(expected(argument, _words(hints[argument]), got))
            return f(*args, **options)

        return typing.cast(F, run)

    return decorate


def _fits(hint: Any, value: Any) -> bool:
    """Tell whether a value is of the kind of an annotation, elements of sequences included."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(one, value) for one in inside)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inside
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return callable(value)
    if origin is tuple:  # also a list, which JSON has in its place
        inside = inside[:1] * len(value) if inside[1:] == (...,) and isinstance(value, Sequence) else inside
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(inside)
        return is_sequence and all(map(_fits, inside, value))
    if origin is not None:
        is_kind = isinstance(value, origin) and not isinstance(value, str | bytes | Tensor)
        each = value if is_kind and issubclass(origin, Sequence) else ()
        return is_kind and all(_fits(inside[0], x) for x in each)
    if hint is float:
        is_number = isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
        return is_number and not math.isnan(value)
    return isinstance(value, numbers.Integral if hint is int else hint)


_WORDS = {float: "a number", int: "a whole number", bool: "True or False", str: "a text", type(None): "None"}


def _words(hint: Any) -> str:
    """Return an annotation in words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, inside)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inside))
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return "a function"
    if origin is not None and inside and origin is not Mapping:
        return f"a {origin.__name__.lower()} of {', '.join(dict.fromkeys(_words(x) for x in inside if x is not ...))}"
    return _WORDS.get(hint) or f"a {getattr(origin or hint, '__name__', hint)}"
