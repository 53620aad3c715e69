"""Which steps of an `fn.Optimizer` are in place, and optimizers that take none so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fn
from fn.adapters.optim import step
from fn.inplace.protocol import InPlace


@contextmanager
def listed() -> Iterator[list[bool]]:
    """List for each step that is written or skipped inside of this context whether all of it was staged in place."""
    steps: list[bool] = []
    purely, commit, was_pure = step.stage_purely, step.commit, False

    def noted(*args: Any, **more: Any) -> Any:
        nonlocal was_pure
        was_pure = True
        return purely(*args, **more)

    def written(*args: Any) -> None:
        nonlocal was_pure
        steps.append(not was_pure)
        was_pure = False
        commit(*args)

    with mock.patch.object(step, "stage_purely", noted), mock.patch.object(step, "commit", written):
        yield steps


def stage_purely(opt: fn.Optimizer, wrap: Callable[[Any], Any] = lambda update: update) -> None:
    """Let an optimizer take the steps of its current phase purely. Args: wrap: what is made of their updates."""
    update = step.update_of(opt.training, opt.phase)
    pure = [wrap(of.pure if isinstance(of, InPlace) else of) for of in update.groups]
    opt.training.updates[opt.phase] = update._replace(groups=pure)
