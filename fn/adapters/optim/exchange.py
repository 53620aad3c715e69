"""The exchange of a round, behind its local step, which is written already.

    Round(begin=f, end=f)    difference, mean and outer step of fragment f at once, written together
    Round(begin=f)           difference now; the mean is on its way while local steps go on
    Round(end=f)             the outer step of fragment f, with the mean that has come

What is on its way is no part of the state. Whoever reads the states waits for it first: `Training.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fn import tree
from fn.adapters.optim.background import in_background
from fn.adapters.optim.donate import write_back
from fn.adapters.optim.signals import begin_writing
from fn.adapters.optim.step import move
from fn.adapters.optim.training import Training
from fn.inplace.protocol import Staged
from fn.phases import NewParams, Part, Round
from fn.transforms.outer import OuterState

Tree = Any


def exchange(training: Training, round_: Round) -> None:
    """Take the exchange of a round. The axes must be bound.

    Raises: what communication raises. Params and states are then those after the local step, and the exchange is left
        out, on this rank at least.
    """
    if training.meet is None:
        stage_exchange(training, round_).commit()
    else:
        training.meet(round_)


def stage_exchange(training: Training, round_: Round, weight: float = 1.0) -> Staged:
    """Take the exchange of a round up to where it is written.

    Args: weight: what this rank's difference is multiplied by before it is sent, see `weight_of`.
    Raises: as `exchange`.
    """
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
        differences = _weighed(states, differences, weight)

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


def weight_of(tokens: Sequence[float], rank: int) -> float:
    """Return the weight of a rank's difference: its tokens over the mean of all ranks' tokens.

    The mean of what the ranks send is then weighed by tokens. It is the plain mean where nobody has any.
    """
    total = sum(tokens)
    return len(tokens) * tokens[rank] / total if total else 1.0


def _weighed(before: Tree, after: Tree, weight: float) -> Tree:
    """Return states after a difference was noted in them, with that difference times a weight."""
    if weight == 1.0:
        return after
    old = iter(tree.fields(before, "pending"))

    def scaled(state: OuterState) -> OuterState:
        pending = tree.map(lambda new, was: new if new is was else weight * new, state.pending, next(old))
        return state._replace(pending=pending)

    return tree.replace(after, OuterState, scaled)
