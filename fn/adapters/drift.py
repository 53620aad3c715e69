"""Do all ranks still hold the same? A checksum of everything that is replicated, compared every so often.

A flipped bit in one rank's memory, a kernel that rounds differently, a learning rate that was changed on one rank only:
after that the ranks train different models, and nothing says so. A checksum of every leaf is compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fn import roles, tree
from fn.adapters.optim.core import device_of
from fn.adapters.optim.groups import names_of
from fn.adapters.optim.hooks.agree import axes_of_calls, compare_on_axes
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.shards import pieces
from fn.arguments import check_whole, checked
from fn.base import facts_of
from fn.collectives.agreement import (
    calling,
    check_agreement,
    describe,
    describe_numbers,
    differences,
    digest,
    gather_values,
)
from fn.errors import RanksDrifted
from fn.roles import OWN, SAME


@checked("optimizer")
def check_drift(optimizer: Optimizer, every: int) -> RemovableHandle:
    """Compare before every `every`-th step what all ranks should hold alike, until the returned handle is removed.

    Compared are bits: of parameters, unless the optimizer leads each rank to some of its own, as 0/1 Adam does, of
    replicated state, of what param groups hold, such as learning rates, and of the schedule. All ranks must call it.

        >>> import fn
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> opt = fn.Optimizer([p], fn.adamw, lr=0.1)
        >>> handle = check_drift(opt, every=100)        # before steps 0, 100, 200, ...
        >>> handle.remove()

    Args: every: steps, at least 1. The cost is one pass over that memory and 16 bytes on the wire.
    Returns: a handle with `remove()`.
    Raises: ValueError if every is less than 1, and from `step`, before it moves anything, `RanksDrifted` on every rank,
        which names the first rank and leaf that differ from rank 0.
    """
    check_whole("every", every, 1)
    device, fields = device_of(optimizer), {"steps between drift checks": every, "steps": optimizer.steps}
    with optimizer.binding, calling("check_drift", axes_of_calls(optimizer), device):
        compare_on_axes(optimizer.axes, lambda axis: check_agreement(axis, fields, device), device)
    since: list[int] = []

    def before_step(*args: Any) -> None:
        if optimizer.steps % every == 0:
            # A hook runs before `step` binds the axes.
            with torch.no_grad(), optimizer.binding:
                _compare(optimizer, since[-1] if since else None)
            since[:] = [optimizer.steps]

    return optimizer.register_step_pre_hook(before_step)


def _compare(optimizer: Optimizer, since: int | None) -> None:
    step, replicated, device = optimizer.steps, _replicated(optimizer), device_of(optimizer)
    drifted = partial(RanksDrifted, step=step, since=since)

    def compare(axis: str) -> None:
        for difference in differences(replicated, partial(gather_values, axis=axis, device=device)):
            cause = f"; the optimizer does not communicate over {axis!r}, for its `make` is given no axis"
            cause = "" if any(axis in facts_of(unit.transform).axes for unit in optimizer.units) else cause
            last = "they were not compared earlier" if since is None else f"they were alike before step {since}"
            leaf, rank = difference.name, difference.rank
            message = (
                f"ranks drifted apart: before step {step} {leaf} differs on rank {rank} of axis {axis!r} from rank 0; "
                f"{last}{cause}; look at what rank {rank} does differently, and resume from a checkpoint of before"
            )
            raise drifted(message, rank=rank, field=leaf)

    # The header has a digest. Over an axis of shards it may differ without a fault.
    word = int.from_bytes(digest(sorted(replicated.items()), 8), "little", signed=True)
    with calling("check_drift", axes_of_calls(optimizer), device, word) as words:
        if len(set(words)) > 1:
            compare_on_axes(optimizer.axes, compare, device, drifted)


def _replicated(optimizer: Optimizer) -> dict[str, str]:
    """Return by name, as text, what all ranks should hold alike."""
    values = _hyper_parameters(optimizer)  # first, for the rest follows from them
    marks = tree.by_path(roles.kinds(optimizer.states), "state.")
    tensors = {path: leaf for path, leaf in tree.by_path(optimizer.states, "state.").items() if marks[path] == SAME}
    # Where states go with params of each rank's own, as 0/1 Adam's do, params differ without a fault.
    if OWN not in marks.values():
        for g, group in enumerate(optimizer.param_groups):
            pairs = zip(names_of(group), pieces(group["params"]), strict=True)
            tensors.update({f"params[{g}].{name}": p for name, p in pairs})
    return values | describe_numbers(tensors)


def _hyper_parameters(optimizer: Optimizer) -> dict[str, str]:
    """Return schedule and phase, and of every param group the learning rate and its other hyper-parameters."""
    values = {"schedule": _text({**describe(optimizer.schedule), "phase": optimizer.phase.value})}
    for g, group in enumerate(optimizer.param_groups):
        values[f"groups[{g}].lr"] = repr(float(group["lr"]))
        others = {name: value for name, value in group.items() if name not in ("params", "lr", "param_names")}
        values[f"groups[{g}], hyper-parameters other than lr,"] = _text(describe(others))
    return values


def _text(described: dict[str, str]) -> str:
    return str(sorted(described.items()))  # ranks may have written their param group's keys in another order
