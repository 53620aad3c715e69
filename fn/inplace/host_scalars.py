"""Numbers of a state that a step in place needs on the host, without waiting for the device in every step.

Moments' weights and sums of learning rates are 0-d tensors on the device of the params. A step reads one once; then
what is written into it is written into a copy on the host, too, in the same arithmetic, for as long as nobody else
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_copies: Any = WeakIdKeyDictionary()  # tensor of a device -> (its version, its copy)


def on_host(x: Tensor) -> Tensor:
    """Return a 0-d tensor's number on the host, not to be written into; x itself if it is there."""
    if x.device.type == "cpu":
        return x
    known: tuple[int, Tensor] | None = _copies.get(x)
    if known is None or known[0] != x._version:
        known = _copies[x] = x._version, x.cpu()
    return known[1]


def number(x: Tensor | float) -> float:
    """Return a number, or that of a 0-d tensor, on the host."""
    return float(on_host(x) if isinstance(x, Tensor) else x)


def write(x: Tensor, how: Callable[[Tensor], Any]) -> None:
    """Write into a 0-d tensor, and into its copy on the host if that was asked for. how: writes into what it is given.

    What it takes from elsewhere has to be on the host.
    """
    known: tuple[int, Tensor] | None = _copies.get(x)
    is_right = known is not None and known[0] == x._version
    how(x)
    if known is not None and is_right:
        how(known[1])
        _copies[x] = x._version, known[1]
