"""The facts about FSDP2's parameter groups that `fn.adapters.fsdp` needs; only this module looks inside FSDP2.

A group's gradients travel as one vector of W rows, and row r holds what rank r is to receive: its piece of every
parameter, padded along the first dimension to the same size on all ranks. That is a `Segments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fn.collectives.codecs.codec import Segments
from fn.errors import expected

ROOT = "(root)"
"""The name of the group of the module itself."""


class Group(NamedTuple):
    """A parameter group of FSDP2.

    name: of its module. module: that has FSDP2's setters. axis, shards: the shard axis' name and process group.
    device: of the gradients. parameters, gradients: how all parameters, and those that require a gradient, lie in a
    row. gathered, reduced: the dtypes in which they travel; None for gathered if these are several.
    names: of the parameters that require a gradient. inside: FSDP2's own object.
    """

    name: str
    module: FSDPModule
    axis: str
    shards: dist.ProcessGroup
    device: torch.device
    parameters: Segments
    gathered: torch.dtype | None
    gradients: Segments
    reduced: torch.dtype
    names: tuple[str, ...]
    inside: Any

    @property
    def reduce_scatter(self) -> Any:
        """Return the object that reduces and scatters the gradients now."""
        return self.inside._reduce_scatter_comm

    @property
    def all_gather(self) -> Any:
        """Return the object that gathers the parameters now."""
        return self.inside._all_gather_comm

    @property
    def all_reduce_hook(self) -> Any:
        """Return the hook that runs after the reduce-scatter; None if there is none."""
        return self.inside._all_reduce_hook

    def own_shards(self) -> dict[str, Tensor]:
        """Return this rank's present shards of the parameters that require a gradient, by name."""
        trained = [p.sharded_param for p in self.inside.fsdp_params if p.sharded_param.requires_grad]
        return {name: p.detach().to_local() for name, p in zip(self.names, trained, strict=True)}

    @property
    def is_hybrid(self) -> bool:
        """Tell whether FSDP2 itself averages over replicas, that is, whether its mesh has two dimensions."""
        return hasattr(self.inside.mesh_info, "replicate_process_group")


def groups_of(module: nn.Module) -> list[Group]:
    """Return the parameter groups of a module and its submodules, in the order of the modules.

    Raises: ValueError if there is none, or a module's parameters are on several meshes; TypeError if a module is
        replicated and not sharded, or its gradients are not real floating numbers.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    groups: dict[int, Group] = {}
    for name, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        of_part = _inside(part)
        if len(of_part) > 1:
            wanted = f"{name or ROOT} to have its parameters on one mesh"
            raise ValueError(expected("module", wanted, f"{len(of_part)} meshes"))
        for inside in of_part:
            # By identity: a group of several modules comes once for each of them.
            groups.setdefault(id(inside), _group(name or ROOT, part, inside, names))
    if not groups:
        raise ValueError("module: holds no FSDPModule; call torch.distributed.fsdp.fully_shard on it first")
    return list(groups.values())


def _inside(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # before torch 2.12


def _group(name: str, module: FSDPModule, inside: Any, names: dict[int, str]) -> Group:
    mesh = inside.mesh_info
    if not hasattr(mesh, "shard_process_group"):
        # torch.distributed._composable.replicate_with_fsdp: a group without reduce-scatter. Its hook comes behind the
        # all-reduce; without that, by set_requires_all_reduce(False), it is not called.
        got = "one that torch's replicate has replicated, which averages gradients before any public hook sees them"
        cure = "shard it over one rank in place of that, fully_shard(module, mesh=mesh['shard']) on a mesh of (W, 1) "
        cure += "ranks, and give compress replicas=mesh['replica']; or use DistributedDataParallel and fn.adapters.ddp"
        raise TypeError(expected("module", f"{name} to be sharded by fully_shard", got, cure))
    params = inside.fsdp_params
    trained = [p for p in params if p.sharded_param.requires_grad]
    kinds = {p.sharded_param.dtype for p in trained}
    if any(not kind.is_floating_point for kind in kinds):
        raise TypeError(expected("module", f"{name} to have gradients of floating dtypes", f"{kinds}"))
    plain = all(not hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in params)
    # The dtype of the wire: mixed precision casts before it gathers.
    sent = {p.mp_policy.param_dtype or p.sharded_param.dtype for p in params}
    reduced = {_reduced(p) for p in trained}
    if len(reduced) > 1:
        raise TypeError(expected("module", f"{name} to reduce its gradients in one dtype", f"{reduced}"))
    dims = mesh.mesh.mesh_dim_names
    return Group(
        name=name,
        module=module,
        axis=dims[mesh.shard_mesh_dim] if dims else "shard",
        shards=mesh.shard_process_group,
        device=inside.device,
        parameters=_segments(params, mesh.shard_mesh_size),
        gathered=sent.pop() if plain and len(sent) == 1 else None,
        gradients=_segments(trained, mesh.shard_mesh_size),
        reduced=next(iter(reduced), torch.float32),
        names=tuple(names.get(id(p.sharded_param), "?") for p in trained),
        inside=inside,
    )


def _reduced(param: Any) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradient of one of its parameters."""
    follows_forward = not hasattr(type(param), "unsharded_grad_dtype")  # until torch 2.14
    cast = param.mp_policy.param_dtype if follows_forward else param.sharded_param.grad_dtype
    dtype: torch.dtype = param.mp_policy.reduce_dtype or cast or param.sharded_param.dtype
    return dtype


def _segments(params: Sequence[Any], world_size: int) -> Segments:
    widths, valid = [], []
    for p in params:
        padded = p.padded_sharded_param_size
        widths.append(padded.numel())
        if p.fsdp_placement.dim == 0 and padded.numel():
            # Cut along the first dimension, rank r has the rows from r * rows on; behind the last is padding.
            rows, row = padded[0], padded.numel() // padded[0]
            valid.append([min(max(p._orig_size[0] - r * rows, 0), rows) * row for r in range(world_size)])
        else:
            valid.append([padded.numel()] * world_size)
    # (S, W) -> (W, S); the view is for a group without tensors, whose list has no second dimension.
    counts = torch.tensor(valid, dtype=torch.int64, device="cpu").view(len(widths), world_size)
    return Segments(tuple(widths), counts.t().contiguous())
