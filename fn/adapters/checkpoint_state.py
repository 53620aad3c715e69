"""An optimizer's state for `torch.distributed.checkpoint`: what is one rank's own as rows (W, ...) of all ranks.

Rows are DTensors in `Shard(0)`: every rank writes its own, and any number of ranks can read them. On the same world a
rank gets its own row back, bit for bit. On another one errors and shards move as `fn.transforms.resharding` says, and
what else is a rank's own, such as 0/1 Adam's local momentum and parameters, becomes the mean of the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fn import tree
from fn.adapters.carried import PREFIX
from fn.adapters.rank_checks import device_among
from fn.adapters.state_dict import OWN, SAME, SAVED_BY, flat_state, kinds
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.primitives import psum
from fn.transforms.resharding import Reshape, reshapes
from fn.transforms.sharded import ShardedState

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer

Tree = Any

logger = logging.getLogger("fn")


class Rows(NamedTuple):
    """Some rows of what was saved: (k, ...) from row `first` of `world`."""

    rows: Tensor
    first: int
    world: int


def world() -> tuple[int, int]:
    """Return this process' rank and how many there are."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def own_rows(optimizer: Optimizer) -> set[str]:
    """Return the keys of `everything` that are one rank's own.

    Raises: ValueError if there are some, but the optimizer's axes are not all ranks of the world.
    """
    marks = tree.leaves(kinds(optimizer.states))
    found = {f"state.{p}" for p, m in zip(tree.paths(optimizer.states), marks, strict=True) if m != SAME}
    if OWN in marks:  # such an optimizer also leads each rank to parameters of its own
        found |= {key for key in everything(optimizer) if key.startswith("params.")}
    reached = 1
    for axis in optimizer._axes:
        reached *= optimizer._binding.axes[axis].size
    if found and reached != world()[1]:
        raise ValueError(
            f"optimizer: its axes reach {reached} of {world()[1]} ranks; a checkpoint in one folder needs all of them: "
            f"save each rank's state_dict() in a file of its own"
        )
    return found


def everything(optimizer: Optimizer, extra: Tree = None) -> dict[str, Tensor]:
    """Return {key: tensor} of the optimizer's state, its parameters, and `extra`, which is the same on all ranks."""
    found = dict(flat_state(optimizer))
    found.pop(SAVED_BY)
    for g, group in enumerate(optimizer.param_groups):
        found.update({f"params.{g}.{i}": p.detach() for i, p in enumerate(group["params"])})
    if extra is not None:
        found.update({f"extra.{path}": x for path, x in zip(tree.paths(extra), tree.leaves(extra), strict=True)})
    return found


def to_save(optimizer: Optimizer, extra: Tree = None) -> dict[str, Tensor]:
    """Return copies on the CPU of `everything`, a rank's own as its row of a DTensor."""
    own, mesh = own_rows(optimizer), _mesh()
    copies = {k: torch.empty_like(v, device="cpu").copy_(v.detach()) for k, v in everything(optimizer, extra).items()}
    return {k: _as_row(v, mesh) if k in own else v for k, v in copies.items()}


def to_fill(own: set[str], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Return empty tensors that a checkpoint with these shapes is read into; rows for the keys in `own`."""
    mesh = _mesh()

    def empty(key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if key not in own or mesh is None:
            return torch.zeros(shape, dtype=dtype)
        _, count = _span(shape[0])
        local = torch.zeros((count, *shape[1:]), dtype=dtype)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    return {key: empty(key, *form) for key, form in shapes.items()}


def local_rows(x: Tensor) -> Rows:
    """Return the rows of a filled tensor that this rank has."""
    if isinstance(x, DTensor):
        return Rows(x.to_local(), _span(x.shape[0])[0], x.shape[0])
    return Rows(x, 0, x.shape[0])


def _mesh() -> DeviceMesh | None:
    return init_device_mesh("cpu", (world()[1],)) if world()[1] > 1 else None


def _as_row(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    return x[None] if mesh is None else DTensor.from_local(x[None], mesh, [Shard(0)], run_check=False)


def _span(rows: int) -> tuple[int, int]:
    """Return first and number of the rows that `Shard(0)` gives this rank."""
    rank, size = world()
    each = -(-rows // size)
    first = min(rank * each, rows)
    return first, min(first + each, rows) - first


def moved(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return {key: tensor} for this world from what another one saved. All ranks must call it.

    Args: saved: `everything`; what is one rank's own as `Rows`.
    Raises: ValueError for several axes, and if the rows do not fit the layout of the number of ranks they come from.
    """
    axes = optimizer._axes
    if len(axes) > 1:
        raise ValueError(f"checkpoint: is of another world, and its errors of the axes {axes} belong to that one")
    if len(optimizer._transforms) != len(optimizer.param_groups):
        raise ValueError("checkpoint: is of another world; those of DeepSpeed's drop-ins fit only their own")
    add = partial(_over_ranks, axis=axes[0] if axes else None, device=device_among(optimizer.param_groups))
    with optimizer._binding:
        fresh, notes = [], list[list[tuple[Tree, Reshape]]]()
        for transform, group in zip(optimizer._transforms, optimizer.param_groups, strict=True):
            with reshapes.collected() as own:
                fresh.append(transform.init([p.detach() for p in group["params"]]))
            notes.append(own)
        move = _Move([note for own in notes for note in own], saved, add, [])
        after = move.states(tuple(fresh))
        found = {f"state.{p}": x for p, x in zip(tree.paths(after), tree.leaves(after), strict=True)}
        for key, value in saved.items():
            if not key.startswith("state."):
                found[key] = _mean(value, add) if isinstance(value, Rows) else value
    for g, own in enumerate(notes):
        rests = [rest for state, rest in move.rests if any(state is s for s, _ in own)]
        if len(rests) == 1 and len(rests[0]) == len(optimizer.param_groups[g]["params"]):
            found.update(_carried(g, rests[0], saved))
        elif rests:
            logger.warning("param group %d is parted among transforms: its errors moved, to 8 bits", g)
    return found


def _carried(g: int, rest: list[Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a param group carries: what its errors do not hold, and what it carried before."""
    keys = [f"{PREFIX}{g}.{i}" for i in range(len(rest))]
    return {k: (r + saved[k].double() if k in saved else r).float() for k, r in zip(keys, rest, strict=True)}


class _Move(NamedTuple):
    notes: Sequence[tuple[Tree, Reshape]]
    saved: Mapping[str, Any]
    add: Callable[[Tree], Tree]
    rests: list[tuple[Tree, list[Tensor]]]

    def states(self, fresh: Tree) -> Tree:
        paths, structure = tree.paths(fresh), tree.flatten(fresh)[1]
        found = [self.saved[f"state.{path}"] for path in paths]
        some = next((x for x in found if isinstance(x, Rows)), None)
        rows = 0 if some is None else some.rows.shape[0]
        zeros = [x.rows.new_zeros(x.rows.shape[1:]) if isinstance(x, Rows) else x for x in found]
        none = tree.unflatten(structure, zeros)
        each = [
            tree.unflatten(structure, [x.rows[j] if isinstance(x, Rows) else x for x in found]) for j in range(rows)
        ]
        first, world = (0, 1) if some is None else (some.first, some.world)
        return self._walk(fresh, tree.unflatten(structure, found), none, each, first, world)

    def _walk(self, fresh: Tree, found: Tree, none: Tree, each: list[Tree], first: int, world: int) -> Tree:
        for state, reshape in self.notes:
            if state is fresh:
                total = self._total(reshape, none, each, first, world)
                after = reshape.adopt(total, fresh)
                if reshape.rest is not None:
                    self.rests.append((fresh, reshape.rest(total, after)))
                return after
        if isinstance(fresh, ErrorFeedbackState | ShardedState):
            raise ValueError("checkpoint: is of another world, and nothing says how errors of several axes move")
        if isinstance(found, Rows):
            return _mean(found, self.add).to(fresh)
        if isinstance(fresh, Tensor):
            return found
        keys = fresh if isinstance(fresh, dict) else range(len(fresh))
        below = [self._walk(fresh[k], found[k], none[k], [e[k] for e in each], first, world) for k in keys]
        if isinstance(fresh, dict):
            return dict(zip(keys, below, strict=True))
        return type(fresh)(*below) if hasattr(fresh, "_fields") else type(fresh)(below)

    def _total(self, reshape: Reshape, none: Tree, each: list[Tree], first: int, world: int) -> Tree:
        try:
            total = tree.map(torch.zeros_like, reshape.addends(none, world, 0))
            for j, state in enumerate(each):
                total = tree.map(torch.add, total, reshape.addends(state, world, first + j))
        except (RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"checkpoint: its errors do not fit these parameters on {world} ranks: {error}"
            ) from error
        return self.add(total)


def _over_ranks(addends: Tree, axis: str | None, device: torch.device) -> Tree:
    """Add up what each rank read, on the CPU; on the device of the parameters, where the axis' group has a backend."""
    if axis is None:
        return addends
    return tree.map(lambda x: psum(x.to(device), axis).to(x.device), addends)


def _mean(x: Rows, add: Callable[[Tree], Tree]) -> Tensor:
    mean: Tensor = add(x.rows.double().sum(0)) / x.world
    return mean.to(x.rows.dtype) if x.rows.is_floating_point() else mean.round().to(x.rows.dtype)
