"""`publish`: write the log of a run while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from fn.adapters.ddp.gradient_averaging import GradientAverage
from fn.adapters.follow.averaged_gradients import MEAN, header_of
from fn.adapters.follow.bits import Buffers
from fn.adapters.follow.known_answer import known_answer, machine_of
from fn.adapters.follow.log_format import JSON, Data, Key, digest_of
from fn.adapters.follow.log_writer import LogWriter
from fn.adapters.follow.params_log import ParamsPublication, publish_params
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
from fn.arguments import check_kind, check_whole, checked
from fn.base import facts_of
from fn.collectives.following import Log
from fn.errors import expected

PARAMS_INSTEAD = "publish(..., what='params')"
"""How any run is followed, also where torch's own collectives keep what they average from the log."""


class Publication:
    """A run that is being published. `close` ends that, as the end of the process does."""

    def __init__(
        self,
        optimizer: Optimizer,
        mean: GradientAverage | None,
        buffers: Buffers,
        open_log: Callable[[int], LogWriter],
        snapshot_every: int,
        digest_every: int,
    ):
        self._optimizer, self._mean, self._buffers, self._open_log = optimizer, mean, buffers, open_log
        self._snapshot_every, self._digest_every = snapshot_every, digest_every
        self._said = dict[str, Any]()  # of the groups, since the last snapshot; ... for what was said before it
        self._groups, self._added = 0, list[tuple[Key, list[Data]]]()
        self._is_stale, self._owes_snapshot = False, False
        optimizer.log = self._heard = Log()
        self._averaged = Log(prefix=MEAN)
        if mean is not None:
            mean.log = self._averaged
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
        if self._mean is not None:
            self._mean.log = None
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
            self._buffers.begin()
            of_mean = {} if self._mean is None else state_of(self._mean.states, "mean.")
            tensors = {**params_of(optimizer), **state_of(optimizer.states, "state."), **of_mean, **self._buffers.now()}
            self._log.snapshot(self._next, tensors)
            self._groups = len(optimizer.param_groups)
            self._said = dict.fromkeys(self._said, ...)  # who starts from it has heard nothing before

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
        now = numbers_of(optimizer) | ({} if self._mean is None else {"mean": self._mean.now.value})
        changed = {name: x for name, x in now.items() if name not in self._said or self._said[name] != x}
        changed |= dict.fromkeys(self._said.keys() - now.keys())  # null: there is none any more
        changed |= {} if optimizer.moved else {"skipped": True}
        self._said = now
        # Views: what was heard is a copy already, which nobody writes into.
        found = [*self._averaged.take(), *self._heard.take()]
        heard: list[tuple[Key, list[Data]]] = [(key, [leaf.numpy().data for leaf in leaves]) for key, leaves in found]
        records, self._added = [*self._added, *heard, *self._buffers.changed()], []
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


@checked("optimizer", "folder", "snapshot_every", "digest_every", "buffers", "what", "put")
def publish(
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    *,
    mean: GradientAverage | None = None,
    snapshot_every: int = 1000,
    digest_every: int = 100,
    buffers: bool = False,
    what: Literal["codes", "params"] = "codes",
    put: Callable[[str, bytes], object] | None = None,
) -> Publication | ParamsPublication | None:
    """Write what all ranks get alike into a folder, so that followers have the parameters after every step.

    Take it for an evaluator or a rollout server that never receives weights, a checkpoint of every step, a replay of
    the steps before a run went bad, or an audit that two runs were the same. A frame is as long as the codes.

        publication = fn.adapters.follow.publish(opt, "run")            # on all ranks, before the first step

    Where codes cannot be followed, `what="params"` writes the bits of rank 0's parameters that each step changed. It
    takes any optimizer of torch's, whatever averages its gradients, FSDP2's parameters and models that `torch.compile`
    traces; and followers on any machine, which need no `make`. That are several times the bytes, and a copy of the
    parameters in the host's memory.

    Args:
        optimizer: an `fn.Optimizer`, the same on all ranks; for what="params" any.
        folder: of this run alone; made if need be. Rank 0 writes, on a thread.
        mean: what `fn.adapters.ddp.average_gradients` returned, if that averages the gradients. What a script does to
            them behind it, such as clipping, is not in the log: give the optimizer `max_norm`.
        snapshot_every: after how many steps followers may start; a snapshot has the parameters and the agreed state.
        digest_every: after how many steps followers compare the parameters.
        buffers: whether rank 0's buffers travel, too, such as BatchNorm's statistics, of the model that holds the
            parameters. Without, a warning says so when they change.
        what: "codes" or "params".
        put: as for `LogWriter`: takes the name and the bytes of each file, for object stores.
    Returns: on rank 0 what ends it by `close()`, for FSDP2's parameters on all ranks, which all call it; else None.
    Raises: TypeError if this is no `fn.Optimizer`; ValueError for a run of which nothing is alike on all ranks and
        travels: one rank, no axis, FSDP2's shards; and where no single model holds the parameters that is asked for;
        as `LogWriter` for the folder.
    """
    check_whole("snapshot_every", snapshot_every, 1)
    check_whole("digest_every", digest_every, 1)
    if what == "params":
        return publish_params(optimizer, folder, snapshot_every, digest_every, buffers, put)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(expected("optimizer", "an fn.Optimizer", type(optimizer).__name__, PARAMS_INSTEAD))
    check_kind("mean", mean, (GradientAverage, type(None)), "what fn.adapters.ddp.average_gradients returns")
    facts, groups = [facts_of(unit.transform) for unit in optimizer.units], optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    if any(are_divided(group["params"]) for group in groups) or any(f.shards and not f.axes for f in facts):
        got = "pieces, as FSDP2 makes them"
        raise ValueError(expected("optimizer", "whole parameters on rank 0", got, PARAMS_INSTEAD))
    bound = {name: axis for name, axis in optimizer.binding.axes.items() if name in optimizer.axes}
    averaged = {} if mean is None else mean.binding.axes
    axes = {name: axis.size for name, axis in bound.items()}
    sends = mean is not None or any(f.axes or f.silent for f in facts)
    if not sends or max((axis.size for axis in (*bound.values(), *averaged.values())), default=1) == 1:
        wanted, got = "one that averages over an axis of several ranks", f"axes {axes}"
        by_codes = "give make an axis, bound by fn.bind, or mean=average_gradients(model, fn.int4())"
        cure = f"what torch's DDP averages is not in the log; {by_codes}; or {PARAMS_INSTEAD}"
        raise ValueError(expected("optimizer", wanted, got, cure))
    agreed_of(optimizer)  # refuses a method whose ranks agree on no parameters between exchanges
    beside = Buffers(params, travel=buffers)
    if any(int(axis.rank) for axis in (*bound.values(), *averaged.values())):
        return None
    if optimizer.steps:
        warnings.warn(f"publish: followers start from step {optimizer.steps}, which is the next one", stacklevel=2)
    settings = settings_of(optimizer.make)
    header: dict[str, JSON] = {
        "method": str(next(iter(settings.values()), "")),
        "settings": settings,
        "shapes": [[*p.shape] for p in params],
        "dtypes": [str(p.dtype).removeprefix("torch.") for p in params],
        "axes": {**axes},
        "buffers": buffers,
        "mean": None if mean is None else header_of(mean),
        "max_norm": None if optimizer.max_norm is None else float(optimizer.max_norm),
        "groups": numbers_of(optimizer),
        "machine": machine_of(params[0].device),
    }
    header["known_answer"] = known_answer(header, optimizer.make, params[0].device)

    def open_log(step: int) -> LogWriter:
        return LogWriter(folder, header, first_step=step, put=put)

    return Publication(optimizer, mean, beside, open_log, snapshot_every, digest_every)
