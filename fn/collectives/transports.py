"""Transports other than torch.distributed, by name.

The collectives take the name of what carries their messages: a transport that is registered here, or else a
process group. To a compiler the exchange is one opaque op, so a compiled step runs over any transport.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor


class Transport(NamedTuple):
    """Three blocking exchanges of contiguous tensors on any device; all ranks call the same ones in the same order.

    all_to_all: (W, ...) -> (W, ...), row r from rank r. all_gather: (...) -> (W, ...). psum: the sum over ranks.
    """

    all_to_all: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor], Tensor]
    psum: Callable[[Tensor], Tensor]


_transports: dict[str, Transport] = {}

registered: Container[str] = _transports
"""The names that are registered."""


def register(name: str, transport: Transport) -> str:
    """Let a name stand for a transport in this process, whatever it stood for; return the name."""
    _transports[name] = transport
    return name


def carry(x: Tensor, size: int, collective: str, transport: str) -> Tensor:
    """Run a collective, named as in `Transport`, over `size` ranks."""
    carried: Tensor = torch.ops.fn.carry(x, size, collective, transport)
    return carried


def _run(x: Tensor, size: int, collective: str, transport: str) -> Tensor:
    run: Callable[[Tensor], Tensor] = getattr(_transports[transport], collective)
    return run(x.detach().contiguous())


def _shape(x: Tensor, size: int, collective: str, transport: str) -> Tensor:
    return x.new_empty((size, *x.shape) if collective == "all_gather" else x.shape)


_library = torch.library.Library("fn", "FRAGMENT")
_library.define("carry(Tensor x, int size, str collective, str transport) -> Tensor")
_library.impl("carry", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fn::carry", _shape, lib=_library)
