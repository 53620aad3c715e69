"""Parameters that FSDP2 has divided among the ranks of an island: an optimizer steps on this rank's shards.

    mesh = init_device_mesh("cuda", (islands, ranks), mesh_dim_names=("island", "shard"))
    fully_shard(model, mesh=mesh["shard"])                  # averages gradients within an island
    with fn.bind(mesh["island"]):               # across islands, local steps
        opt = fn.Optimizer(model.parameters(), partial(fn.diloco, axis="island"), schedule=fn.every(100))

FSDP2's parameters are DTensors. A shard is a parameter in the same memory; it is given the gradient of its shard before
each step. The ranks that hold the same shards, one of each island, communicate with each other.

Optimizers whose `make` takes `shards`, as `fn.muon` and `fn.muloco` do, are told how the DTensors are divided. They
bring whole matrices together over that axis, which is bound for them:

    opt = fn.Optimizer(model.parameters(), fn.muon, labels=fn.labels_of(model), lr=0.02)

Their state is divided as the parameters are: a state dict has DTensors of it, which `torch.distributed.checkpoint`
saves once and loads on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fn.base import Transform, facts_of
from fn.collectives.axis import ALONE, Binding, bind
from fn.collectives.primitives import group_of
from fn.collectives.transports.registry import registered
from fn.errors import expected
from fn.transforms.unsharded import Shards


class Division(NamedTuple):
    """How the DTensors of a param group are divided. group: the ranks that have their pieces."""

    shards: Shards
    group: dist.ProcessGroup

    def bound(self, binding: Binding) -> Binding:
        """Return a binding of the axis, too. Raises: ValueError if other ranks are bound to its name."""
        name, there = self.shards.axis, binding.axes.get(self.shards.axis)
        if there is None:
            return Binding({**binding.axes, **bind({name: self.group}).axes})
        ranks = None
        if there.transport != ALONE and there.transport not in registered:
            ranks = dist.get_process_group_ranks(group_of(there.transport))
        if ranks != dist.get_process_group_ranks(self.group):
            cure = "give one of the two another name, in mesh_dim_names or in fn.bind"
            got = f"other ranks than those of the mesh axis {name!r}, over which the DTensors are divided"
            raise ValueError(expected("params", f"no other ranks to be bound to {name!r}", got, cure))
        return binding


class LocalShards:
    """The DTensors of an optimizer, and the parameters that stand for them in its param groups."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, torch.nn.Parameter]] = []
        """Each DTensor with its shard; often none."""

    def of(self, params: Sequence[Tensor], axes: Sequence[str], binding: Binding) -> list[Tensor]:
        """Return parameters with the local shard in the place of each DTensor.

        Raises: ValueError if a DTensor is divided among ranks of an axis that the optimizer communicates over.
        """
        stepped = []
        for i, p in enumerate(params):
            if hasattr(p, "device_mesh"):
                _check_placed(i, p, axes, binding)
                shard = torch.nn.Parameter(_local(p), requires_grad=p.requires_grad)
                self.pairs.append((p, shard))
                p = shard
            stepped.append(p)
        return stepped

    def dtensor_of(self, p: Tensor) -> Any:
        """Return the DTensor that a parameter is the shard of; None if it is none."""
        return next((dtensor for dtensor, shard in self.pairs if shard is p), None)

    def division(self, params: Sequence[Tensor]) -> Division | None:
        """Return how the DTensors of a param group are divided; None without any.

        Raises: ValueError if a DTensor is cut along several mesh axes, or two of them over different ranks.
        """
        of_shard: dict[int, Any] = {id(shard): dtensor for dtensor, shard in self.pairs}
        shapes, dims, axes = [], list[int | None](), dict[tuple[str, str], dist.ProcessGroup]()
        for i, p in enumerate(params):
            dtensor: Any = of_shard.get(id(p))
            cuts = [] if dtensor is None else [j for j, q in enumerate(dtensor.placements) if not q.is_replicate()]
            shapes.append(tuple(p.shape if dtensor is None else dtensor.shape))
            dims.append(None)
            for mesh_dim in cuts:
                placement, mesh = dtensor.placements[mesh_dim], dtensor.device_mesh
                if len(cuts) > 1 or not placement.is_shard() or hasattr(placement, "split_factor"):  # interleaved
                    wanted = f"parameter {i} to be divided over one mesh axis for an optimizer of whole matrices"
                    raise ValueError(expected("params", wanted, f"the placements {dtensor.placements}"))
                dims[-1] = placement.dim
                group, names = mesh.get_group(mesh_dim), mesh.mesh_dim_names
                axes[names[mesh_dim] if names else "shard", group.group_name] = group
        if len(axes) > 1:
            wanted = "the DTensors of a param group to be divided over the same ranks"
            raise ValueError(expected("params", wanted, f"{len(axes)} groups of ranks", "give each a group of its own"))
        for (name, _), group in axes.items():
            return Division(Shards(name, tuple(shapes), tuple(dims)), group)
        return None

    def take_gradients(self) -> None:
        """Give the shards the gradients of their DTensors.

        Raises: RuntimeError if a DTensor has moved to other memory, which a step would not write.
        """
        for p, shard in self.pairs:
            if _local(p).data_ptr() != shard.data_ptr():
                cure = "make the optimizer after fully_shard and after the model is where it stays"
                wanted, got = "DTensors in the memory that they had", "one in other memory"
                raise RuntimeError(expected("params", wanted, got, cure))
            shard.grad = None if p.grad is None else _local(p.grad)

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradients of the DTensors, as an optimizer's `zero_grad` does."""
        for p, _ in self.pairs:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()

    def check(self, transform: Transform | None, max_norm: float | None, params: Sequence[Tensor]) -> None:
        """Refuse what needs whole tensors of a param group that is divided.

        Raises: ValueError that names the link, or max_norm.
        """
        mine = {id(p) for p in params}
        divided = (not q.is_replicate() for p, shard in self.pairs if id(shard) in mine for q in p.placements)
        if transform is None or not any(divided):
            return
        if max_norm is not None:
            cure = "call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) before the step"
            raise ValueError(expected("max_norm", "None for DTensors, of which a rank has shards", f"{max_norm}", cure))
        facts = facts_of(transform)
        if facts.whole:
            wanted = "links that go element by element, for a rank has shards of its DTensors"
            cure = "write mask and partition with a tree; a link of your own says so, fn.lift(..., elementwise=True); "
            cure += "put fn.unsharded(link, shards) around one that needs whole tensors, in a make that takes shards"
            raise ValueError(expected("make's result", wanted, ", ".join(facts.whole), cure))
        division = self.division(params) if facts.shards else None
        if division and (other := [axis for axis in facts.shards if axis != division.shards.axis]):
            wanted = f"shards over {division.shards.axis!r}, over which the DTensors are divided"
            cure = "let make take shards, which are given to it"
            raise ValueError(expected("make's result", wanted, f"over {', '.join(map(repr, other))}", cure))


def as_dtensor(local: Tensor, like: Any) -> Tensor:
    """Return a tensor of this rank as its piece of a DTensor that is divided as another one; in the same memory."""
    form = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    made: Tensor = type(like).from_local(local, like.device_mesh, like.placements, **form)
    return made


def as_local(x: Any) -> Any:
    """Return this rank's piece of a DTensor; what is none as it is."""
    return _local(x) if hasattr(x, "device_mesh") else x


def _local(x: Any) -> Tensor:
    with torch.no_grad():
        shard: Tensor = x.to_local()
    return shard


def _check_placed(i: int, p: Any, axes: Sequence[str], binding: Binding) -> None:
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(expected("params", f"parameter {i} to be sharded or replicated", f"{p.placements}"))
    mesh = p.device_mesh
    for axis in axes:
        bound = binding.axes[axis]
        if bound.size == 1 or bound.transport == ALONE or bound.transport in registered:
            continue
        ranks = {*dist.get_process_group_ranks(group_of(bound.transport))}
        for dim in range(mesh.ndim):
            if len(ranks & {*dist.get_process_group_ranks(mesh.get_group(dim))}) > 1:
                wanted = f"parameter {i}, a DTensor, on mesh axes apart from {axis!r}, the axis of the optimizer"
                cure = "leave the axis out, for FSDP2 averages over it; or bind one across the islands; or compress "
                cure += "FSDP2's own exchange: fn.adapters.fsdp.compress"
                raise ValueError(expected("params", wanted, f"one on the mesh {mesh}", cure))
