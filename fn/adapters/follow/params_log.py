"""The log of a run whose params themselves travel, as the bits that a step changed: of any optimizer and machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn.adapters.follow.bits import BITS, changes, copies_of, model_of, tensors_of, whole
from fn.adapters.follow.log_format import JSON, Key, digest_of
from fn.adapters.follow.log_writer import LogWriter
from fn.adapters.follow.run import DIGESTS, digests_of
from fn.adapters.optim.core import Core
from fn.adapters.optim.shards import has_dtensors, is_dtensor

PARAMS = "params"
"""The method of such a log, and the phase of its frames."""


def publish_params(
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    snapshot_every: int,
    digest_every: int,
    buffers: bool,
    put: Callable[[str, bytes], object] | None,
) -> ParamsPublication | None:
    """Write the params of the model that an optimizer steps; all ranks that have pieces of DTensors must call it."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = partial(tensors_of, model_of(params, "what"), params=True, buffers=buffers)
    is_first = not any(_ranks(optimizer, params))
    if not is_first and not has_dtensors(params):
        return None
    found = tensors()
    dtypes = [str(x.dtype).removeprefix("torch.") for x in found.values()]
    shapes = [[*x.shape] for x in found.values()]
    header: dict[str, JSON] = {"method": PARAMS, "shapes": shapes, "dtypes": dtypes, "buffers": buffers}

    def open_log(step: int) -> LogWriter:
        return LogWriter(folder, header, first_step=step, put=put)

    return ParamsPublication(optimizer, tensors, open_log if is_first else None, snapshot_every, digest_every)


def _ranks(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[int]:
    """Return where this process is among those that train: it is the first where all are 0."""
    bound = optimizer.binding.axes.values() if isinstance(optimizer, Core) else ()
    ranks = [int(axis.rank) for axis in bound if axis.size > 1]
    ranks += [rank for p in params if is_dtensor(p) for rank in p.device_mesh.get_coordinate() or ()]
    return ranks or ([dist.get_rank()] if dist.is_initialized() else [])


class ParamsPublication:
    """A run whose params are being published. `close` ends that, as the end of the process does.

    Args: tensors: returns those of the model. open_log: None on ranks that only gather their pieces for the first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Callable[[], dict[str, Tensor]],
        open_log: Callable[[int], LogWriter] | None,
        snapshot_every: int,
        digest_every: int,
    ):
        self._optimizer, self._tensors, self._open_log = optimizer, tensors, open_log
        self._snapshot_every, self._digest_every = snapshot_every, digest_every
        # Of one thread: frames stay in order, and training waits for none but the last.
        self._thread, self._pending = ThreadPoolExecutor(1, "fn bits"), Future[None]()
        self._pending.set_result(None)
        self._names, self._is_over = [*tensors()], False
        self._log: LogWriter | None = None
        self._open()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def close(self) -> None:
        """Write what is there, and publish no further step; of FSDP2's parameters all ranks call it."""
        self._is_over = True
        self._pending.result()
        if self._log is not None:
            self._log.close()

    def _open(self) -> None:
        self._is_stale, self._next, self._last = False, _steps_of(self._optimizer), self._copies()
        if self._open_log is not None:
            self._log = self._open_log(self._next)
            self._log.snapshot(self._next, self._last)

    def _copies(self) -> dict[str, Tensor]:
        if self._open_log is not None:
            return copies_of(self._tensors())
        for x in self._tensors().values():
            whole(x)  # for the first rank, with this one's piece
        return {}

    def _before_step(self, *_: Any) -> None:
        if self._is_stale and not self._is_over:
            self.close()
            self._is_over = False
            self._open()

    def _after_step(self, *_: Any) -> None:
        others = sorted({*self._names} ^ self._tensors().keys())
        if others and not self._is_over:
            text = f"the log ends before step {self._next}: the model has other tensors, such as {others[0]!r}"
            warnings.warn(f"publish: {text}; publish it anew, into a folder of its own", stacklevel=2)
            self.close()
        if self._is_over:
            return
        before, self._last = self._last, self._copies()
        self._pending.result()
        if self._log is not None:
            self._pending = self._thread.submit(self._write, self._log, self._next, before, self._last)
        self._next += 1

    def _write(self, log: LogWriter, step: int, before: dict[str, Tensor], behind: dict[str, Tensor]) -> None:
        records: list[tuple[Key, list[bytes]]] = [(BITS, changes(before, behind))]
        digest = None
        if (step + 1) % self._digest_every == 0:
            each = digests_of([*behind.values()])
            records.append((DIGESTS, [each]))
            digest = digest_of(each)
        log.frame(step, PARAMS, {}, records, digest)
        if (step + 1) % self._snapshot_every == 0:
            log.snapshot(step + 1, behind)

    def _after_load(self, *_: Any) -> None:
        self._is_stale = True


def _steps_of(optimizer: Any) -> int:
    """Return the steps that an optimizer has taken: 0 for one of torch's that does not count them, such as SGD."""
    if isinstance(optimizer, Core):
        return optimizer.steps
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
