"""What all ranks hold alike, and the comparison of it: which leaves of a state, and what an optimizer starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.param_groups import groups_of, names_of
from fn.base import Transform, facts_of
from fn.collectives.agreement import check_agreement, describe_numbers, differences, gather_values
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import RanksDisagree, expected
from fn.schedules import Every
from fn.transforms.outer import OuterState, OwnAnchorState
from fn.transforms.owned import OwnedState
from fn.transforms.round_arguments import late_enough

Tree = Any

SAME, OWN, ERROR, SHARD, OWNED, PLAN = "same", "own", "error", "shard", "owned", "plan"
"""A leaf is the same on all ranks, or one rank's own: an error, a shard, or what goes with params of its own. Or it is
owned: whole on one rank, and without elements on the others; a plan says on which."""

OF_EACH_RANK = frozenset((OWN, ERROR, SHARD))
"""What every rank has another of, under one path."""


def kinds(states: Tree, mark: str = SAME) -> Tree:
    """Return a tree like the states with SAME, OWN, ERROR, SHARD, OWNED or PLAN at every leaf.

    What a class names in `rank_local` are errors, unless it says `local_params`: that each rank goes to params of its
    own. Args: mark: of what no class names.
    """
    if isinstance(states, tuple) and hasattr(states, "_fields"):
        said, own = roles.roles_of(states), ERROR
        if mark == SHARD or said.shard:
            own = SHARD
        elif roles.has_local_params(states):
            own = OWN
        marks = {name: ERROR if name in said.errors else own for name in roles.rank_local(states)}
        marks |= {"inner": OWNED, "back": OWNED, "owners": PLAN} if isinstance(states, OwnedState) else {}
        fields = zip(states._fields, states, strict=True)
        return type(states)(*(kinds(value, marks.get(name, mark)) for name, value in fields))
    if isinstance(states, tuple | list):
        return type(states)(kinds(value, mark) for value in states)
    if isinstance(states, dict):
        return {key: kinds(value, mark) for key, value in states.items()}
    return tree.map(lambda _: mark, states)


def worker_errors(states: Tree) -> list[Tree]:
    """Return what was not delivered yet by averages in codes; empty if there are none."""
    return [errors.worker for errors in tree.instances(states, ErrorFeedbackState)]


def by_path(states: Tree, prefix: str = "state.") -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    return {f"{prefix}{path}": leaf for path, leaf in zip(tree.paths(states), tree.leaves(states), strict=True)}


def owned_paths(states: Tree) -> set[str]:
    """Return the paths of what is owned, by this rank or another one."""
    return {path for path, mark in by_path(kinds(states)).items() if mark == OWNED}


def owned_elsewhere(states: Tree) -> set[str]:
    """Return the paths of what other ranks own. It has no elements here; an error in codes has an age beside them."""
    elsewhere = set[int]()
    for state in tree.instances(states, OwnedState):
        entries = [*state.back, *tree.leaves(state.inner)]
        without = [tree.leaves(x) for x in entries if any(not leaf.numel() for leaf in tree.leaves(x))]
        elsewhere |= {id(leaf) for leaves in without for leaf in leaves}
    return {path for path, leaf in by_path(states).items() if id(leaf) in elsewhere}


def paths_of(states: Tree, role: str) -> set[str]:
    """Return the paths of the leaves that have a role, see `fn.Roles`."""
    chosen = {id(leaf) for leaf in tree.leaves(roles.find(states, role))}
    return {path for path, leaf in by_path(states).items() if id(leaf) in chosen}


def check_paths(tree_: Tree, name: str = "state", of: str = "let init return dicts") -> None:
    """Refuse a tree of which two leaves have one path with a ValueError: one would be saved for both.

    Args: name: of the argument. of: how its cure begins.
    """
    for path in [path for path, count in Counter(tree.paths(tree_)).items() if count > 1]:
        cure = f"{of} with strings without dots as keys"
        raise ValueError(expected(name, "a path of its own for every leaf", f"two leaves at {path!r}", cure))


LOCAL_STEP_TAKEN = "the exchange is left out; parameters and state are as after the local step, which counts"
"""What an exchange of a round leaves that fails."""


def device_among(params: Any) -> torch.device:
    """Return the device of the first tensor in a tree of params or param groups; the CPU if there is none."""
    return next((p.device for p in tree.leaves(params) if isinstance(p, Tensor)), torch.device("cpu"))


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


def check_listed(axes: Sequence[str], params: list[Any], others: Mapping[str, object]) -> None:
    """Compare what transforms do not know: ranks with other phases, groups or names would wait for one another.

    Args: params: what a `torch.optim.Optimizer` was given, as a list. others: more that must agree.
    Raises: `RanksDisagree`, on every rank.
    """
    groups = groups_of(params)
    fields: dict[str, object] = {"number of param groups": len(groups)}
    for g, group in enumerate(groups):
        fields[f"number of parameters in group {g}"] = len(group["params"])
        names = [p[0] for p in group["params"] if isinstance(p, tuple)]
        fields.update({f"name of parameter {i} in group {g}": name for i, name in enumerate(names)})
    device = device_among(params)
    compare_on_axes(axes, lambda axis: check_agreement(axis, {**fields, **others}, device), device)


def check_fragments(schedule: Any, states: Any) -> None:
    """Refuse a schedule of rounds that exchanges other fragments than `fn.outer` has, some of them never.

    Raises: ValueError with both numbers. Schedules of the user's own are not looked at.
    """
    if not isinstance(schedule, Every):
        return
    found = tree.instances(states, OuterState)
    for state in found:
        got = f"fn.every.delay={schedule.delay}, h={schedule.h}"
        eager, slots = isinstance(state, OwnAnchorState) and bool(state.more), 1 + len(state.more)
        if eager and schedule.delay != schedule.h:
            raise ValueError(expected("schedule", late_enough(slots, eager), got))
        if schedule.in_flight != slots:
            cure = f"or give fn.outer in_flight={schedule.in_flight}"
            raise ValueError(expected("schedule", late_enough(slots, eager), got, cure))
    counts = [len(state.outer) for state in found]
    if counts and schedule.fragments != max(counts):
        wanted = f"{max(counts)} fragments, as fn.outer makes of these params"
        got = f"fn.every.fragments={schedule.fragments}"
        raise ValueError(expected("schedule", wanted, got, "give both the same number, at most that of the params"))


def check_accepted(
    axes: Sequence[str], group: int, problem: BaseException | None, device: torch.device, strided: Sequence[str] = ()
) -> None:
    """Tell the other ranks whether a param group was accepted here, and hear it from them.

    Args: strided: the names of its parameters that are not contiguous. Kernels of whole steps do not take these, and a
        sharded step sends other messages without them, so ranks that differ would mix up updates and params.
    Raises: `problem` if there is one and the ranks agree on it; else `RanksDisagree`, on every rank.
    """
    verdict = "accepted" if problem is None else f"refused ({type(problem).__name__}: {problem})"
    fields: dict[str, object] = {f"param group {group}": verdict}
    fields |= {f"layout of parameter {name} in group {group}": "not contiguous" for name in strided}
    compare_on_axes(axes, lambda axis: check_agreement(axis, fields, device), device)
    if problem is not None:
        raise problem


def check_start(axes: Sequence[str], transform: Transform, state: Any, group: Mapping[str, Any], place: int) -> None:
    """Refuse a param group whose numbers differ between ranks that are to train one model.

    Updates are the same on all ranks, so parameters that start apart stay apart, and nothing would say so; likewise
    what no class of the state names in `rank_local`. Not looked at are axes that the transform does not communicate
    over. All ranks must call it; one pass over parameters and state, and a digest of them on the wire.

    Args: state: of the transform. group, place: the param group and its number.
    Raises: `RanksDisagree`, on every rank.
    """
    params = group["params"]
    facts = facts_of(transform)
    axes = [axis for axis in axes if facts.silent or axis in facts.axes]
    marks = by_path(kinds(state), "")
    replicated = describe_numbers({path: leaf for path, leaf in by_path(state, "").items() if marks[path] == SAME})
    fields = {f"{path} of the state, which rank_local does not name,": text for path, text in replicated.items()}
    device = device_among(params)
    compare_on_axes(axes, lambda axis: check_agreement(axis, fields, device), device)
    cure = (
        "start from the same ones: the same seed before the model is made, torch.distributed.broadcast, or "
        "DistributedDataParallel, which does that"
    )
    _compare_params(axes, {place: group}, cure)


def check_islands(axes: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an exchange of islands whose ranks have gone apart: each would exchange with its partners elsewhere.

    Args: axes: within an island. groups: the param groups. Raises: `RanksDisagree`, on all ranks of the island.
    """
    cure = (
        f"these are an island, whose ranks take local steps together; does the inner optimizer average in the phase "
        f"of local steps, as fn.average does in the warm-up only; {LOCAL_STEP_TAKEN}"
    )
    with watched_by(Watchers()):  # which no ledger counts, as in `gradients.shared_in_doubt`
        _compare_params(axes, dict(enumerate(groups)), cure)


def _compare_params(axes: Sequence[str], groups: Mapping[int, Mapping[str, Any]], cure: str) -> None:
    """Compare the numbers of parameters over some axes. Args: groups: by their places. cure: what to do."""
    if not axes:
        return
    device = device_among([*groups.values()])
    named = [
        (f"parameter {name} in group {place}", p.detach())
        for place, group in groups.items()
        for name, p in zip(names_of(group), group["params"], strict=True)
    ]
    numbers = describe_numbers(dict(named))

    def compare(axis: str) -> None:
        for difference in differences(numbers, partial(gather_values, axis=axis, device=device)):
            raise difference.error(
                f"the numbers of {difference.name} are others on rank {difference.rank} of axis {axis!r} than on rank "
                f"0; {cure}"
            )

    compare_on_axes(axes, compare, device)


def refuse_elsewhere(params: Iterable[Tensor]) -> None:
    """Refuse parameters on the meta device with a ValueError that says what to do instead."""
    for i, p in enumerate(params):
        if p.is_meta:
            raise ValueError(
                f"params: parameter {i} is on the meta device, which holds no numbers, and module.to_empty(device=...) "
                "makes other parameters of it; make the optimizer after that"
            )
