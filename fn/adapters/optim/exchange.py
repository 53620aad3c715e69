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
from torch import Tensor

from fn import tree
from fn.adapters.optim.background import in_background
from fn.adapters.optim.donate import write_back
from fn.adapters.optim.signals import begin_writing
from fn.adapters.optim.step import checked
from fn.adapters.optim.training import Training
from fn.errors import expected
from fn.inplace.memory import among
from fn.inplace.protocol import Staged
from fn.phases import NewParams, Part, Round
from fn.transforms.outer import OuterState

Tree = Any
Params = tuple[list[Tensor], ...]
"""Tensors of each param group."""


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
    nothing = _filled(params, 0.0)

    def run(part: Part, states: Tree, here: Params) -> tuple[Tree, Params]:
        """Return the states and the params after a part."""
        moves, states = checked(update.composed(part))(nothing, states, here)
        return states, _moved(here, moves, nothing)

    states, here, parts = training.states, params, {part.kind: part for part in round_.exchange}
    sending: Callable[[], Tree] | None = None
    if "mean" in parts:
        differences, here = run(parts["difference"], states, here)
        differences = _weighed(states, differences, weight)
        if round_.end == round_.begin:
            states, here = run(parts["mean"], differences, here)
        else:
            # Local steps write the params while the mean travels, so it is shown none: what it read would depend on
            # the time, and params that it returned would undo those steps.
            unknown = _filled(params, torch.nan)

            def mean() -> Tree:
                states, new = run(parts["mean"], differences, unknown)
                _check_unmoved(unknown, new)
                return states

            sending = in_background(training, mean)
    if "outer" in parts:
        states, here = run(parts["outer"], states, here)

    def commit() -> None:
        pairs = [pair for each in zip(training.params, params, here, strict=True) for pair in zip(*each, strict=True)]
        changed = [(p, x) for p, before, x in pairs if x is not before]
        lies_in_old = among([*tree.leaves(training.states), *tree.leaves(params)])
        changed = [(p, x.clone() if lies_in_old(x) else x) for p, x in changed]
        begin_writing()
        if states is not training.states:
            write_back(training.states, states)
        for p, x in changed:
            p.copy_(x)
        training.sending = sending

    return Staged(True, commit)


def _filled(params: Params, value: float) -> Params:
    """Return trees like the params that hold one number everywhere, without memory for more."""
    return tuple([p.new_full((), value).expand_as(p) for p in group] for group in params)


def _moved(params: Params, moves: Any, nothing: Params) -> Params:
    """Return the params after a part: the very tensors where it moved nothing."""
    found = moves.params if isinstance(moves, NewParams) else moves

    def after(p: Tensor, x: Tensor, zero: Tensor) -> Tensor:
        if isinstance(moves, NewParams):
            return x.to(p.dtype)
        return p if x is zero else (p + x).to(p.dtype)

    groups = zip(params, found, nothing, strict=True)
    return tuple([after(*leaves) for leaves in zip(*map(tree.leaves, each), strict=True)] for each in groups)


def _check_unmoved(given: Params, found: Params) -> None:
    """Refuse a mean that travels while local steps go on, and returns params."""
    pairs = zip(tree.leaves(given), tree.leaves(found), strict=True)
    if any(x is not p and not bool(x.isnan().all()) for p, x in pairs):
        wanted = "the part 'mean' of a round to return no params, for local steps move them while it travels"
        cure = "keep the mean in the state and return params in the part 'outer', or use a schedule without a delay"
        raise ValueError(expected("rounds", wanted, "some", cure))


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
    old = iter(tree.instances(before, OuterState))

    def scaled(state: OuterState) -> OuterState:
        pending = tree.map(lambda new, was: new if new is was else weight * new, state.pending, next(old).pending)
        return state._replace(pending=pending)

    return tree.replace(after, OuterState, scaled)
