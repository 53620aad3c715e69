"""`publish`: write the log of a run while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fn.adapters.follow.log_format import JSON, Data, Key, digest_of
from fn.adapters.follow.log_writer import LogWriter
from fn.adapters.follow.run import (
    ADDED,
    DIGESTS,
    agreed_of,
    bytes_of,
    digests_of,
    numbers_of,
    params_of,
    settings_of,
    state_of,
    text_of,
)
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.shards import are_divided
from fn.arguments import check_kind, check_whole
from fn.base import facts_of
from fn.collectives.following import Log
from fn.errors import expected


class Publication:
    """A run that is being published. `close` ends that, as the end of the process does."""

    def __init__(
        self, optimizer: Optimizer, open_log: Callable[[int], LogWriter], snapshot_every: int, digest_every: int
    ):
        self._optimizer, self._open_log = optimizer, open_log
        self._snapshot_every, self._digest_every = snapshot_every, digest_every
        self._said: dict[str, JSON] = {}  # of the groups, since the last snapshot
        self._groups, self._added = 0, list[tuple[Key, list[Data]]]()
        self._is_stale, self._owes_snapshot = False, False
        optimizer.log = self._heard = Log()
        self._open()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def close(self) -> None:
        """Write what is there, and publish no further step."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer.log = None
        self._log.close()

    def _open(self) -> None:
        self._next, self._is_stale = self._optimizer.steps, False
        self._log = self._open_log(self._next)
        self._heard.take()
        self._snapshot()

    def _snapshot(self) -> None:
        optimizer = self._optimizer
        # A mean that is on its way belongs to a later step, and is no part of what ranks agree on now.
        self._owes_snapshot = bool(optimizer.flights)
        if not self._owes_snapshot:
            self._log.snapshot(self._next, {**params_of(optimizer), **state_of(optimizer)})
            self._groups, self._said = len(optimizer.param_groups), {}  # who starts from it has heard nothing before

    def _before_step(self, *_: Any) -> None:
        # A step that raised behind its local part, or a checkpoint: the log goes on from here as a restarted run's.
        if self._is_stale or self._optimizer.steps != self._next:
            self._log.close()
            self._open()
        groups = self._optimizer.param_groups
        for g in range(self._groups, len(groups)):
            self._added.append(((ADDED, g), [*map(bytes_of, groups[g]["params"])]))
        self._groups = len(groups)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        optimizer, step = self._optimizer, self._next
        now = numbers_of(optimizer)
        changed = {name: x for name, x in now.items() if name not in self._said or self._said[name] != x}
        changed |= dict.fromkeys(self._said.keys() - now.keys())  # null: there is none any more
        changed |= {} if optimizer.moved else {"skipped": True}
        self._said = now
        # Views: what was heard is a copy already, which nobody writes into.
        heard: list[tuple[Key, list[Data]]] = [
            (key, [leaf.numpy().data for leaf in leaves]) for key, leaves in self._heard.take()
        ]
        records, self._added = [*self._added, *heard], []
        digest = None
        if (step + 1) % self._digest_every == 0:
            each = digests_of([*agreed_of(optimizer).values()])
            records.append((DIGESTS, [each]))
            digest = digest_of(each)
        self._log.frame(step, text_of(optimizer.now), changed, records, digest)
        self._next += 1
        if self._next % self._snapshot_every == 0 or self._owes_snapshot:
            self._snapshot()

    def _after_load(self, *_: Any) -> None:
        self._is_stale = True


def publish(
    optimizer: Optimizer,
    folder: str | Path,
    *,
    snapshot_every: int = 1000,
    digest_every: int = 100,
    put: Callable[[str, bytes], object] | None = None,
) -> Publication | None:
    """Write what all ranks get alike into a folder, so that followers have the parameters after every step.

    Take it for an evaluator or a rollout server that never receives weights, a checkpoint of every step, a replay of
    the steps before a run went bad, or an audit that two runs were the same. A frame is as long as the codes.

        publication = fn.adapters.follow.publish(opt, "run")            # on all ranks, before the first step

    Args:
        optimizer: an `fn.Optimizer`, the same on all ranks.
        folder: of this run alone; made if need be. Rank 0 writes, on a thread.
        snapshot_every: after how many steps followers may start; a snapshot has the parameters and the agreed state.
        digest_every: after how many steps followers compare the parameters.
        put: as for `LogWriter`: takes the name and the bytes of each file, for object stores.
    Returns: on rank 0 what ends it by `close()`; None on the others.
    Raises: TypeError if this is no `fn.Optimizer`; ValueError for a run of which nothing is alike on all ranks and
        travels: one rank, no axis, FSDP2's shards; as `LogWriter` for the folder.
    """
    check_kind("optimizer", optimizer, Optimizer, "an fn.Optimizer")
    check_whole("snapshot_every", snapshot_every, 1)
    check_whole("digest_every", digest_every, 1)
    axes = {name: bound.size for name, bound in optimizer.binding.axes.items() if name in optimizer.axes}
    sends = any(facts_of(unit.transform).axes or facts_of(unit.transform).silent for unit in optimizer.units)
    if not sends or max(axes.values(), default=1) == 1:
        wanted, got = "one that averages over an axis of several ranks", f"axes {axes}"
        cure = "give make an axis, bound by fn.bind; what torch's DDP averages is not in the log"
        raise ValueError(expected("optimizer", wanted, got, cure))
    if any(are_divided(group["params"]) for group in optimizer.param_groups):
        cure = "publish a run whose ranks have whole parameters"
        raise ValueError(expected("optimizer", "whole parameters on rank 0", "pieces, as FSDP2 makes them", cure))
    if any(int(optimizer.binding.axes[name].rank) for name in axes):
        return None
    if optimizer.steps:
        warnings.warn(f"publish: followers start from step {optimizer.steps}, which is the next one", stacklevel=2)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    settings = settings_of(optimizer.make)
    header: dict[str, JSON] = {
        "method": str(next(iter(settings.values()), "")),
        "settings": settings,
        "shapes": [[*p.shape] for p in params],
        "dtypes": [str(p.dtype).removeprefix("torch.") for p in params],
        "axes": {**axes},
        "max_norm": None if optimizer.max_norm is None else float(optimizer.max_norm),
        "torch": torch.__version__,
        "device": params[0].device.type,
    }

    def open_log(step: int) -> LogWriter:
        return LogWriter(folder, header, first_step=step, put=put)

    return Publication(optimizer, open_log, snapshot_every, digest_every)
