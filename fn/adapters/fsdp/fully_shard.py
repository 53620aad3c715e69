"""Quantized gradients, with error feedback, inside PyTorch's own ZeRO-3: FSDP2.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compressed = compress(model)                     # LoCo: int4 with damped feedback
    opt = torch.optim.AdamW(model.parameters())      # DTensors, as ever with FSDP2

The ranks exchange codes, which are quantized values, where FSDP2 would reduce and scatter full gradients. Everything
else is FSDP2's: when it communicates, in which precision it reduces, what it prefetches and frees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from fn import tree
from fn.adapters.fsdp.comms import CompressedAllGather, CompressedReduceScatter, ReplicaMean
from fn.adapters.fsdp.groups import Group, groups_of
from fn.adapters.optim.state_dict import check_keys, check_tensor
from fn.arguments import checked
from fn.collectives.agreement import check_agreement, describe
from fn.collectives.axis import bind
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.integer import int4
from fn.collectives.feedback import Feedback, damped
from fn.collectives.hierarchy import hops
from fn.collectives.ledger import Ledger, ledger
from fn.errors import expected

Tree = Any


class Replicas(NamedTuple):
    """Replicas of all shards, over which gradients are averaged in codes.

    mesh: of one dimension, or the process group of the ranks that hold the same shards. codec, feedback: as for
    `compress`; None is that of the shard axis. servers: as for `compressed_average`. Replicas that hold other
    parameters would stay apart; the first backward pass raises `RanksDisagree` then.
    """

    mesh: DeviceMesh | dist.ProcessGroup
    codec: Codec | None = None
    feedback: Feedback | None = None
    servers: bool = True


@checked("module", "codec", "feedback")
def compress(
    module: nn.Module,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    *,
    gather: Codec | None = None,
    replicas: Replicas | DeviceMesh | dist.ProcessGroup | None = None,
) -> Compressed:
    """Let FSDP2 reduce and scatter gradients in codes, in all parameter groups of a module; in place.

    Args:
        module: of `fully_shard`, after all calls of that.
        codec: what travels in place of gradients. None is `int4()`.
        feedback: None is `damped()`; with `int4()` that is LoCo. `off()` gives ZeRO++'s qgZ.
        gather: what travels in place of parameters, without feedback: `int8()` is ZeRO++'s qwZ. None: themselves.
        replicas: for hybrid sharding: the axis of the replicas. The modules are then sharded over the other axis
            alone, a mesh of one dimension. FSDP2's own hybrid sharding works too: it averages over the replicas
            exactly, and takes no `replicas`.
    Returns: the residual errors, what was sent, and the way back.
    Raises: ValueError if the module holds no group of FSDP2, holds one that is compressed already or has a custom
        communication object or hook, or if the ranks disagree; TypeError for dtypes that codes cannot represent.
        Nothing is changed then.

    Mixed precision: what is quantized are gradients in FSDP2's reduce dtype. Accumulation: with
    `set_requires_gradient_sync(False)` nothing is sent, and the errors rest; with the sum of several backward passes
    comes one message. Errors are in units of the gradient; a loss scale that changes makes them stale by its ratio.

    Paper: Xie et al., LoCo (arXiv 2407.04480), algorithm 1; Wang et al., ZeRO++ (arXiv 2306.10209), sections 4.1
        and 4.3.
    Differs: in one hop, not two; on any device; errors are state that is saved, not attributes of parameters.
    """
    codec, feedback = codec or int4(), feedback or damped()
    if replicas is not None and not isinstance(replicas, Replicas):
        replicas = Replicas(replicas)
    _check_kinds(codec, feedback, gather, replicas)
    groups = groups_of(module)
    for group in groups:
        _check(group, gather, replicas)
    sent = ledger()
    parts: dict[str, Part] = {}
    for group in groups:
        _check_ranks(group, codec, feedback, gather)
        parts[group.name] = _part(group, codec, feedback, gather, replicas, sent)
    # Only this changes the module: what is refused above leaves FSDP2 as it was.
    return Compressed(parts, sent)


class Part(NamedTuple):
    """The communication of one parameter group; None where FSDP2 keeps its own."""

    group: Group
    reduce_scatter: CompressedReduceScatter
    all_gather: CompressedAllGather | None
    replicas: ReplicaMean | None

    def errors(self) -> dict[str, Tree]:
        """Return the errors of this rank by what they belong to."""
        of_replicas = {} if self.replicas is None else {"replicas": self.replicas.state}
        return {"reduce_scatter": self.reduce_scatter.error, "skipped": self.reduce_scatter.skipped, **of_replicas}


class Compressed:
    """FSDP2 with gradients in codes; made by `compress`.

    sent: a ledger of what this rank sent in codes since then, whatever thread runs the backward pass.
    """

    def __init__(self, parts: Mapping[str, Part], sent: Ledger):
        self.sent = sent
        self._parts = dict(parts)
        for part in self._parts.values():
            module = part.group.module
            module.set_custom_reduce_scatter(part.reduce_scatter)
            if part.all_gather is not None:
                module.set_custom_all_gather(part.all_gather)
            if part.replicas is not None:
                module.set_all_reduce_hook(part.replicas)

    @property
    def errors(self) -> dict[str, Tree]:
        """Return this rank's errors of the reduce-scatter by the name of the parameter group.

        A backward pass makes new ones.
        """
        return {name: part.reduce_scatter.error for name, part in self._parts.items()}

    @property
    def skipped(self) -> int:
        """Return how many reductions gave NaN because a gradient was not finite on some rank."""
        return sum(int(part.reduce_scatter.skipped) for part in self._parts.values())

    def remove(self) -> None:
        """Give every group FSDP2's own communication back; the errors stay here.

        With `replicas`, nobody averages over these from then on.
        """
        for part in self._parts.values():
            module: Any = part.group.module
            module.set_custom_reduce_scatter(DefaultReduceScatter())
            if part.all_gather is not None:
                module.set_custom_all_gather(DefaultAllGather())
            if part.replicas is not None:
                module.set_all_reduce_hook(None)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the errors as a flat {path: tensor}: those that the next backward pass replaces, not copies.

        It is this rank's own: every rank saves and loads its own. The paths name the rank, so that
        `torch.distributed.checkpoint`, which writes once what several ranks call alike, keeps those of all of them.
        """
        state = {}
        rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        for group, part in self._parts.items():
            name = f"{rank}.{group}"
            shards, widths = part.group.shards, part.group.gradients.widths
            state[f"{name}.rank"] = torch.tensor([shards.rank(), shards.size()], dtype=torch.int64, device="cpu")
            state[f"{name}.widths"] = torch.tensor(widths, dtype=torch.int64, device="cpu")
            state.update(tree.by_path(part.errors(), f"{name}."))
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned, bit for bit.

        Raises: ValueError that names the first path that is missing, unexpected or different, if the state is of
            another grouping of parameters, number of ranks, rank, codec or feedback; nothing is loaded then.
        """
        check_keys(state_dict, "Compressed")
        own = self.state_dict()
        here, theirs = ({path.partition(".")[0] for path in state} for state in (own, state_dict))
        if here != theirs:
            ranks = ", ".join(sorted(theirs)) or "no rank"
            raise ValueError(f"state_dict: is of {ranks}, but this is {', '.join(here)}{_ADVICE}")
        for path in sorted(set(own) ^ set(state_dict)):
            raise ValueError(f"state_dict: {path!r} is {'missing' if path in own else 'unexpected'}{_ADVICE}")
        for path, mine in own.items():
            saved = state_dict[path]
            check_tensor(path, saved)
            if saved.shape != mine.shape or saved.dtype != mine.dtype:
                got, wanted = (f"{x.dtype} {tuple(x.shape)}" for x in (saved, mine))
                raise ValueError(expected("state_dict", f"{path!r} to be {wanted}", got) + _ADVICE)
            if path.endswith((".rank", ".widths")) and not torch.equal(saved.cpu(), mine):
                raise ValueError(f"state_dict: {path!r} is {saved.tolist()}, but is {mine.tolist()} here{_ADVICE}")
        for path, mine in own.items():
            mine.copy_(state_dict[path])


_ADVICE = "; errors belong to the rank, the sharding and the codec that they were made for"


def _check_kinds(codec: Codec, feedback: Feedback, gather: Codec | None, replicas: Replicas | None) -> None:
    hops("shard", codec, feedback)
    if gather is not None:
        hops("shard", gather, feedback, ("gather", "feedback"))
    if replicas is not None:
        called = "replicas.codec", "replicas.feedback"
        hops("replicas", replicas.codec or codec, replicas.feedback or feedback, called)
        if not isinstance(replicas.mesh, DeviceMesh | dist.ProcessGroup):
            given = type(replicas.mesh).__name__
            raise TypeError(expected("replicas", "Replicas(...), a DeviceMesh or a process group", given))


def _check(group: Group, gather: Codec | None, replicas: Replicas | None) -> None:
    if isinstance(group.reduce_scatter, CompressedReduceScatter):
        raise ValueError(f"module: {group.name} is compressed already; call remove() on what compress returned first")
    theirs = [group.reduce_scatter] + [group.all_gather] * (gather is not None)
    for custom in theirs:
        if not isinstance(custom, DefaultReduceScatter | DefaultAllGather):
            wanted = f"{group.name} to have the communication object of FSDP2"
            raise ValueError(expected("module", wanted, f"one of its own, {type(custom).__name__}"))
    if gather is not None and (group.gathered is None or not group.gathered.is_floating_point):
        raise TypeError(f"gather: {group.name} gathers parameters of several or other than floating dtypes")
    if replicas is not None and group.is_hybrid:
        raise ValueError(
            f"replicas: FSDP2 averages {group.name} over the replicas itself; shard over the other mesh dimension alone"
        )
    if replicas is not None and group.all_reduce_hook is not None:
        raise ValueError(f"replicas: {group.name} has an all-reduce hook already")


def _check_ranks(group: Group, codec: Codec, feedback: Feedback, gather: Codec | None) -> None:
    fields = {
        "parameter group": group.name,
        "parameters": group.names,
        "widths": group.gradients.widths,
        "reduce dtype": group.reduced,
    }
    for argument, given in {"codec": codec, "feedback": feedback, "gather": gather}.items():
        fields[argument] = "none" if given is None else "given"
        fields |= {f"{argument}: {name}": value for name, value in describe(given).items()}
    with bind({group.axis: group.shards}):
        check_agreement(group.axis, fields, group.device)


def _part(
    group: Group, codec: Codec, feedback: Feedback, gather: Codec | None, replicas: Replicas | None, sent: Ledger
) -> Part:
    like = torch.zeros(1, dtype=group.reduced, device=group.device)
    common = (group.axis, group.shards)
    reduce_scatter = CompressedReduceScatter(group.name, *common, group.gradients, codec, feedback, like, sent)
    all_gather = None if gather is None else CompressedAllGather(*common, group.parameters, gather, sent)
    mean = None
    if replicas is not None:
        axis, ranks = _axis_of(replicas.mesh)
        # (W, S) -> (1, S): the counts of this rank's row.
        own_row = group.gradients.row(torch.tensor(group.shards.rank(), dtype=torch.int64, device="cpu"))
        how = replicas.codec or codec, replicas.feedback or feedback
        mean = ReplicaMean(group.name, axis, ranks, own_row, *how, like, sent, group.own_shards, replicas.servers)
    return Part(group, reduce_scatter, all_gather, mean)


def _axis_of(mesh: DeviceMesh | dist.ProcessGroup) -> tuple[str, dist.ProcessGroup]:
    if not isinstance(mesh, DeviceMesh):
        return "replicas", mesh
    if mesh.ndim != 1:
        raise ValueError(expected("replicas", "a mesh of 1 dimension, such as mesh['replicas']", f"one of {mesh.ndim}"))
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "replicas", mesh.get_group()
