"""Checks of arguments: what they raise names the argument and says what it should be."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from fn.errors import expected


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
