"""One state dict of all ranks, for scripts in which rank 0 alone writes a file."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn.adapters.checkpoint import resharding as portable
from fn.adapters.checkpoint.replicated import HINTS, check_replicated
from fn.adapters.optim.consistency import device_among
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.state_dict import OF_RANK
from fn.collectives.transports.failure_detection import raising_peer_lost, remember

LOCAL = "gather after a step that synchronises all of them, or call checkpoint.save, which keeps each rank's"
"""What to do about parameters that a method leaves to each rank between its synchronisations."""


def gather(optimizer: Optimizer, *, group: dist.ProcessGroup | None = None) -> dict[str, Tensor] | None:
    """Return a state dict of all ranks on rank 0, None elsewhere; every rank must call it at the same step.

        whole = checkpoint.gather(opt)
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": whole}, "run.pt")

        saved = torch.load("run.pt", map_location="cpu", weights_only=True)     # on every rank
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])

    Each rank finds its own errors and shards in it, so on as many ranks the training continues bit for bit. On another
    number of ranks it is like the state dict of rank 0: errors start from zero, with a warning, and shards are refused;
    `save` moves both. The memory is that of all ranks' errors and shards, on rank 0's CPU.

    Between the synchronisations of 0/1 Adam and DiLoCo each rank has parameters of its own, and rank 0's model has only
    one rank's. They are refused: gather after a step that synchronises all of them, or call `save`.

    Args: optimizer: between two steps. group: over all ranks; None is the default group.
    Raises: ValueError if the optimizer's axes are not all ranks; RuntimeError inside of a step; `RanksDisagree` if
        ranks differ in their parameters, or in what is called the same on all; `PeerLost` if a rank ends.
    """
    portable.check_optimizer(optimizer)
    local_params = any(key.startswith("params.") for key in portable.own_rows(optimizer.training))
    flat: dict[str, Tensor] = optimizer.state_dict()
    own = {key: x for key, x in flat.items() if OF_RANK.fullmatch(key)}
    same = {key: x for key, x in flat.items() if key not in own}
    rank, size = portable.world()
    found = {key: _on_cpu(x) for key, x in (same if size > 1 else flat).items()} if rank == 0 else {}
    if size == 1:
        return found
    everyone = dist.group.WORLD if group is None else group
    assert everyone is not None

    def everyones(mine: Any) -> list[Any]:
        each: list[Any] = [None] * size
        dist.all_gather_object(each, mine, group=everyone)
        return each

    with raising_peer_lost({"world": remember(everyone)}, where="checkpoint.gather"):
        params = {k: x for k, x in portable.everything(optimizer.training).items() if k.startswith("params.")}
        hints = {**HINTS, "params.": LOCAL} if local_params else HINTS
        check_replicated({**same, **params}, device_among(optimizer.param_groups), everyones, hints=hints)
        for key, x in own.items():  # one after the other: rank 0 holds each once more while it arrives
            each: list[Any] | None = [None] * size if rank == 0 else None
            dist.gather_object((key, _on_cpu(x)), each, dst=0, group=everyone)
            found.update(each or [])
    return found if rank == 0 else None


def _on_cpu(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu").copy_(x.detach())
