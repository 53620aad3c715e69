"""Parameters that FSDP2 has divided among the ranks of an island: an optimizer steps on this rank's shards.

    mesh = init_device_mesh("cuda", (islands, ranks), mesh_dim_names=("island", "shard"))
    fully_shard(model, mesh=mesh["shard"])                  # averages gradients within an island
    with fn.bind(mesh["island"]):               # across islands, local steps
        opt = fn.Optimizer(model.parameters(), partial(fn.diloco, axis="island"), schedule=fn.every(100))

FSDP2's parameters are DTensors. A shard is a parameter in the same memory; it is given the gradient of its shard before
each step. The ranks that hold the same shards, one of each island, communicate with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn.base import Transform, facts_of
from fn.collectives.axis import ALONE, Binding
from fn.collectives.primitives import group_of
from fn.collectives.transports.registry import registered
from fn.errors import expected


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

    def check(self, transform: Transform | None, max_norm: float | None) -> None:
        """Refuse what needs whole tensors. Raises: ValueError that names the link, or max_norm."""
        if not self.pairs or transform is None:
            return
        if max_norm is not None:
            cure = "call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) before the step"
            raise ValueError(expected("max_norm", "None for DTensors, of which a rank has shards", f"{max_norm}", cure))
        if whole := facts_of(transform).whole:
            wanted = "links that go element by element, for a rank has shards of its DTensors"
            cure = "write mask and partition with a tree; a link of your own says so, fn.lift(..., elementwise=True)"
            raise ValueError(expected("make's result", wanted, ", ".join(whole), cure))


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
                cure = "bind the axis across the islands, or compress FSDP2's own exchange: fn.adapters.fsdp.compress"
                raise ValueError(expected("params", wanted, f"one on the mesh {mesh}", cure))
