"""An optimizer's state for `torch.distributed.checkpoint`: what is one rank's own as rows (W, ...) of all ranks.

Rows are DTensors in `Shard(0)`: every rank writes its own, and any number of ranks can read them. On the same world a
rank gets its own row back, bit for bit. On another one errors and shards move as `fn.transforms.resharding` says, and
what else is a rank's own, such as 0/1 Adam's local momentum and parameters, becomes the mean of the rows.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fn import tree
from fn.adapters.checkpoint.compare import EXTRA
from fn.adapters.optim.core import Core, device_of
from fn.adapters.optim.state_dict import flat_state, marks_of, place_of
from fn.base import facts_of
from fn.collectives.transports.tcp import tell_all
from fn.errors import expected
from fn.roles import OF_EACH_RANK, OWN, OWNED
from fn.transforms.resharding import Move, Rows, mean_of_rows, reshapes, rounds_off

Tree = Any

logger = logging.getLogger("fn")

EACH = "each rank's "
"""The beginning of the keys of rows, one of every rank that saved."""


def world() -> tuple[int, int]:
    """Return this process' rank and how many there are."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def everything(core: Core, extra: Tree = None) -> dict[str, Tensor]:
    """Return {key: tensor} of the optimizer's state, its parameters, and `extra`."""
    tensors = flat_state(core) | params_of(core)
    return tensors if extra is None else tensors | tree.by_path(extra, EXTRA)


def params_of(core: Core) -> dict[str, Tensor]:
    """Return {key: tensor} of the optimizer's parameters."""
    groups = [group["params"] for group in core.param_groups]
    return {f"params.{g}.{i}": p.detach() for g, params in enumerate(groups) for i, p in enumerate(params)}


def own_keys(core: Core) -> set[str]:
    """Return the keys of `everything` that are one rank's own.

    Raises: ValueError if there are some, but the optimizer's axes are not all ranks of the world; or for tensors that
        are owned within each of several islands.
    """
    marks, cure = marks_of(core), "save each rank's state_dict() in a file of its own"
    keys = {path for path, mark in marks.items() if mark in OF_EACH_RANK}
    if OWN in marks.values():  # these go with parameters of its own
        keys |= params_of(core).keys()
    inside = [axis for unit in core.units for axis in facts_of(unit.transform).inside]
    if inside and OWNED in marks.values():
        got = f"fn.owned over {', '.join(map(repr, inside))}, once in each island"
        raise ValueError(expected("optimizer", "tensors that are owned once, or by each rank of its own", got, cure))
    reached, size = place_of(core)[1], world()[1]
    if keys and reached != size:
        text = f"optimizer: its axes reach {reached} of {size} ranks; a checkpoint in one folder needs all of them"
        raise ValueError(f"{text}: {cure}")
    return keys


class Snapshot(NamedTuple):
    """The contents of a checkpoint: copies on the CPU.

    own: keys of one rank's own. owned: keys of what one rank saves for all, the one that owns it. steps: that the
    optimizer has taken. mesh: of all ranks; None for a process that is alone.
    """

    tensors: dict[str, Tensor]
    own: set[str]
    owned: set[str]
    steps: int
    mesh: DeviceMesh | None

    def rows(self, differing: set[str]) -> dict[str, Tensor]:
        """Return the tensors to save, with this rank's row of all that differs. differing: more keys that do."""
        own = self.own | differing
        return {EACH + k if k in own else k: self._row(x) if k in own else x for k, x in self.tensors.items()}

    def _row(self, x: Tensor) -> Tensor:
        # (...) -> (1, ...), this rank's row of (W, ...). Unchecked, for rows differ by their nature.
        return x[None] if self.mesh is None else DTensor.from_local(x[None], self.mesh, [Shard(0)], run_check=False)


def to_save(core: Core, extra: Tree = None) -> Snapshot:
    """Return a snapshot of `everything`. All ranks must call it."""
    own, owned = own_keys(core), {path for path, mark in marks_of(core).items() if mark == OWNED}
    # Copies, for `save_async` writes while the training goes on; on the CPU a plain `.cpu()` would be no copy.
    copies = {key: torch.empty_like(x, device="cpu").copy_(x.detach()) for key, x in everything(core, extra).items()}
    if len(core.axes) > 1:
        copies |= _of_one_shape({key: copies[key] for key in sorted(own)})
    return Snapshot(copies, own, owned, core.steps, _mesh())


def _of_one_shape(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's own tensors in the shapes of those of other ranks: rows of one tensor have one shape.

    Over two axes errors of `fn.owned` lie on those ranks only that send a tensor. In the place of none there is NaN.
    """
    shapes: list[Any] = [{key: x.shape for key, x in own.items()}]
    if world()[1] > 1:
        shapes = tell_all(shapes[0], None, "checkpoint.save")
    largest = {key: max((of_rank[key] for of_rank in shapes), key=torch.Size.numel) for key in own}
    blank = {key: math.nan if x.dtype.is_floating_point else 0 for key, x in own.items()}
    return {key: x if x.numel() else x.new_full(largest[key], blank[key]) for key, x in own.items()}


def of_this_rank(core: Core, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was read on as many ranks as saved it, with this rank's own of what all ranks have."""
    live = flat_state(core)
    rows = {key: x.rows[0] if isinstance(x, Rows) else x for key, x in found.items()}
    return {key: x if key not in live or live[key].numel() else live[key] for key, x in rows.items()}


def _mesh() -> DeviceMesh | None:
    return init_device_mesh("cpu", (world()[1],)) if world()[1] > 1 else None


def to_fill(forms: Mapping[str, tuple[torch.Size, torch.dtype]], old: int) -> dict[str, Tensor]:
    """Return tensors that a checkpoint of `old` ranks is read into, of rows those that this rank reads.

    On another number of ranks all read what has no mean, such as a random generator's state.
    """
    mesh, size = _mesh(), world()[1]

    def empty(key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        # What has no mean is read whole, (W', ...), where the worlds differ: all ranks are given its first row.
        is_whole = not key.startswith(EACH) or (old != size and _has_no_mean(key, dtype))
        if is_whole or mesh is None:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return dtensors.zeros(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])

    return {key: empty(key, *form) for key, form in forms.items()}


def _has_no_mean(key: str, dtype: torch.dtype) -> bool:
    return key.removeprefix(EACH).startswith(EXTRA) and not dtype.is_floating_point


def read(filled: Mapping[str, Tensor], old: int) -> dict[str, Any]:
    """Return the tensors that were read, by the keys of `everything`; those of each rank alone as `Rows`."""
    rank, size = world()
    first = min(rank * -(-old // size), old)  # as `Shard` divides them
    found: dict[str, Any] = {}
    for key, x in filled.items():
        # (W', ...) -> the rows of it that lie on this rank, the first of which is number `first`.
        rows = Rows(x.to_local(), first, old) if isinstance(x, DTensor) else Rows(x, 0, old)
        found[key.removeprefix(EACH)] = rows if key.startswith(EACH) else x
    return found


def convert(core: Core, saved: Mapping[str, Any], old: int) -> dict[str, Tensor]:
    """Return {key: tensor} for this world from what another one saved. All ranks must call it.

    Floating-point numbers of `extra` become their mean over the ranks that saved, as parameters of each rank's own do,
    so that a model's state dict agrees with what the optimizer loads. Others have no mean: all get rank 0's.

    Raises: ValueError for errors of several axes, but those of `fn.owned`, and if the rows do not fit the layout of the
        number of ranks they come from.
    """
    size, add = world()[1], partial(_over_ranks, device=device_of(core))
    with core.binding, reshapes.collected() as notes:
        fresh = tuple(unit.transform.init(tree.map(Tensor.detach, unit.params)) for unit in core.units)
        states = {path: saved.get(path, x) for path, x in tree.by_path(fresh, "state.").items()}  # others own the rest
        none = Rows(torch.empty(0, dtype=torch.float32, device="cpu"), 0, old)
        # Of all leaves the same rows lie here, so any of them tells which.
        some = next((x for x in states.values() if isinstance(x, Rows)), none)
        there = tree.unflatten(tree.flatten(fresh)[1], [*states.values()])
        here = tree.by_path(Move(notes, some, add, core.axes).walk(fresh, there), "state.")
    firsts = []
    for key, x in saved.items():
        if isinstance(x, Rows) and _has_no_mean(key, x.rows.dtype):
            firsts.append(key.removeprefix(EXTRA))
            here[key] = x.rows[0]
        elif not key.startswith("state."):
            here[key] = mean_of_rows(x, add) if isinstance(x, Rows) else x
    if firsts:
        more = f" and {len(firsts) - 3} more" if len(firsts) > 3 else ""
        text = f"extra: {', '.join(map(repr, sorted(firsts)[:3]))}{more} differed between the {old} ranks that saved"
        warnings.warn(f"{text}; on {size} ranks all load what rank 0 had", stacklevel=3)
    if rounds_off(states.values()):
        logger.warning("checkpoint: its errors were rounded anew; up to one step of their codes is lost")
    return here


def _over_ranks(addends: Tree, device: torch.device) -> Tree:
    """Add up what each rank has read, on the device of the parameters, where the default group has a backend."""

    def total(x: Tensor) -> Tensor:
        # A copy: the sum is made in place, and what was read may be asked for again.
        on_device = x.to(device, copy=True)
        dist.all_reduce(on_device)
        return on_device.to(x.device)

    return tree.map(total, addends) if world()[1] > 1 else addends
