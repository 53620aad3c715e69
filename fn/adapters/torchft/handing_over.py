"""How an island that is behind becomes a copy of one that is not.

Each of its ranks gets the state of the rank in the same place of one other island, over the process group of the
quorum. It is the same island for all ranks, the nearest: torchft's own healing takes another one for each, so that
ranks of one island would go on from the moments of different ones, and drift apart in silence.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from fn import roles, tree
from fn.adapters.optim.core import device_of
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.shards import pieces
from fn.adapters.optim.state_dict import numbers_of
from fn.adapters.torchft.pace import clock
from fn.collectives.agreement import describe, describe_numbers, gather_values
from fn.errors import expected
from fn.version import __version__

CHUNK = 1 << 22
"""Bytes that travel in one message: at 20 Mbit/s two seconds, far from any time-out."""


def state_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state dict of an optimizer with this rank's shard in the place of each DTensor."""
    return {path: pieces([x])[0] for path, x in optimizer.state_dict().items()}


ALLOWED = "FN_ISLAND_ALLOW"
"""The variable of the environment by which `python -m fn island --allow lr` permits a rate of one's own."""

RATE = "lr of param group "
"""How the name of a group's rate begins in what islands compare."""


def given_to(optimizer: Optimizer) -> dict[str, str]:
    """Return the numbers of the param groups, by name, for people; a scheduler has not changed them yet."""
    numbers = [(name, g, x) for g, group in enumerate(optimizer.param_groups) for name, x in numbers_of(group).items()]
    return {f"{name} of param group {g}": f"{x.item():.9g}" for name, g, x in numbers}


def made_of(optimizer: Optimizer, given: Mapping[str, str]) -> dict[str, str]:
    """Return what islands must share: version, method, schedule, numbers that were given, and the state's shapes."""
    state = state_of(optimizer)
    layout = {f"the layout of {path}": f"{x.dtype} {tuple(x.shape)}" for path, x in state.items()}
    return {"the version of fn": __version__, **describe((optimizer.make, optimizer.schedule)), **given, **layout}


def has_own_rate() -> bool:
    """Return whether this island may have a learning rate of its own."""
    return os.environ.get(ALLOWED) == "lr"


def check_made(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse an island that was made otherwise than the others, with a ValueError that names what differs."""
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    for name in differing if not has_own_rate() else [n for n in differing if not n.startswith(RATE)]:
        wanted = f"{name} to be {theirs.get(name, 'nothing')}, as on the other islands"
        cure = "python -m fn island --allow lr permits it, on all islands" if name.startswith(RATE) else None
        raise ValueError(expected("make", wanted, ours.get(name, "nothing"), *([cure] if cure else [])))


@torch.no_grad()
def become(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Become a copy of another island at its anchor, with nothing undelivered; a rate of one's own stays.

    Args: state: its state dict.
    """
    rates = {path: x for path, x in state_of(optimizer).items() if re.fullmatch(r"groups\.\d+\.lr", path)}
    optimizer.load_state_dict({**state, **(rates if has_own_rate() else {})})
    for unit in optimizer.units:
        for x, mark in zip(tree.leaves(unit.state), tree.leaves(roles.kinds(unit.state)), strict=True):
            if mark == roles.ERROR:
                x.zero_()
        anchor = roles.find(unit.state, "copies")[0]
        for p, x in zip(tree.leaves(unit.params), tree.leaves(anchor), strict=True):
            p.copy_(x)


def takers_of(
    optimizer: Optimizer, made: Mapping[str, str], axis: str, source: int, behind: Sequence[int], rank: int
) -> list[int]:
    """Return the islands that get the state of `source` in this place: those behind whose numbers are others.

    Islands that start alike get nothing. All islands call it, with the axis bound.

    Args: made: what `made_of` returned. source, behind: numbers of islands. rank: this island's.
    Raises: ValueError on an island that is behind, if it was made otherwise than the source.
    """
    device = device_of(optimizer)
    numbers = describe_numbers(state_of(optimizer))
    told = gather_values([_digest(made), _digest(numbers)], axis, device)
    if len({of_made for of_made, _ in told}) > 1:
        every = gather_values(made, axis, device)
        if rank in behind:
            check_made(made, every[source])
    return [i for i in behind if i != source and told[i][1] != told[source][1]]


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=8).hexdigest()


def hand_over(
    state: Mapping[str, Tensor], group: Any, rank: int, source: int, takers: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Return the state of the island `source` on its takers, elsewhere what it was given. All islands call it.

    Args: state: this island's. group: torchft's process group of this quorum, which does not know that this is `rank`.
        device: where it exchanges.
    Raises: RuntimeError if communication fails.
    """
    size, nothing = group.size(), [0] * group.size()
    # Into other memory: where the source is lost half way, this island's state is whole.
    taken = {path: x.new_empty(x.shape) for path, x in state.items()} if rank in takers else dict(state)
    # Each island cuts a state of the same shapes into the same messages, so that no lengths have to be sent.
    for parts in _messages([_bytes_of(x) for x in taken.values()] if takers else []):
        lengths = [piece.numel() for piece in parts]
        sends = [sum(lengths) if i in takers else 0 for i in range(size)] if rank == source else nothing
        gets = [sum(lengths) if i == source else 0 for i in range(size)] if rank in takers else nothing
        # Bytes (n,) from the source; (0,) from all others.
        message = torch.cat([piece.to(device) for piece in parts]) if rank == source else parts[0][:0].to(device)
        received = message.new_empty(sum(gets))
        # (n,) -> (takers * n,): the same bytes for each taker.
        group.alltoall_base(received, message.repeat(len(takers)), gets, sends, AllToAllOptions()).wait()
        if rank in takers:
            for piece, x in zip(parts, received.split(lengths), strict=True):
                piece.copy_(x)
    return taken


def measure(sources: Sequence[int], takers: Sequence[int], group: Any, rank: int, device: torch.device) -> list[float]:
    """Return how long a message of a healing takes from each island to this one; inf where none was sent.

    All islands call it. One that is healed is mostly a new process, of whose links nobody knows yet, so they are tried.

    Args: sources, takers: numbers of islands, those that have the state and those that need it. Else as `hand_over`.
    Raises: RuntimeError if communication fails.
    """
    seconds, message = [math.inf] * group.size(), torch.zeros(CHUNK, dtype=torch.uint8, device="cpu")
    for source in sources if len(sources) > 1 else ():
        began = clock()
        hand_over({"message": message}, group, rank, source, takers, device)
        if rank in takers:
            seconds[source] = clock() - began
    return seconds


def nearest(seconds: Sequence[Sequence[float]], sources: Sequence[int], takers: Sequence[int]) -> int:
    """Return the source whose slowest way to a taker is the fastest; the first of several, also where none is known.

    Args: seconds: by island, what `measure` returned there. sources, takers: as for it.
    """
    return min(sources, key=lambda source: (max((seconds[taker][source] for taker in takers), default=0.0), source))


def _bytes_of(x: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes; those of a contiguous one are its memory."""
    return x.detach().reshape(-1).view(torch.uint8)  # (...) -> (n,) -> (bytes,)


def _messages(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield views of vectors in groups of at most `CHUNK` elements."""
    message, length = list[Tensor](), 0
    for piece in (piece for part in parts for piece in part.split(CHUNK)):
        if message and length + piece.numel() > CHUNK:
            yield message
            message, length = [], 0
        message.append(piece)
        length += piece.numel()
    if length:
        yield message
