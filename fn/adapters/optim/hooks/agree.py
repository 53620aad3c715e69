"""Comparisons between ranks: of settings, of the numbers that a run starts from, and of the exchange that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fn import roles, tree
from fn.adapters.optim.core import Core
from fn.adapters.optim.exchange_header import LOCAL_STEP_TAKEN, refuse_resting
from fn.adapters.optim.groups import groups_of, names_of
from fn.adapters.optim.shards import pieces
from fn.adapters.optim.units import Unit
from fn.base import facts_of
from fn.collectives.agreement import (
    check_agreement,
    check_numbers,
    describe,
    describe_numbers,
    device_of,
    gather_values,
)
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import RanksDisagree, expected
from fn.inplace.match import registered
from fn.roles import SAME

Tree = Any


def compare_on_axes(
    axes: Sequence[str],
    compare: Callable[[str], None],
    device: torch.device,
    error_of: Callable[..., RanksDisagree] = RanksDisagree,
) -> None:
    """Compare on one axis after the other; raise a `RanksDisagree` of some ranks on all of them.

    A rank that raised alone would leave those waiting that meet it on the next axis, and those that never meet it would
    not hear of it. Args: error_of: (message, rank=, field=) -> what is raised on ranks that only heard.
    """
    problem: RanksDisagree | None = None
    for axis in axes:
        try:
            compare(axis)
        except RanksDisagree as error:
            problem = problem or error
    for axis in axes if len(axes) > 1 else ():
        told = gather_values(None if problem is None else [str(problem), problem.rank, problem.field], axis, device)
        first = next((of_rank for of_rank in told if of_rank is not None), None)
        if problem is None and first is not None:
            text, rank, field = first
            problem = error_of(text, rank=rank, field=field)
    if problem is not None:
        raise problem


def axes_of_calls(core: Core) -> list[str]:
    """Return the axes over which ranks tell each other of a call, those within islands and of shards in front."""
    facts = [facts_of(unit.transform) for unit in core.units]
    within = {axis for one in facts for axis in (*one.inside, *one.shards)}
    return sorted(core.wires, key=lambda axis: axis not in within)


def check_listed(axes: Sequence[str], params: list[Any], others: Mapping[str, object]) -> None:
    """Compare settings that transforms do not know: ranks with other phases, groups or names would wait for each other.

    Args: params: what a `torch.optim.Optimizer` was given, as a list. others: more that must agree.
    Raises: `RanksDisagree`, on every rank.
    """
    groups = groups_of(params)
    fields: dict[str, object] = {"number of param groups": len(groups), "steps taken in place": registered()}
    for g, group in enumerate(groups):
        named = [p if isinstance(p, tuple) else (None, p) for p in group["params"]]
        fields[f"number of parameters in group {g}"] = len(named)
        for i, (name, p) in enumerate(named):
            if name is not None:
                fields[f"name of parameter {i} in group {g}"] = name
            if not getattr(p, "requires_grad", True):
                fields[f"requires_grad of parameter {i if name is None else name} in group {g}"] = False
    device = device_of(params)
    compare_on_axes(axes, lambda axis: check_agreement(axis, {**fields, **others}, device), device)


def check_accepted(
    axes: Sequence[str], group: int, problem: BaseException | None, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Tell the other ranks whether a param group was accepted here, and hear it from them.

    Compared is also which parameters are not contiguous. Kernels of whole steps do not take these, and a sharded step
    sends other messages without them, so ranks that differ would mix up updates and params.

    Raises: `problem` if there is one and the ranks agree on it; else `RanksDisagree`, on every rank.
    """
    verdict = "accepted" if problem is None else f"refused ({type(problem).__name__}: {problem})"
    fields: dict[str, object] = {f"param group {group}": verdict}
    # A group that was refused may hold anything, so its layout is not looked at.
    members = pieces(groups[group]["params"]) if problem is None else []
    for name, p in zip(names_of(groups[group]), members, strict=True) if members else ():
        if not p.is_contiguous():
            fields[f"layout of parameter {name} in group {group}"] = "not contiguous"
    device = device_of([*groups])
    compare_on_axes(axes, lambda axis: check_agreement(axis, fields, device), device)
    if problem is not None:
        raise problem


def check_start(axes: Sequence[str], unit: Unit, place: int) -> None:
    """Refuse a unit whose settings or numbers differ between ranks that are to train one model.

    Updates are the same on all ranks, so parameters that start apart stay apart, and nothing would say so; likewise
    what no class of the state names in `rank_local`. Not looked at are axes that the transform does not communicate
    over. All ranks must call it; one pass over parameters and state, and a digest of them on the wire.

    Args: place: the unit's number. Raises: `RanksDisagree`, on every rank.
    """
    cure = (
        "start from the same ones: the same seed before the model is made, torch.distributed.broadcast, or "
        "DistributedDataParallel, which does that"
    )
    # Params first: a state may hold copies of them, whose names the user does not know.
    axes = _compare_unit(axes, unit, place, cure)
    marks = tree.by_path(roles.kinds(unit.state))
    # Errors, shards and what ranks own differ between ranks by their nature.
    same = {path: leaf for path, leaf in tree.by_path(unit.state).items() if marks[path] == SAME}
    fields = {f"{name} of param group {place}": text for name, text in _settings(unit.hyper)}
    fields |= {f"{p} of the state, which rank_local does not name,": text for p, text in describe_numbers(same).items()}
    device = device_of(unit.groups)
    compare_on_axes(axes, lambda axis: check_agreement(axis, fields, device), device)


def _settings(hyper: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the hyper-parameters of a param group."""
    for name, value in hyper.items():
        for part, text in describe(value).items():
            inner = part.partition(".")[2]
            yield (f"{name}.{inner}" if inner else name), text


def check_islands(core: Core) -> None:
    """Refuse an exchange of islands whose ranks have gone apart: each would exchange with its partners elsewhere.

    Raises: `RanksDisagree`, on all ranks of the island.
    """
    inside = {axis for unit in core.units for axis in facts_of(unit.transform).inside}
    cure = (
        f"these are an island, whose ranks take local steps together; does the inner optimizer average in the phase "
        f"of local steps, as fn.average does in the warm-up only; {LOCAL_STEP_TAKEN}"
    )
    with watched_by(Watchers()):  # which no ledger counts
        _compare_params([axis for axis in core.axes if axis in inside], dict(enumerate(core.param_groups)), cure)


def compare_resting(core: Core) -> None:
    """Refuse a first step in which parameters rest on some ranks only. All ranks call it."""
    device, left = device_of(core.param_groups), "nothing has moved"
    compare_on_axes([*core.wires], lambda axis: refuse_resting((axis,), core.resting, device, left), device)


def check_same_params(core: Core) -> None:
    """Refuse a first step from params that differ, for they were written behind the construction. All ranks call it."""
    cure = "they were written after the optimizer was made: load the same ones on all ranks"
    for place, unit in enumerate(core.units):
        _compare_unit(core.axes, unit, place, cure)


def _compare_unit(axes: Sequence[str], unit: Unit, place: int, cure: str) -> list[str]:
    """Compare the parameters of a unit over those axes that its transform communicates over; return these."""
    facts = facts_of(unit.transform)
    own = [axis for axis in axes if facts.silent or axis in facts.axes]
    _compare_params(own, {place: unit.groups[0]} if len(unit.groups) == 1 else dict(enumerate(unit.groups)), cure)
    return own


def _compare_params(axes: Sequence[str], groups: Mapping[int, Mapping[str, Any]], cure: str) -> None:
    """Compare the numbers of parameters over some axes. Args: groups: by their places. cure: what to do."""
    if not axes:
        return
    device = device_of([*groups.values()])
    numbers = describe_numbers({
        f"parameter {name} in group {place}": p.detach()
        for place, group in groups.items()
        for name, p in zip(names_of(group), pieces(group["params"]), strict=True)
    })  # fmt: skip

    compare_on_axes(axes, lambda axis: check_numbers(axis, numbers, device, cure), device)


def check_paths(tree_: Tree, name: str = "state", of: str = "let init return dicts") -> None:
    """Refuse a tree with two leaves of one path with a ValueError: one would be saved for both.

    Args: name: of the argument. of: how its cure begins.
    """
    for path in [path for path, count in Counter(tree.paths(tree_)).items() if count > 1]:
        cure = f"{of} with strings without dots as keys"
        raise ValueError(expected(name, "a path of its own for every leaf", f"two leaves at {path!r}", cure))
