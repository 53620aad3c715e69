"""The exchange of a round, behind its local step, which is written already.

    Round(begin=f, end=f)    difference, mean and outer step of fragment f at once, written together
    Round(begin=f)           difference now; the mean is on its way while local steps go on
    Round(end=f)             the outer step of fragment f, with the mean that has come

What is on its way is no part of the state. Whoever reads the states waits for it first: `Training.settle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fn.adapters.optim.background import in_background
from fn.adapters.optim.donate import write_back
from fn.adapters.optim.signals import begin_writing
from fn.adapters.optim.step import move
from fn.adapters.optim.training import Training
from fn.inplace.protocol import Staged
from fn.phases import NewParams, Part, Round

Tree = Any


def exchange(training: Training, round_: Round) -> None:
    """Take the exchange of a round. The axes must be bound.

    Raises: what communication raises. Params and states are then those after the local step, and the exchange is left
        out, on this rank at least.
    """
    stage_exchange(training, round_).commit()


def stage_exchange(training: Training, round_: Round) -> Staged:
    """Take the exchange of a round up to where it is written. Raises: as `exchange`."""
    training.settle()
    update = training.joined()
    params = tuple([p.detach() for p in group] for group in training.params)
    nothing = tuple([torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in group] for group in params)

    def run(part: Part, states: Tree) -> tuple[Tree, Tree]:
        return update.composed(part)(nothing, states, params)

    moves, states, parts = None, training.states, {part.kind: part for part in round_.exchange}
    sending: Callable[[], Tree] | None = None
    if "mean" in parts:
        _, differences = run(parts["difference"], states)

        def mean() -> Tree:
            return run(parts["mean"], differences)[1]

        if round_.end == round_.begin:
            states = mean()
        else:
            sending = in_background(training, mean)
    if "outer" in parts:
        moves, states = run(parts["outer"], states)

    def commit() -> None:
        begin_writing()
        if states is not training.states:
            write_back(training.states, states)
        for group, new in zip(training.params, () if moves is None else moves.params, strict=moves is not None):
            move(group, NewParams(new))
        training.sending = sending

    return Staged(True, commit)
