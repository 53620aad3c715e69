"""Which steps of an `fn.Optimizer` are in place, and optimizers that take none so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fn
from fn.adapters.optim import core


@contextmanager
def listed() -> Iterator[list[bool]]:
    """List for each step that is written or skipped inside of this context whether all of it was staged in place."""
    steps: list[bool] = []
    purely, take, was_pure = core.stage_purely, core.take, False

    def noted(*args: Any) -> Any:
        nonlocal was_pure
        was_pure = True
        return purely(*args)

    def taken(*args: Any) -> bool:
        nonlocal was_pure
        was_pure = False
        moves = take(*args)
        steps.append(not was_pure)
        return moves

    with mock.patch.object(core, "stage_purely", noted), mock.patch.object(core, "take", taken):
        yield steps


def stage_purely(opt: fn.Optimizer, wrap: Callable[[Any], Any] = lambda update: update) -> None:
    """Let an optimizer take the steps of its current phase purely. Args: wrap: what is made of their updates."""
    updates = core.updates_of(opt, opt.next_phase)
    updates[:] = [core.way_of(wrap(update.pure)) for update in updates]
