"""The params that all ranks agree on, in the place of a rank's own: what one evaluates and exports.

Between exchanges the ranks of local steps stand at params of their own. Which rank's loss is printed, or whose model is
saved, would then be chance. What they agree on is in the state: the anchor of `fn.outer`, or that of 0/1 Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.signals import defer_signals, writing
from fn.adapters.optim.training import Training
from fn.collectives.axis import ALONE, Axis, Binding
from fn.errors import expected
from fn.roles import has_local_params, rank_local
from fn.transforms.average_params import AverageParamsState
from fn.transforms.outer import OuterState, OwnAnchorState
from fn.transforms.zero_one_adam import ZeroOneAdamState

Tree = Any
Apart = OuterState | ZeroOneAdamState
"""States of methods whose ranks stand at params of their own."""


@contextmanager
def agreed_params(optimizer: Optimizer) -> Iterator[None]:
    """Put the params that all ranks agree on in the place of this rank's own, for as long as the context lasts.

        with fn.adapters.agreed_params(opt):
            evaluate(model)
            torch.save(model.state_dict(), "model.pt")

    These are the anchor of `fn.diloco` and its relatives, and the params after the last synchronisation of 0/1 Adam,
    rounded to the params' dtype. In a warm-up, and for all other methods, the params themselves are agreed on, and
    nothing is copied. At the end the params are bitwise what they were, also if the body raises.

    Enter it between a step and the next backward pass. Nothing is sent, so a rank may enter alone; a mean that travels
    is waited for. Contexts may be nested. Parameters of FSDP2 are exchanged shard by shard. What FSDP2 gathered from
    them stays gathered: call `model.reshard()` at the end of the body.

    To go on training from, save outside of it: a checkpoint of a rank has its own params.

    Args: optimizer: an `fn.Optimizer`. While the context lasts it refuses to step or to load, with a RuntimeError.
    Raises: TypeError for another optimizer; ValueError for `fn.sparta`, `fn.des_loc`, `fn.no_loco` and eager rounds,
        whose states hold nothing that all ranks agree on, and for a transform of one's own whose class of states says
        `local_params`.

    >>> import torch, fn
    >>> from functools import partial
    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> opt = fn.Optimizer([p], partial(fn.diloco, axis="data"), schedule=fn.every(4), lr=0.1)
    >>> p.grad = torch.ones(1)
    >>> opt.step()                                       # a local step
    >>> with fn.adapters.agreed_params(opt):
    ...     inside = p.item()
    >>> inside, round(p.item(), 4)
    (0.0, -0.1)
    """
    if not isinstance(optimizer, Optimizer):
        cure = "the optimizer inside of a trainer's wrapper is its .optimizer"
        raise TypeError(expected("optimizer", "an fn.Optimizer", type(optimizer).__name__, cure))
    training = optimizer.training
    training.check_whole("agreed_params")
    training.settle()
    training.groups = optimizer.param_groups
    kept: list[tuple[Tensor, Tensor]] = []
    was_lent = training.lent
    try:
        with defer_signals(), torch.no_grad():
            pairs = _agreed(training)
            kept = [(p, p.clone()) for p, _ in pairs]
            with writing(training):
                for p, x in pairs:
                    p.copy_(x)
            training.lent = True
        yield
    finally:
        with defer_signals(), torch.no_grad():
            with writing(training):
                for p, x in kept:
                    p.copy_(x)
            training.lent = was_lent


def _agreed(training: Training) -> list[tuple[Tensor, Tensor]]:
    """Return the params of this rank's own, each with what all ranks agree on in its place."""
    pairs = []
    for index, (state, group) in enumerate(zip(training.states, training.params, strict=True)):
        group = [p.detach() for p in group]
        states_apart = [*_apart(state)]
        if not any(map(_has_left, states_apart)):
            continue
        for state_apart, places in zip(states_apart, _places(training, index, group, states_apart), strict=True):
            if _has_left(state_apart):
                chosen = [group[i] for i in places]
                pairs += [*zip(chosen, _start(state_apart, chosen), strict=True)]
    return pairs


def _apart(state: Tree, own: bool = False) -> Iterator[Apart]:
    """Yield the states in a state whose ranks stand at params of their own.

    Args: own: whether this is one rank's own. Raises: ValueError for one of which it is not known what ranks agree on.
    """
    if isinstance(state, Tensor):
        return
    known = isinstance(state, OuterState | ZeroOneAdamState) and not isinstance(state, OwnAnchorState)
    declares = isinstance(state, tuple) and hasattr(state, "_fields")
    if declares and has_local_params(state) and (own or not known):
        wanted = "a transform whose state has what all ranks agree on, as that of fn.outer"
        mean = "evaluate the ranks' mean, fn.pmean(params, axis) inside of fn.bind"
        cure = "evaluate right behind an exchange"
        if isinstance(state, OwnAnchorState):
            cure = f"the ranks never agree on one; {mean}"
        elif isinstance(state, AverageParamsState):
            cure = f"evaluate right behind an average of all params, as fn.des_loc has; for fn.sparta {mean}"
        raise ValueError(expected("optimizer", wanted, f"{type(state).__name__}, which has local_params", cure))
    if isinstance(state, OuterState | ZeroOneAdamState):
        yield state
    elif declares:
        local = rank_local(state)
        for name, value in zip(state._fields, state, strict=True):
            yield from _apart(value, own or name in local)
    elif isinstance(state, tuple | list | dict):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _apart(value, own)


def _has_left(state: Apart) -> bool:
    """Tell whether the ranks have taken steps of their own. In a warm-up they agree on the params themselves."""
    return float(state.alone if isinstance(state, OuterState) else state.elapsed) > 0


def _start(state: Apart, params: Sequence[Tensor]) -> list[Tensor]:
    """Return what all ranks agree on, one for each of the params."""
    if isinstance(state, ZeroOneAdamState) and not tree.leaves(state.anchor):
        return [p.to(w.dtype) - w for p, w in zip(params, tree.leaves(state.went), strict=True)]
    return tree.leaves(state.anchor)


def _places(training: Training, index: int, group: Sequence[Tensor], apart: Sequence[Apart]) -> list[list[int]]:
    """Return of which params of a group each of the states is, by number.

    One state of them all has them in their order. Several, or one of some of them, as in a partition: an init of
    params that hold their numbers tells, on a rank that is alone, for nothing is to be sent.

    Raises: ValueError for some of the params where no state holds copies.
    """
    if len(apart) == 1 and len(_like_params(apart[0])) == len(group):
        return [[*range(len(group))]]
    if any(isinstance(state, ZeroOneAdamState) and tree.leaves(state.went) for state in apart):
        raise ValueError(expected("optimizer", "0/1 Adam without an anchor over all params of a group", "a part"))
    alone = Binding(
        {axis: Axis(1, torch.tensor(0, dtype=torch.int64, device="cpu"), ALONE) for axis in training.binding.axes}
    )
    places = [[0] * len(_like_params(state)) for state in apart]
    for power in range(len(group).bit_length()):  # a bit at a time, which an anchor of any dtype can hold
        marked = [torch.full_like(p, float(i >> power & 1)) for i, p in enumerate(group)]
        with alone:
            marked_states = [*_apart(training.transforms[index].init(marked))]
        for of_state, state in zip(places, marked_states, strict=True):
            bits = [int(x.flatten()[0]) if x.numel() else 0 for x in _like_params(state)]
            of_state[:] = [place | bit << power for place, bit in zip(of_state, bits, strict=True)]
    return places


def _like_params(state: Apart) -> list[Tensor]:
    return tree.leaves(state.anchor if isinstance(state, OuterState) or tree.leaves(state.anchor) else state.went)
