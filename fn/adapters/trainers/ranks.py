"""What every trainer lacks for ranks that differ: a file of each rank in a checkpoint, and bytes to log.

A trainer saves the model and the optimizer of rank 0, and loads both on all ranks. With residual errors, tensors that
one rank owns, and local steps a rank needs its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fn.adapters.agreed_params import agreed_buffers, agreed_pairs
from fn.adapters.checkpoint.rows import world
from fn.adapters.ddp.data_parallel import keep_local, over_ranks
from fn.adapters.optim.core import record_versions
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.state_dict import marks_of
from fn.base import Phase, Transform
from fn.collectives.axis import ranks_around
from fn.collectives.ledger import Ledger
from fn.errors import expected
from fn.roles import OWN
from fn.schedules import Schedule, phase_of, phases_of

logger = logging.getLogger("fn")


def has_local_steps(schedule: Schedule | None) -> bool:
    """Return whether ranks take steps alone: in a schedule of this library, or in one of the first 100 steps."""
    if schedule is None or Phase.LOCAL in phases_of(schedule):
        return schedule is not None
    return any(phase_of(schedule, step).phase is Phase.LOCAL for step in range(100))


def say(text: str) -> None:
    """Write a line into the log, once for all ranks."""
    if world()[0] == 0:
        logger.warning(text)


def refuse(*settings: tuple[str, str, Any, str]) -> None:
    """Refuse each (argument, what it should be, value, cure) whose value is set, with a ValueError."""
    for argument, wanted, value, cure in settings:
        if value:
            raise ValueError(expected(argument, f"{wanted} where fn communicates", f"{value}", cure))


SHARDS = "train shards without a trainer: examples/fsdp2_muon.py, examples/fsdp2_diloco.py and docs/fsdp.md"
SCALING = "train in bf16, for in a local step only the rank that sees an Inf would lower its scale"
UNUSED = "leave it out, for DDP would ask all ranks in each step; freeze what is never used with requires_grad_(False)"
DEEPSPEED = "leave it out; inside of DeepSpeed take the drop-ins of fn.adapters.deepspeed"


def keep_to_itself(model: nn.Module, *, local: bool) -> None:
    """Let the DDP of a trainer send nothing: no gradients, and no buffers where ranks take local steps.

    A model without DDP, of a single process, stays as it is, and so does one that this has seen.
    """
    inside: Any = getattr(model, "_orig_mod", model)
    if isinstance(inside, DistributedDataParallel) and not hasattr(inside, "sends_nothing"):
        keep_local(inside)
        inside.sends_nothing = True  # type: ignore[assignment]
        inside.broadcast_buffers = inside.broadcast_buffers and not local


def optimizer_of(model: nn.Module, make: Callable[..., Transform], options: dict[str, Any]) -> Optimizer:
    """Make the optimizer of a model that is not wrapped yet, over all ranks.

    They get rank 0's numbers first, as DDP does it later: an optimizer compares them at its start.
    """
    group = dist.group.WORLD if ranks_around() > 1 else None
    for x in [*model.parameters(), *model.buffers()] if group is not None else ():
        dist.broadcast(x.detach(), 0)
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    opt = over_ranks(model, make, params, group, options)
    agreed_pairs(opt)  # raises now, not at the first evaluation, where ranks never agree on params
    return opt


@torch.no_grad()
def load_agreed(opt: Optimizer, model: nn.Module) -> None:
    """Leave a model with what all ranks agree on, at the end of its training: params, and the mean of buffers."""
    for x, agreed in [*agreed_pairs(opt), *agreed_buffers(opt, [model])]:
        x.copy_(agreed)
    record_versions(opt)


def tell_of_skips(prepared: Any, opt: Optimizer) -> None:
    """Let accelerate's optimizer say of a step that all ranks leave out that it was skipped: schedulers then rest.

    By itself it knows of those that a GradScaler skips. A local step that one rank alone leaves out is none, or ranks
    would go on with different learning rates.
    """
    kind: Any = type(prepared)
    if hasattr(prepared, "left_out"):
        return

    class Telling(kind):  # type: ignore[misc]
        @property
        def step_was_skipped(self) -> bool:
            return bool(super().step_was_skipped) or self.left_out

    Telling.__name__ = Telling.__qualname__ = kind.__name__
    # Of another class, not with another method: to accelerate it is a property.
    prepared.__class__, prepared.left_out = Telling, False
    opt.register_step_post_hook(lambda *step: setattr(prepared, "left_out", not opt.moved))


def counting(opt: Optimizer) -> Ledger:
    """Return a ledger of what this rank sends in the steps of an optimizer."""
    sent = Ledger()

    def begin(*step: Any) -> None:
        sent.__enter__()

    opt.register_step_pre_hook(begin)
    opt.register_step_post_hook(lambda *step: sent.__exit__(None, None, None))
    return sent


def own_file(folder: str | Path, number: int = 0) -> Path:
    """Return where this rank's part of a checkpoint is; number: of the optimizer, if there are several."""
    return Path(folder, "fn-{}-rank-{}-of-{}.pt".format(number, *world()))


def write(folder: str | Path, saved: dict[str, Any], number: int = 0) -> None:
    """Save this rank's part of a checkpoint, in a folder that other ranks need not see."""
    file = own_file(folder, number)
    file.parent.mkdir(parents=True, exist_ok=True)  # the rank that writes the rest may be later
    torch.save(saved, file)


def of_rank(opt: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return this rank's optimizer, and behind local steps its params and buffers, for `write`."""
    saved: dict[str, Any] = {"optimizer": opt.state_dict()}
    if OWN in marks_of(opt).values():
        saved["model"] = [x.detach() for x in _of_model(opt, model)]
    return saved


def _of_model(opt: Optimizer, model: nn.Module) -> list[Tensor]:
    kept = {id(x) for x in model.state_dict(keep_vars=True).values()}  # of the buffers those that a checkpoint keeps
    buffers = [x for x in model.buffers() if id(x) in kept]
    return [*(p for group in opt.param_groups for p in group["params"]), *buffers]


def restore_instead(folder: str | Path | None, opt: Optimizer, model: nn.Module, number: int = 0) -> None:
    """Let the next opt.load_state_dict, in which a trainer loads rank 0's, load this rank's part of a checkpoint.

    The trainer has loaded the model by then. Where this rank has no part, as on another number of ranks, rank 0's
    counts: see `fn.Optimizer.load_state_dict`.
    """
    if folder is None or not own_file(folder, number).exists():
        return

    def own(opt: Any, of_rank_0: dict[str, Any]) -> dict[str, Any]:
        handle.remove()
        saved = torch.load(own_file(folder, number), map_location="cpu", weights_only=True)
        with torch.no_grad():
            for x, mine in zip(_of_model(opt, model), saved.get("model", ()), strict=False):
                x.copy_(mine)
        found: dict[str, Any] = saved["optimizer"]
        return found

    handle = opt.register_load_state_dict_pre_hook(own)
