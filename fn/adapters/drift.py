"""Do all ranks still hold the same? A checksum of everything that is replicated, compared every so often.

A flipped bit in one rank's memory, a kernel that rounds differently, a learning rate that was changed on one rank only:
after that the ranks train different models, and nothing says so. One checksum per leaf travels, 8 bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fn.adapters.optim.consistency import checksum, device_among, first_difference
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.param_groups import host_tensor, names_of
from fn.adapters.optim.state_kinds import OWN, SAME, by_path, kinds
from fn.base import facts_of
from fn.collectives.agreement import check_agreement, describe
from fn.errors import RanksDrifted, expected


def check_drift(optimizer: Optimizer, every: int) -> RemovableHandle:
    """Compare before every `every`-th step what all ranks should hold alike, until the returned handle is removed.

    Compared are bits: of parameters, unless the optimizer leads each rank to some of its own, as 0/1 Adam does, of
    replicated state, of what param groups hold, such as learning rates, and of the schedule. All ranks must call it.

    Args: every: steps, at least 1. The cost is one pass over that memory and 8 bytes per tensor on the wire.
    Returns: a handle with `remove()`.
    Raises: ValueError if every is less than 1, and from `step`, before it moves anything, `RanksDrifted` on every rank,
        which names the first rank and leaf that differ from rank 0.
    """
    if every < 1:
        raise ValueError(expected("every", "a whole number of at least 1", f"{every}"))
    with optimizer.training.binding:
        for axis in optimizer.training.axes:
            check_agreement(axis, {"steps between drift checks": every, "steps": optimizer.steps}, _device(optimizer))
    since: list[int] = []

    def before_step(*args: Any) -> None:
        if optimizer.steps % every == 0:
            with torch.no_grad(), optimizer.training.binding:
                _compare(optimizer, since[-1] if since else None)
            since[:] = [optimizer.steps]

    return optimizer.register_step_pre_hook(before_step)


def _compare(optimizer: Optimizer, since: int | None) -> None:
    step, named = optimizer.steps, _replicated(optimizer)
    sums = torch.stack([checksum(x).to(_device(optimizer)) for x in named.values()])
    for axis in optimizer.training.axes:
        found = first_difference(sums, axis)
        if found is None:
            continue
        rank, leaf = found[0], list(named)[found[1]]
        cause = f"; the optimizer does not communicate over {axis!r}, for its `make` is given no axis"
        cause = "" if any(axis in facts_of(tx).axes for tx in optimizer.training.transforms) else cause
        last = "they were not compared earlier" if since is None else f"they were alike before step {since}"
        message = (
            f"ranks drifted apart: before step {step} {leaf} differs on rank {rank} of axis {axis!r} from rank 0; "
            f"{last}{cause}; look at what rank {rank} does differently, and resume from a checkpoint of before"
        )
        raise RanksDrifted(message, rank=rank, field=leaf, step=step, since=since)


def _device(optimizer: Optimizer) -> torch.device:
    return device_among([group["params"] for group in optimizer.param_groups])


def _replicated(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return by name what all ranks should hold alike."""
    marks = by_path(kinds(optimizer.states))
    found = _numbers(optimizer)  # first, for the rest follows from them
    found.update({path: leaf for path, leaf in by_path(optimizer.states).items() if marks[path] == SAME})
    if OWN not in marks.values():
        for g, group in enumerate(optimizer.param_groups):
            pairs = zip(names_of(group), group["params"], strict=True)
            found.update({f"params[{g}].{name}": p for name, p in pairs})
    return found


def _numbers(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return a checksum of schedule and phase, the learning rate of every param group and one of its other numbers."""
    found = {"schedule": _digest({**describe(optimizer.schedule), "phase": optimizer.phase.value})}
    for g, group in enumerate(optimizer.param_groups):
        found[f"groups[{g}].lr"] = host_tensor(group["lr"])
        others = {name: value for name, value in group.items() if name not in ("params", "lr", "param_names")}
        found[f"groups[{g}], hyper-parameters other than lr,"] = _digest(describe(others))
    return found


def _digest(described: dict[str, str]) -> Tensor:
    found = hashlib.blake2b(repr(sorted(described.items())).encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(found, "little") >> 1, dtype=torch.int64, device="cpu")
