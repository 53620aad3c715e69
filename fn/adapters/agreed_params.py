"""Put the params that all ranks agree on in the place of a rank's own, to evaluate and to export them.

Between exchanges the ranks of local steps stand at params of their own. Which rank's loss is printed, or whose model is
saved, would then be chance. What they agree on is in the state: the anchor of `fn.outer`, or that of 0/1 Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.core import Core, Unit, versions_of
from fn.collectives.axis import alone
from fn.errors import expected

Tree = Any


@contextmanager
def agreed_params(optimizer: Core) -> Iterator[None]:
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
    Raises: TypeError for another optimizer; ValueError where states hold nothing that all ranks agree on, as those of
        `fn.average_params` and of a transform of one's own whose class of states says `local_params`.

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
    if not isinstance(optimizer, Core):
        cure = "the optimizer inside of a trainer's wrapper is its .optimizer"
        raise TypeError(expected("optimizer", "an fn.Optimizer", type(optimizer).__name__, cure))
    if optimizer.refused != LENT:
        optimizer.check_free("agreed_params")
    before, kept = optimizer.refused, list[tuple[Tensor, Tensor]]()
    clean = [unit for unit in optimizer.units if unit.versions and unit.versions == versions_of(unit)]
    try:
        with torch.no_grad():
            pairs = agreed_pairs(optimizer)
            # Kept before the first write, so that `finally` has all of them, whenever an exception comes.
            kept = [(p, p.clone()) for p, _ in pairs]
            with optimizer.writing():
                for p, x in pairs:
                    p.copy_(x)
        optimizer.refused = LENT
        yield
    finally:
        with torch.no_grad(), optimizer.writing():
            for p, x in kept:
                p.copy_(x)
        for unit in clean:  # what is put back is no other hand's
            unit.versions = versions_of(unit)
        optimizer.refused = before


LENT = "fn.adapters.agreed_params puts this rank's own params back at its end; leave that context first"


def agreed_pairs(core: Core) -> list[tuple[Tensor, Tensor]]:
    """Return the params of this rank's own, each with what all ranks agree on in its place."""
    pairs = []
    for unit, state in zip(core.units, core.states, strict=True):
        members = [p.detach() for p in tree.leaves(unit.params)]
        apart = [*_apart(state)]
        if not apart:
            continue
        for own, places in zip(apart, _places(core, unit, members, apart), strict=True):
            chosen = [members[i] for i in places]
            says: Any = roles.agreed_of(own)  # `_apart` yields only states that say it
            agreed = says(own, chosen)
            pairs += [] if agreed is None else [*zip(chosen, agreed, strict=True)]
    return pairs


def _apart(state: Tree, own: bool = False) -> Iterator[Tree]:
    """Yield the states in a state whose ranks stand at params of their own.

    Args: own: whether this is one rank's own. Raises: ValueError for one of which it is not known what ranks agree on.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        says = roles.agreed_of(state)
        if says is not None and not own:
            yield state
            return
        if roles.has_local_params(state):
            wanted = "a transform whose state has what all ranks agree on, as that of fn.outer"
            cure = "evaluate behind an exchange of all params, or the ranks' mean, fn.pmean(params, axis) in fn.bind"
            raise ValueError(expected("optimizer", wanted, f"{type(state).__name__}, which has local_params", cure))
        local = roles.rank_local(state)
        for name, value in zip(state._fields, state, strict=True):
            yield from _apart(value, own or name in local)
    else:
        for value in tree.inside(state):
            yield from _apart(value, own)


def _places(core: Core, unit: Unit, members: Sequence[Tensor], apart: Sequence[Tree]) -> list[list[int]]:
    """Return of which params of a unit each of the states is, by number.

    One state of them all has them in their order. Several, or one of some of them, as in a partition: an init of
    params that hold their numbers tells, on a rank that is alone, for nothing is to be sent.
    """
    counts = [len(_copies(state)) for state in apart]
    if counts in ([len(members)], [0]):
        return [[*range(len(members))]]
    places = [[0] * count for count in counts]
    for power in range(len(members).bit_length()):  # a bit at a time, which a copy of any dtype can hold
        # Parameter i is filled with one bit of i; the copies in the state that init makes then spell its number.
        marked = iter([torch.full_like(p, float(i >> power & 1)) for i, p in enumerate(members)])
        with alone(core.binding.axes):
            marked_states = [*_apart(unit.transform.init(tree.map(lambda _: next(marked), unit.params)))]  # noqa: B023
        for of_state, state in zip(places, marked_states, strict=True):
            bits = [int(x.flatten()[0]) if x.numel() else 0 for x in _copies(state)]
            of_state[:] = [place | bit << power for place, bit in zip(of_state, bits, strict=True)]
    return places


def _copies(state: Tree) -> list[Tensor]:
    return [leaf for name in roles.roles_of(state).copies[:1] for leaf in tree.leaves(getattr(state, name))]
