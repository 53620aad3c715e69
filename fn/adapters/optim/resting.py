"""Parameters that rest in a step: they keep their numbers, and so does what a state has of them, their moments say.

A rest is known on all ranks alike: `requires_grad` was switched off, or there is no gradient where no other rank adds
to it. A tensor whose gradient is missing on some ranks only has one of zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.shards import pieces
from fn.adapters.optim.units import Unit, Units
from fn.base import facts_of
from fn.collectives.axis import axis_size, bind_alone, names
from fn.collectives.compressed import ErrorFeedbackState
from fn.roles import OWN, SAME, SHARD
from fn.transforms.residuals import Residuals, residuals
from fn.transforms.sharded import divisions

Tree = Any


def hold(core: Units, *, exchange: bool = False) -> Callable[[], None]:
    """Return a function that gives params that rest their numbers back behind a step, and what a state has of them.

    Args: exchange: whether it is an exchange, in place of a step that moves moments.
    """
    kept = []
    for unit in core.units:
        if all(p.requires_grad and p.grad is not None for p in unit.members):
            continue
        knows = knows_gradients(core)
        rests = [not p.requires_grad or (knows and p.grad is None) for p in unit.members]
        if any(rests):
            kept.append(at_rest(core, unit, rests, moves_moments=not exchange))

    def put_back() -> None:
        for of_unit in kept:
            of_unit()

    return put_back


def knows_gradients(core: Units) -> bool:
    """Return whether no other rank adds to a gradient: this rank is alone, as bound now, or somebody else averages."""
    facts = [facts_of(unit.transform) for unit in core.units]
    sends = any(one.silent or one.axes for one in facts)
    return not sends or all(axis_size(axis) == 1 for axis in core.axes)


def at_rest(core: Units, unit: Unit, rests: Sequence[bool], *, moves_moments: bool) -> Callable[[], None]:
    """Return a function that gives params that rest their numbers back behind a step, and what a state has of them.

    Where moments are bias-corrected, the step counts as one that these tensors sat out.

    Args: rests: of each param. moves_moments: whether the step moves moments, as an exchange does not.
    """
    # Copies of the params rest with them; else the next exchange would move what rests.
    columns = [tree.leaves(unit.params), *unit.copies]
    kept: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = [
        (x, whole) for column in columns for x, stays in zip(column, rests, strict=True) if stays
    ]
    counts: list[tuple[list[Tensor], list[bool], list[Tensor], Tensor]] = []
    undelivered: list[tuple[int, Residuals, list[int], ErrorFeedbackState]] = []
    if moves_moments and not roles.find(unit.state, "taken"):  # late gradients move them when their mean arrives
        leaves, marks = tree.leaves(unit.state), tree.leaves(roles.kinds(unit.state))
        places = places_of(core, unit)
        # A rank's own errors are vectors, or codes with scales, whatever the shape: they are given back further below.
        # The sum of what codes have delivered is no vector; it rests as what was delivered of it does.
        errors = (roles.find(unit.state, role) for role in ("errors", "warmup_errors"))
        sent = {id(x) for found in errors for x in tree.leaves(found)}
        resting = {
            id(x)
            for x, i, mark in zip(leaves, places, marks, strict=True)
            if i is not None and rests[i] and mark != SHARD and (mark in (SAME, OWN) or id(x) not in sent)
        }
        kept += [(x, whole) for x in leaves if id(x) in resting]
        kept += [(x, find) for x, parts in zip(leaves, unit.parts, strict=True) for i, find in parts if rests[i]]
        found = [(ages, [id(mu) in resting for mu in mus], rested) for ages, mus, rested in counted(unit.state)]
        for node, members in zip(shards_in(unit.state), unit.divided, strict=True):
            if rested := tree.leaves([getattr(node, name) for name in roles.roles_of(node).rested]):
                ages = tree.leaves(next(filter(None, roles.find(node, "ages"))))
                found.append((ages, [rests[i] for i in members], rested))
        counts = [(rested, stay, ages, torch.stack(ages)) for ages, stay, rested in found if any(stay)]
        undelivered = [
            (k, note, members, tree.map(torch.clone, errors_in(unit.state)[k]))
            for k, note, members in unit.residuals
            if any(rests[i] for i in members) and core.islands not in names(note.axis)  # these are not bound here
        ]
    numbers = [find(x).detach().clone() for x, find in kept]

    def put_back() -> None:
        for (x, find), before in zip(kept, numbers, strict=True):
            find(x).copy_(before)  # found anew: the state may lie in other memory now
        for rested, stay, ages, before in counts:
            # The step of a frozen moment is none to sit out.
            steps = (torch.stack(ages) - before).amin()  # (2,) -> ()
            for count, stays in zip(rested, stay, strict=True):
                count.add_(steps * stays)  # all are written: whoever has read one of them reads all anew
        # What codes delivered of a tensor in this step is dropped with its update, so it is owed as before.
        for k, note, members, owed_before in undelivered:
            after, leaves = errors_in(unit.state)[k], [pieces(unit.members)[i] for i in members]
            with core.binding:
                owed = note.rested(owed_before, after, leaves, [rests[i] for i in members])
            for x, y in zip(tree.leaves(after), tree.leaves(owed), strict=True):
                x.copy_(y)

    return put_back


def whole(x: Tensor) -> Tensor:
    """Return a tensor as it is."""
    return x


def counted(state: Tree) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Return of each state with corrected moments the ages, first moments, and what tensors sat out, if it says so."""
    nodes = [(node, declared) for node in tree.named_tuples(state) if (declared := roles.roles_of(node)).first_moment]
    found = [
        tuple(tree.leaves(getattr(node, name)) for (name,) in (declared.ages, declared.first_moment, declared.rested))
        for node, declared in nodes
        if declared.rested
    ]
    return [(ages, mus, rested) for ages, mus, rested in found if rested]


def places_of(core: Units, unit: Unit) -> list[int | None]:
    """Return for each leaf of a unit's state the number of the parameter that it belongs to and has the shape of.

    To find it, init makes a state of stand-ins, no two of which have the same shape. By these it also notes which
    vectors have parts of which parameters, and which residual errors.
    """
    if not unit.places:
        params = unit.members
        # (..., 1, n, 1000 + i) for parameter i, of as many dimensions as it has, but of one at least, for some links
        # treat matrices otherwise, and of its n rows, which labels may divide; on "meta", where they take no memory.
        last = [(*p.shape[-2:-1], 1000 + i)[-(p.ndim or 1) :] for i, p in enumerate(params)]
        shapes = [(1,) * max(0, p.ndim - 2) + some for p, some in zip(params, last, strict=True)]
        members = iter([x.new_zeros(shape, device="meta") for x, shape in zip(pieces(params), shapes, strict=True)])
        stand_ins = unit.tree_of([[next(members) for _ in group["params"]] for group in unit.groups])
        number = {shape: i for i, shape in enumerate(shapes)}
        with bind_alone(core.binding.axes), divisions.collected() as notes, residuals.collected() as layouts:
            made = unit.transform.init(stand_ins)
        state, real = tree.by_path(made), [x.shape for x in pieces(params)]
        for path, x in tree.by_path(unit.state).items():
            i = number.get(tuple(state[path].shape)) if path in state else None
            unit.places.append(i if i is not None and x.shape == real[i] else None)
        of_leaves: dict[int, list[tuple[int, Callable[[Tensor], Tensor]]]] = {}
        for stand_in, node in zip(shards_in(made), shards_in(unit.state), strict=True):
            # By identity: an equal state may be another one's.
            division = next((note for note in notes if note.state is stand_in), None)
            found = [number[x.shape] for x in division.leaves if x.shape in number] if division else []
            unit.divided.append(found)
            if division and len(found) == len(division.leaves):
                for x, i, find in division.parts(node, [pieces(params)[n] for n in found]):
                    of_leaves.setdefault(id(x), []).append((found[i], find))
        for k, errors in enumerate(errors_in(made)):
            for note in layouts:
                if note.state is errors and all(x.shape in number for x in note.leaves):
                    unit.residuals.append((k, note, [number[x.shape] for x in note.leaves]))
        unit.parts = [of_leaves.get(id(x), []) for x in tree.leaves(unit.state)]
    return unit.places


def errors_in(state: Tree) -> list[ErrorFeedbackState]:
    """Return the residual errors that lie in vectors, outermost first."""
    return [node for node in tree.named_tuples(state) if isinstance(node, ErrorFeedbackState)]


def shards_in(state: Tree) -> list[Any]:
    """Return the states whose vectors are divided among ranks, outermost first."""
    return [node for node in tree.named_tuples(state) if roles.is_shard(node)]
