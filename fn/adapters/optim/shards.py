"""Parameters that FSDP2 has divided among the ranks of an island: an optimizer steps on this rank's pieces.

    mesh = init_device_mesh("cuda", (islands, ranks), mesh_dim_names=("island", "shard"))
    fully_shard(model, mesh=mesh["shard"])                  # averages gradients within an island
    with fn.bind(mesh["island"]):               # across islands, local steps
        opt = fn.Optimizer(model.parameters(), partial(fn.diloco, axis="island"), schedule=fn.every(100))

FSDP2's parameters are DTensors. What is stepped is the piece of each that lies on this rank. The ranks that hold the
same pieces, one of each island, communicate with each other.

Optimizers whose `make` takes `shards`, as `fn.muon` and `fn.muloco` do, are told how the DTensors are divided. They
bring whole matrices together over that axis, which is bound for them:

    opt = fn.Optimizer(model.parameters(), fn.muon, labels=fn.labels_of(model), lr=0.02)

Their state is divided as the parameters are: a state dict has DTensors of it, which `torch.distributed.checkpoint`
saves once and loads on any number of ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fn import tree
from fn.base import Transform, facts_of
from fn.collectives.axis import ALONE, Axis, Binding, bind
from fn.collectives.carriers import group_of
from fn.collectives.primitives import psum
from fn.collectives.transports.named_group import new_named_group
from fn.collectives.transports.registry import registered
from fn.errors import expected
from fn.kernels.lists import squared_norms
from fn.transforms.unsharded import Boxes, Shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Tree = Any


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Tell whether x is a DTensor. What defines them takes as long to import as half of torch: it is not imported here.

    Until somebody has imported it, there is none.
    """
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def has_dtensors(tensors: Iterable[object]) -> bool:
    """Tell whether there are DTensors among tensors: of hundreds it takes as long as of one, for all are of a class."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(issubclass(own, kind) for own in {*map(type, tensors)})


def pieces(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's piece of each DTensor, in its memory, and others as they are; the very list without any."""
    if not has_dtensors(tensors):
        return tensors
    with torch.no_grad():  # then it is the same object in each step, by which kernels know that nothing has changed
        return [x.to_local() if is_dtensor(x) else x for x in tensors]


def placed(grad: Tensor, p: Tensor) -> Tensor:
    """Return a gradient that lies as its parameter does: one of a replicated DTensor may come as sums of the ranks."""
    if not is_dtensor(grad) or not is_dtensor(p) or grad.placements == p.placements:
        return grad
    with torch.no_grad():
        moved: Tensor = grad.redistribute(p.device_mesh, p.placements)
    return moved


def as_dtensor(piece: Tensor, like: DTensor) -> Tensor:
    """Return a tensor of this rank as its piece of a DTensor that is divided as another one; in the same memory."""
    from torch.distributed.tensor import DTensor

    # Unchecked, for a check communicates, and a rank may save alone. With the whole shape, which cannot be calculated
    # from pieces of unequal size.
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


class Division(NamedTuple):
    """How the DTensors of a param group are divided. groups: the ranks that have their pieces, by the axis' name."""

    shards: Shards
    groups: dict[str, dist.ProcessGroup]

    def bound(self, binding: Binding) -> Binding:
        """Return the binding with the axes added. Raises: ValueError if other ranks are bound to a name of theirs."""
        for name, group in self.groups.items():
            there = binding.axes.get(name)
            # The mesh axis is bound for `make` under its own name; the user bound the optimizer's axes only.
            if there is None:
                binding = Binding({**binding.axes, **bind({name: group}).axes})
            elif _ranks_of(there) != dist.get_process_group_ranks(group):
                cure = "give one of the two another name, in mesh_dim_names or in fn.bind"
                got = f"other ranks than those of the mesh axis {name!r}, over which the DTensors are divided"
                raise ValueError(expected("params", f"no other ranks to be bound to {name!r}", got, cure))
        return binding


def _ranks_of(bound: Axis) -> list[int] | None:
    """Return the ranks that are bound to an axis; None of one rank alone and of transports without process groups."""
    if bound.transport == ALONE or bound.transport in registered:
        return None
    return dist.get_process_group_ranks(group_of(bound.transport))


def division_of(params: Sequence[Tensor]) -> Division | None:
    """Return how the DTensors of a param group are divided; None without any.

    A tensor that is divided over several axes of its mesh is divided over the ranks of all of them, which torch makes a
    group of: every rank comes here when the optimizer is made.

    Raises: ValueError if a DTensor is cut along several mesh axes that have no names.
    """
    dims, names, groups, meshes = list[int | Boxes | None](), list[str](), dict[str, dist.ProcessGroup](), set[str]()
    for i, p in enumerate(params):
        dims.append(None)
        names.append("")
        if not is_dtensor(p):
            continue
        mesh, placements, by_name = p.device_mesh, p.placements, p.device_mesh.mesh_dim_names
        cuts = [j for j, q in enumerate(placements) if not q.is_replicate()]
        if len(cuts) == 1:
            dims[-1] = placements[cuts[0]].dim  # type: ignore[attr-defined]
        elif cuts and not by_name:
            wanted = f"parameter {i} to be on a mesh with names of its axes"
            cure = "give init_device_mesh mesh_dim_names"
            raise ValueError(expected("params", wanted, f"the mesh {mesh}", cure))
        if cuts:
            names[-1], group = ranks_of(mesh, cuts)
            if groups.setdefault(names[-1], group).group_name != group.group_name:
                wanted = f"the DTensors of a param group to be divided over {names[-1]!r} among the same ranks"
                raise ValueError(expected("params", wanted, "two groups of ranks", "give each a group of its own"))
        if len(cuts) > 1:
            dims[-1] = boxes_of(mesh, placements, p.shape, tuple(dist.get_process_group_ranks(group)))
        if mesh.ndim > 1 and by_name:
            meshes.add("_".join(by_name))
            groups.update([ranks_of(mesh, range(mesh.ndim))])
    if not any(names):
        return None
    first = next(filter(None, names))
    axes = tuple(name or first for name in names)  # what is not divided lies with any
    shapes, axis = tuple(tuple(p.shape) for p in params), first if len({*axes}) == 1 else axes
    # Replicas skip a step together, too: one that saw a NaN alone would go apart from the others.
    return Division(Shards(axis, shapes, tuple(dims), beside=tuple(sorted(meshes))), groups)


def ranks_of(mesh: DeviceMesh, dims: Sequence[int]) -> tuple[str, dist.ProcessGroup]:
    """Return the ranks along some axes of a mesh, and a name for them; those along several are made a group of."""
    by_name = mesh.mesh_dim_names or ("shard",)
    if len(dims) == 1:
        return by_name[dims[0]] if mesh.mesh_dim_names else "shard", mesh.get_group(dims[0])
    made, key = _GROUPS.setdefault(dist.group.WORLD, {}), (mesh, *dims)
    if key not in made:
        place: Any = mesh.get_coordinate()
        along = mesh.mesh[tuple(slice(None) if j in dims else i for j, i in enumerate(place))]
        ranks = tuple(sorted(along.flatten().tolist()))
        if ranks not in made:
            made[ranks] = _group_of_ranks(ranks)
        made[key] = made[ranks]
    return "_".join(by_name[j] for j in dims), made[key]


_GROUPS: WeakKeyDictionary[Any, dict[tuple[Any, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Of each world the groups of several axes, by ranks, and by the mesh and its axes."""


def _group_of_ranks(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    # Not that of the mesh's `_flatten`: of a mesh that has one, torch (2.12 and 2.13) gathers a dimension that several
    # axes cut in one message, as if it was cut once, and `full_tensor()` has zeros in it where pieces are uneven.
    return new_named_group(f"fn {hashlib.sha1(str(ranks).encode()).hexdigest()}", ranks)


@cache
def boxes_of(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, ranks: tuple[int, ...]) -> Boxes:
    """Return what each of some ranks has of a tensor that is divided over several axes of a mesh."""
    cuts = [j for j, q in enumerate(placements) if not q.is_replicate()]
    # An interleaved placement cuts what those behind it have cut before.
    order = [j for j in cuts if not hasattr(placements[j], "split_factor")]
    order += [j for j in reversed(cuts) if hasattr(placements[j], "split_factor")]
    starts, sizes = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for rank in ranks:
        place = (mesh.mesh == rank).nonzero()[0].tolist()
        start, size = [0] * len(shape), [*shape]
        for j in order:
            dim = placements[j].dim
            rows = -(-size[dim] // mesh.size(j))  # as torch.chunk
            begin = min(place[j] * rows, size[dim])
            start[dim], size[dim] = start[dim] + begin, min(rows, size[dim] - begin)
        starts.append(tuple(start))
        sizes.append(tuple(size))
    return Boxes(tuple(starts), tuple(sizes))


def are_divided(params: Sequence[Tensor]) -> bool:
    """Return whether a rank has only a piece of one of the params."""
    return any(not q.is_replicate() for p in params if is_dtensor(p) for q in p.placements)


def squared_norm(grads: Tree, params: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sum of squares of whole tensors, 0-d: each counts once, however many ranks have the same piece of it.

    Args: grads: this rank's pieces, those of all param groups. params: of each group. The axes over which they are
        divided are bound.
    """
    axes = list[str]()
    for group in params:
        division = division_of(group)
        shards = Shards("", dims=(None,) * len(group)) if division is None else division.shards
        each = [shards.axis] * len(group) if isinstance(shards.axis, str) else shards.axis
        axes += ["" if cut is None else name for name, cut in zip(each, shards.dims or (), strict=True)]
    leaves, total = tree.leaves(grads), list[Tensor]()
    for axis, places in sorted(tree.places_by(axes).items()):  # in one order on all ranks, for they send
        square = squared_norms([leaves[i] for i in places]).sum()
        total.append(psum(square, axis) if axis else square)
    if not total:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.stack([x.to(total[0].device) for x in total]).sum()


def check_divided(transform: Transform, params: Sequence[Tensor]) -> None:
    """Refuse what needs whole tensors where a param group is divided, with a ValueError that names the link."""
    if not are_divided(params):
        return
    facts = facts_of(transform)
    if facts.whole:
        wanted = "links that go element by element, for a rank has shards of its DTensors"
        cure = "write mask and partition with a tree; a link of your own says so, fn.lift(..., elementwise=True); "
        cure += "put fn.unsharded(link, shards) around one that needs whole tensors, in a make that takes shards"
        raise ValueError(expected("make's result", wanted, ", ".join(facts.whole), cure))
    division = division_of(params) if facts.shards else None
    if division and (other := [axis for axis in facts.shards if axis not in division.groups]):
        wanted = f"shards over {', '.join(map(repr, division.groups))}, over which the DTensors are divided"
        cure = "let make take shards, which are given to it"
        raise ValueError(expected("make's result", wanted, f"over {', '.join(map(repr, other))}", cure))


def check_placed(params: Sequence[Tensor], axes: Sequence[str], binding: Binding) -> None:
    """Refuse DTensors that are partial sums, or divided among ranks of an axis that the optimizer communicates over.

    Raises: ValueError that names the parameter.
    """
    for i, p in ((i, p) for i, p in enumerate(params) if is_dtensor(p)):
        if any(placement.is_partial() for placement in p.placements):
            raise ValueError(expected("params", f"parameter {i} to be sharded or replicated", f"{p.placements}"))
        mesh = p.device_mesh
        for axis, bound in ((axis, binding.axes[axis]) for axis in axes):
            ranks = None if bound.size == 1 else _ranks_of(bound)  # one rank averages with nobody
            if ranks is None:
                continue
            for dim in range(mesh.ndim):
                # This rank is in both groups; with a second one in both, FSDP2 communicates already.
                if len({*ranks} & {*dist.get_process_group_ranks(mesh.get_group(dim))}) > 1:
                    wanted = f"parameter {i}, a DTensor, on mesh axes apart from {axis!r}, the axis of the optimizer"
                    cure = "leave the axis out, for FSDP2 averages over it; or bind one across the islands; or "
                    cure += "compress FSDP2's own exchange: fn.adapters.fsdp.compress"
                    raise ValueError(expected("params", wanted, f"one on the mesh {mesh}", cure))
