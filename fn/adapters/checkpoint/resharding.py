"""An optimizer's state for `torch.distributed.checkpoint`: what is one rank's own as rows (W, ...) of all ranks.

Rows are DTensors in `Shard(0)`: every rank writes its own, and any number of ranks can read them. On the same world a
rank gets its own row back, bit for bit. On another one errors and shards move as `fn.transforms.resharding` says, and
what else is a rank's own, such as 0/1 Adam's local momentum and parameters, becomes the mean of the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fn import tree
from fn.adapters.optim.consistency import OF_EACH_RANK, OWN, OWNED, by_path, device_among, kinds, owned_paths
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.signals import inside_step
from fn.adapters.optim.state_dict import ORDER, SAVED_BY, flat_state, place_of
from fn.adapters.optim.training import Training
from fn.collectives.primitives import psum
from fn.errors import expected
from fn.transforms.resharding import Move, Orders, Reshape, Rows, mean_of_rows, reshapes, rounds_off

Tree = Any

logger = logging.getLogger("fn")


def check_optimizer(optimizer: object) -> None:
    """Refuse anything but an optimizer with a TypeError, and a call inside of its step with a RuntimeError.

    So is one inside of `agreed_params`, whose params are not those that this rank goes on from.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(expected("optimizer", "an fn.Optimizer, after the folder", type(optimizer).__name__))
    if optimizer.training.shards.pairs:
        cure = "save opt.state_dict() with torch.distributed.checkpoint, which loads it on any number of ranks"
        wanted, got = "an optimizer of whole parameters", "one of DTensors, of which a rank has shards"
        raise ValueError(expected("optimizer", wanted, got, cure))
    optimizer.training.check_own_params("checkpoint")
    if inside_step():
        raise RuntimeError(
            "checkpoint: called inside of a step, by the handler of a signal, say, where the other ranks exchange the "
            "step's messages; let the handler set a flag, and call it on all ranks when `step` has returned"
        )


def world() -> tuple[int, int]:
    """Return this process' rank and how many there are."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def own_rows(training: Training) -> set[str]:
    """Return the keys of `everything` that are one rank's own.

    Raises: ValueError if there are some, but the optimizer's axes are not all ranks of the world; or for tensors that
        are owned within each of several islands.
    """
    marks = by_path(kinds(training.states))
    keys = {path for path, mark in marks.items() if mark in OF_EACH_RANK}
    if OWN in marks.values():  # these go with parameters of its own
        keys |= {key for key in everything(training) if key.startswith("params.")}
    if training.inside and OWNED in marks.values():
        axes = ", ".join(map(repr, training.inside))
        wanted = "tensors that are owned once, or by each rank of its own"
        got = f"fn.owned over {axes}, once in each island"
        cure = "save each rank's state_dict() in a file of its own"
        raise ValueError(expected("optimizer", wanted, got, cure))
    _, reached = place_of(training)
    if keys and reached != world()[1]:
        raise ValueError(
            f"optimizer: its axes reach {reached} of {world()[1]} ranks; a checkpoint in one folder needs all of them: "
            f"save each rank's state_dict() in a file of its own"
        )
    return keys


def everything(training: Training, extra: Tree = None) -> dict[str, Tensor]:
    """Return {key: tensor} of the optimizer's state, its parameters, and `extra`."""
    tensors = dict(flat_state(training))
    tensors.pop(SAVED_BY)
    for g, group in enumerate(training.groups):
        tensors.update({f"params.{g}.{i}": p.detach() for i, p in enumerate(group["params"])})
    if extra is not None:
        tensors.update(by_path(extra, "extra."))
    return tensors


class Snapshot(NamedTuple):
    """What is saved: copies on the CPU, of what is a rank's own as its row of a DTensor.

    steps: that the optimizer has taken. device: of the parameters. as_row: a tensor -> this rank's row of a DTensor.
    owned: the keys of what one rank saves for all, the one that owns it.
    """

    tensors: dict[str, Tensor]
    steps: int
    device: torch.device
    as_row: Callable[[Tensor], Tensor]
    owned: set[str]


def to_save(training: Training, extra: Tree = None) -> Snapshot:
    """Return a snapshot of `everything`. All ranks must call it. Raises: RuntimeError if a step is half written."""
    training.check_whole("checkpoint")
    own_keys, as_row = own_rows(training), partial(_as_row, mesh=_mesh())
    live = everything(training, extra).items()
    copies = {k: torch.empty(v.shape, dtype=v.dtype, device="cpu").copy_(v.detach()) for k, v in live}
    tensors = {k: as_row(v) if k in own_keys else v for k, v in copies.items()}
    return Snapshot(tensors, training.steps, device_among(training.groups), as_row, owned_paths(training.states))


def to_fill(own_keys: set[str], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Return empty tensors that a checkpoint with these shapes is read into; rows for those of one rank each."""
    mesh = _mesh()

    def empty(key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if key not in own_keys or mesh is None:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        _, count = _span(shape[0])
        # Made of this rank's rows alone: a DTensor of the whole would take the memory of all ranks' rows.
        local = torch.zeros((count, *shape[1:]), dtype=dtype, device="cpu")
        stride = torch.empty(shape, dtype=torch.float32, device="meta").stride()
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
    most = -(-rows // size)
    first = min(rank * most, rows)
    return first, min(first + most, rows) - first


def moved(training: Training, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return {key: tensor} for this world from what another one saved, or version 0.2.0 did. All ranks must call it.

    Args: saved: `everything`; what is one rank's own as `Rows`.
    Raises: ValueError for several axes, and if the rows do not fit the layout of the number of ranks they come from.
    """
    axes = training.axes
    if len(axes) > 1:
        raise ValueError(f"checkpoint: is of another world, and its errors of the axes {axes} belong to that one")
    if len(training.transforms) != len(training.groups):
        raise ValueError("checkpoint: is of another world; those of DeepSpeed's drop-ins fit only their own")
    # Each rank has read some of the rows, and all of them are added up: those of all ranks that saved.
    add = partial(_over_ranks, axis=axes[0] if axes else None, device=device_among(training.groups))
    orders = [_orders_of(g, params, saved) for g, params in enumerate(training.params)]
    with training.binding:
        fresh, notes, order_of_note = [], list[tuple[Tree, Reshape]](), list[Orders]()
        for transform, group, order in zip(training.transforms, training.groups, orders, strict=True):
            with reshapes.collected() as notes_of_group:
                fresh.append(transform.init([p.detach() for p in group["params"]]))
            notes += notes_of_group
            order_of_note += [order] * len(notes_of_group)
        no_rows = Rows(torch.empty(0, dtype=torch.float32, device="cpu"), 0, 1)
        some_rows = next((x for x in saved.values() if isinstance(x, Rows)), no_rows)
        move = Move(notes, some_rows, add, order_of_note)
        structure = tree.flatten(tuple(fresh))[1]
        saved_state = {path: saved.get(path, x) for path, x in by_path(tuple(fresh)).items()}  # others own the rest
        here = by_path(move.walk(tuple(fresh), tree.unflatten(structure, [*saved_state.values()])))
        for key, value in saved.items():
            if not key.startswith(("state.", ORDER)):
                here[key] = mean_of_rows(value, add) if isinstance(value, Rows) else value
    if rounds_off(saved_state.values()):
        logger.warning("checkpoint: its errors were rounded anew; up to one step of their codes is lost")
    return here


def _orders_of(g: int, params: Sequence[Tensor], saved: Mapping[str, Any]) -> Orders:
    """Return in which order of dimensions version 0.2.0 laid the elements of a group's tensors into vectors.

    There tensors in channels_last, for one, travelled as they lay in memory; () where all went in the order of shapes.
    """
    orders = []
    for i, p in enumerate(params):
        order = tuple(saved[f"{ORDER}{g}.{i}"].tolist()) if f"{ORDER}{g}.{i}" in saved else ()
        if order and sorted(order) != [*range(p.dim())]:
            wanted = f"'{ORDER}{g}.{i}' to be an order of {p.dim()} dimensions"
            raise ValueError(expected("checkpoint", wanted, f"{order}"))
        orders.append(order)
    return orders if any(orders) else ()


def _over_ranks(addends: Tree, axis: str | None, device: torch.device) -> Tree:
    """Add up what each rank read, on the CPU; on the device of the parameters, where the axis' group has a backend."""
    if axis is None:
        return addends
    return tree.map(lambda x: psum(x.to(device), axis).to(x.device), addends)
