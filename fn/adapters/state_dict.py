"""An optimizer's state as a flat {path: tensor}, which `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters import carried
from fn.adapters.param_groups import restore_numbers, saved_numbers
from fn.collectives.axis import rank_dims
from fn.collectives.compressed import ErrorFeedbackState
from fn.schedules import FreezeWhenStable
from fn.transforms.sharded import ShardedState

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer

Tree = Any


SAVED_BY = "saved by"
"""The key of (rank, world size), int64: whose errors and shards these are."""

SAME, OWN, ERROR, SHARD = "same", "own", "error", "shard"
"""A leaf is the same on all ranks, or one rank's own; among these, an error or a shard."""


def kinds(states: Tree) -> Tree:
    """Return a tree like the states with SAME, OWN, ERROR or SHARD at every leaf."""
    marked = tree.replace(states, ErrorFeedbackState, lambda s: tree.map(lambda _: ERROR, s))
    marked = tree.replace(marked, ShardedState, lambda s: tree.map(lambda x: x if x is ERROR else SHARD, s))
    return tree.map(lambda m, d: m if isinstance(m, str) else SAME if d is None else OWN, marked, rank_dims(states))


def by_path(states: Tree, prefix: str = "state.") -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    return {f"{prefix}{path}": leaf for path, leaf in zip(tree.paths(states), tree.leaves(states), strict=True)}


def flat_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the steps, every group's numbers and state, what is carried, and a schedule's memory, by path."""
    found = {"steps": torch.tensor(optimizer.steps), SAVED_BY: torch.tensor(place_of(optimizer))}
    for i, (group, hypers) in enumerate(zip(optimizer.param_groups, optimizer._hypers, strict=True)):
        found.update({f"groups.{i}.{name}": x for name, x in saved_numbers(group, hypers).items()})
    # A place is compared with what is loaded, which some loaders write into the tensors that they were given.
    each = by_path(optimizer.states).items()
    found.update({path: leaf.clone() if path.endswith(".place") else leaf for path, leaf in each})
    found.update(carried.flat(optimizer.carried))
    schedule = optimizer.schedule
    if isinstance(schedule, FreezeWhenStable):
        found["schedule.norms"] = torch.tensor(schedule.norms, dtype=torch.float64)
        found["schedule.frozen_at"] = torch.tensor(-1 if schedule.frozen_at is None else schedule.frozen_at)
    return found


OF_RANK = re.compile(r"rank (\d+) of (\d+)\.(state\..*)")
"""The path of what is one rank's own. `torch.distributed.checkpoint` writes once what several ranks call alike."""


def of_rank(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return `flat_state` with a rank in the paths of what is its own, in place of `SAVED_BY`."""
    (rank, size), flat = place_of(optimizer), flat_state(optimizer)
    del flat[SAVED_BY]
    own = {path for path, mark in by_path(kinds(optimizer.states)).items() if mark != SAME}
    return {f"rank {rank} of {size}.{path}" if path in own else path: x for path, x in flat.items()}


def restore_of_rank(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load what `of_rank` returned, here or on another rank.

    Raises: as `restore_flat`; ValueError if it holds what is several ranks' own.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict: is {type(saved).__name__}; allowed is what fn.Optimizer.state_dict returned")
    found = {path: OF_RANK.fullmatch(path) for path in saved if isinstance(path, str)}
    places = {(int(m[1]), int(m[2])) for m in found.values() if m}
    if len(places) > 1:
        ranks = ", ".join(f"rank {rank} of {size}" for rank, size in sorted(places))
        raise ValueError(f"state_dict: holds the errors of {ranks}; allowed are those of one rank")
    flat = {m[3] if (m := found.get(path)) else path: x for path, x in saved.items()}
    restore_flat(optimizer, {SAVED_BY: torch.tensor(places.pop() if places else place_of(optimizer)), **flat})


def place_of(optimizer: Optimizer) -> tuple[int, int]:
    """Return this rank's number among those of the optimizer's axes, and how many these are."""
    rank, size = 0, 1
    for axis in optimizer._axes:
        bound = optimizer._binding.axes[axis]
        rank, size = rank * bound.size + int(bound.rank), size * bound.size
    return rank, size


def restore_flat(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Copy a `flat_state` into an optimizer's buffers. What another rank saved continues with errors of zero.

    Raises: ValueError that names the first path that is missing, unexpected or of another shape or dtype, or for what
        another rank saved if it holds shards, or errors on the way back within a node; nothing is copied then.
    """
    if {"state", "param_groups"} <= saved.keys():
        text = "state_dict: is of an optimizer of torch; allowed is what fn.Optimizer.state_dict returned; start anew"
        raise ValueError(f"{text}, with a warm-up in which the moments build up again")
    own = flat_state(optimizer)
    saved, text = _without_foreign_errors(optimizer, own, dict(saved))
    check_fits(own, saved)
    rest = carried.restored(saved, optimizer.param_groups)
    if text:
        warnings.warn(text, stacklevel=4)
    optimizer.carried = rest
    _copy(optimizer, saved)


def check_fits(own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Compare a flat state with one to be loaded.

    Raises: ValueError that names the first path that is missing, unexpected, of another shape or dtype, or of the
        shard of another rank.
    """
    optional = {path for path in {*own, *saved} if is_optional(path)}
    for path in sorted((set(own) ^ set(saved)) - optional):
        hint = about_servers(path, own, saved)
        if path.startswith("schedule."):
            what = "opt.state_dict() has it" if path in own else "leave it out"
            hint = f"; only fn.freeze_when_stable has it, so the schedules differ; if that is meant, {what}"
        if path.startswith("groups."):
            hint = SPLIT
        raise ValueError(f"state_dict: {path!r} is {'missing' if path in own else 'unexpected'}{hint}")
    for path, mine in own.items():
        theirs = saved.get(path, mine)
        if not isinstance(theirs, Tensor):
            raise ValueError(f"state_dict: {path!r} is {type(theirs).__name__}, not a tensor")
        fits = path == "schedule.norms" or theirs.shape == mine.shape
        if not fits or (theirs.dtype != mine.dtype and not path.startswith("groups.")):
            raise ValueError(
                f"state_dict: {path!r} is {theirs.dtype} {tuple(theirs.shape)}, but this has {mine.dtype} "
                f"{tuple(mine.shape)}; errors belong to the world size they were made for"
            )
        if path.endswith(".place") and theirs.tolist() != mine.tolist():
            raise ValueError(
                f"state_dict: {path!r} says shard {theirs[0]} of {theirs[1]}, but this rank has shard {mine[0]} of "
                f"{mine[1]}; shards belong to the ranks and the order of axes they were made for"
            )


def is_optional(path: str) -> bool:
    """Tell whether a path may be missing: numbers of a group other than its learning rate, and what is carried."""
    return path.startswith(carried.PREFIX) or (path.startswith("groups.") and not path.endswith(".lr"))


SPLIT = "; it was saved with other param groups: those of ddp.optimizer and bucketed belong to their `elements`"
"""What to say of a path that belongs to a param group."""


def about_servers(path: str, own: Collection[str], saved: Collection[str]) -> str:
    """Return what to say of a path of one of two states whose other has no errors of servers beside those of workers.

    Empty if that is not so.
    """
    before, errors, _ = path.partition(".server.")
    lacks = own if path in saved else saved
    halves = [any(p.startswith(f"{before}.{half}.") for p in lacks) for half in ("worker", "server")]
    if not errors or halves != [True, False]:
        return ""
    return f"; saved with servers={path in saved}, but this has servers={path in own}: make it as the saved one was"


def _without_foreign_errors(
    optimizer: Optimizer, own: Mapping[str, Tensor], saved: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return what was saved, with zeros for errors if another rank saved it, and what there is to say about that."""
    theirs, mine = saved[SAVED_BY], own[SAVED_BY]
    if torch.equal(theirs, mine):
        return saved, ""
    marks = by_path(kinds(optimizer.states))
    who = "rank {} of {}".format(*theirs.tolist()), "rank {} of {}".format(*mine.tolist())
    how = "save with fn.adapters.checkpoint, or on every rank a state_dict of its own"
    if SHARD in marks.values():
        raise ValueError(f"state_dict: is of {who[0]} and holds its shards only, but this is {who[1]}; {how}")
    if any(map(_between_nodes, tree.fields(optimizer.states, "server"))):
        raise ValueError(
            f"state_dict: is of {who[0]}, but this is {who[1]}, and the ranks of different nodes stay together only "
            f"while their errors of the hop within a node, which has codes on the way back, are equal; {how}, or make "
            f"the optimizer without them, feedback=(fn.off(), fn.classic())"
        )
    zeros = {path: torch.zeros_like(own[path]) for path, mark in marks.items() if mark == ERROR}
    text = (
        f"state_dict: is of {who[0]}, but this is {who[1]}: its own errors, what compression had not delivered yet, "
        f"are lost and start from zero; to keep them {how}"
    )
    return {**saved, **zeros, SAVED_BY: mine}, text if zeros else ""


def _between_nodes(servers: Tree) -> bool:
    """Tell whether servers of several axes have errors at another hop than the last: (one per hop) for each vector."""
    each = [s for s in servers if isinstance(s, tuple) and not hasattr(s, "_fields")]
    return any(bool(tree.leaves(s[:-1])) for s in each)


def _copy(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    optimizer.steps = int(saved["steps"])
    with torch.no_grad():
        for i, group in enumerate(optimizer.param_groups):
            here = f"groups.{i}."
            found = {path.removeprefix(here): x for path, x in saved.items() if path.startswith(here)}
            restore_numbers(group, found)
        for path, leaf in by_path(optimizer.states).items():
            leaf.copy_(saved[path])
    if isinstance(optimizer.schedule, FreezeWhenStable):
        optimizer.schedule.norms = saved["schedule.norms"].tolist()
        frozen_at = int(saved["schedule.frozen_at"])
        optimizer.schedule.frozen_at = None if frozen_at < 0 else frozen_at
