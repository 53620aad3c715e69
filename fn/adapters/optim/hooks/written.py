"""Params that somebody else wrote between two steps, such as a checkpoint that the model loads behind the optimizer.

A state may hold copies of the params, such as the anchor of rounds. They have to follow, or an exchange takes the
distance to what was written for steps of this rank. torch counts the versions of a tensor, which costs a look to ask
for; what is written through `p.data` is not counted.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.agreed_params import agreed_pairs
from fn.adapters.optim.core import Core, Unit, device_of, versions_of
from fn.adapters.optim.groups import names_of
from fn.adapters.optim.hooks.agree import check_same_params
from fn.collectives.agreement import gather_values
from fn.collectives.profiling import Watchers, watched_by


def follow_params(core: Core) -> None:
    """Let copies of the params in the states follow what was written into these since fn left them.

    Before the first step the ranks tell each other, and compare the params. Later, a rank follows where the params are
    what all ranks agree on; within a round nobody knows, and that is warned of. The axes must be bound.

    Raises: `RanksDisagree`, on all ranks, where the first step would start from params that differ.
    """
    written = [places_in(unit) for unit in core.units]
    if core.steps == 0 and not core.has_begun:
        wrote = any(written)
        with watched_by(Watchers()):  # which no ledger counts
            for axis in core.wires:
                wrote = any(gather_values(wrote, axis, device_of(core)))
            if wrote:
                check_same_params(core)
        if wrote:
            for unit in core.units:
                start_anew(unit)
                unit.versions = versions_of(unit)
        core.has_begun = True  # an overlap comes here behind the backward pass, and the step once more
    elif any(places for places, unit in zip(written, core.units, strict=True) if unit.has_copies):
        apart = core_apart(core)
        for places, unit in zip(written, core.units, strict=True):
            take_over(unit, [i for i in places if id_of(unit, i) not in apart or i in unit.met])
            lost = [i for i in places if id_of(unit, i) in apart and i not in unit.met]
            if lost and copies_in(unit):
                warn_once(core, unit, lost[0])


def places_in(unit: Unit) -> list[int]:
    """Return which params of a unit have other versions than fn left them with; none if it is not known."""
    now = versions_of(unit) if unit.versions else []
    return [i for i, version in enumerate(now) if version != unit.versions[i]]


def copies_in(unit: Unit) -> list[list[Tensor]]:
    """Return the copies of all params in a state, a list of tensors each."""
    shapes = [p.shape for p in tree.leaves(unit.params)]
    lists = [tree.leaves(copy) for copy in roles.find(unit.state, "copies")]
    return [copy for copy in lists if [x.shape for x in copy] == shapes]


def start_anew(unit: Unit) -> None:
    """Fill the copies in a state with those that its init makes of the present params; all ranks do."""
    old = roles.find(unit.state, "copies")
    if tree.leaves(old):
        new = roles.find(unit.transform.init(tree.map(Tensor.detach, unit.params)), "copies")
        for x, fresh in zip(tree.leaves(old), tree.leaves(new), strict=True):
            x.copy_(fresh)


def take_over(unit: Unit, places: list[int]) -> None:
    """Write params over their copies, but where a param is its copy, rounded: that has more digits."""
    params = tree.leaves(unit.params)
    for copy in copies_in(unit):
        for x, p in ((copy[i], params[i].detach().to(copy[i].device)) for i in places):
            x.copy_(torch.where(x.to(p.dtype) == p, x, p.to(x.dtype)))


def id_of(unit: Unit, i: int) -> int:
    """Return by what a param of a unit is known: its memory."""
    return int(tree.leaves(unit.params)[i].data_ptr())


def core_apart(core: Core) -> set[int]:
    """Return the params, by `id_of`, in which ranks stand apart; all of them where that is not known."""
    try:
        return {p.data_ptr() for p, _ in agreed_pairs(core)}
    except ValueError:
        return {p.data_ptr() for unit in core.units for p in tree.leaves(unit.params)}


def warn_once(core: Core, unit: Unit, place: int) -> None:
    """Warn of params that were written where ranks stand apart."""
    if not core.warned:
        core.warned = True
        name = [name for group in unit.groups for name in names_of(group)][place]
        text = f"params: something else than this optimizer wrote parameter {name} between two exchanges, which takes "
        text += "what was written for steps of this rank"
        cure = "load before the first step, right behind an exchange of all params, or together with the optimizer's "
        cure += "state; what changes params in every step belongs into the chain, as fn.stateless"
        warnings.warn(f"{text}; {cure}", stacklevel=6)
