"""Transports other than torch.distributed, by name.

The collectives take the name of what carries their messages: a transport that is registered here, or else a
process group. To a compiler the exchange is one opaque op, so a compiled step runs over any transport.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.errors import expected


class Transport(NamedTuple):
    """Three blocking exchanges of contiguous tensors of any dtype and device, in the same order on all ranks.

    all_to_all: (W, ...) -> (W, ...), row r from rank r. all_gather: (...) -> (W, ...), row r is rank r's. psum: the sum
    over ranks, bit for bit the same on all of them; what it is given is a copy, into which it may write.

    own_thread: whether another thread may exchange over it, while this one exchanges over others only.

    Each returns a new tensor of the dtype and device that it was given, which holds the numbers by then: a handle is
    waited for inside, and memory that the next call writes into is copied. Anything else is refused.
    """

    all_to_all: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor], Tensor]
    psum: Callable[[Tensor], Tensor]
    own_thread: bool = False


_transports: dict[str, Transport] = {}

registered: Container[str] = _transports
"""The names that are registered."""


def register(name: str, transport: Transport) -> str:
    """Let a name stand for a transport in this process, whatever it stood for; return the name."""
    _transports[name] = transport
    return name


def has_own_thread(name: str) -> bool:
    """Return whether a transport is registered that another thread may exchange over."""
    return name in _transports and _transports[name].own_thread


def carry(x: Tensor, size: int, collective: str, transport: str) -> Tensor:
    """Run a collective, named as in `Transport`, over `size` ranks."""
    carried: Tensor = torch.ops.fn.carry(x, size, collective, transport)
    return carried


def carry_sum(x: Tensor, transport: str) -> Tensor:
    """Run "psum" with a contiguous tensor that nobody needs any more."""
    return _checked(_transports[transport].psum(x), x, x.shape, "psum", transport)


def _run(x: Tensor, size: int, collective: str, transport: str) -> Tensor:
    run: Callable[[Tensor], Tensor] = getattr(_transports[transport], collective)
    # `psum` may write into what it is given, and x is the caller's.
    sent = x.detach().clone(memory_format=torch.contiguous_format) if collective == "psum" else x.detach().contiguous()
    shape = torch.Size((size, *x.shape)) if collective == "all_gather" else x.shape
    return _checked(run(sent), x, shape, collective, transport)


def _checked(returned: Any, x: Tensor, shape: torch.Size, collective: str, transport: str) -> Tensor:
    """Return what a transport returned, for x, if it is a tensor like that."""
    is_tensor = isinstance(returned, Tensor)
    if is_tensor and (returned.shape, returned.dtype, returned.device) == (shape, x.dtype, x.device):
        return returned.contiguous()  # type: ignore[no-any-return]  # as a compiler expects it
    got = f"{returned.dtype} {tuple(returned.shape)} on {returned.device}" if is_tensor else type(returned).__name__
    wanted = f"{collective} of {transport!r} to return a tensor, {x.dtype} {tuple(shape)} on {x.device}"
    raise TypeError(expected("transport", wanted, got, "inside of it, wait for a handle"))


def _shape(x: Tensor, size: int, collective: str, transport: str) -> Tensor:
    return x.new_empty((size, *x.shape) if collective == "all_gather" else x.shape)


_library = torch.library.Library("fn", "FRAGMENT")
_library.define("carry(Tensor x, int size, str collective, str transport) -> Tensor")
_library.impl("carry", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fn::carry", _shape, lib=_library)
