"""An optimizer's state as a flat {path: tensor}, which `torch.load(weights_only=True)` accepts.

`flat_state` names the rank that saved it under one key. `of_rank`, what `fn.Optimizer.state_dict` returns, has the rank
in the path of everything that is one rank's own: residual errors, shards, and what goes with params of its own.
Loading checks everything first, and then writes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.consistency import (
    ERROR,
    OF_EACH_RANK,
    OWNED,
    PLAN,
    SHARD,
    by_path,
    kinds,
    owned_elsewhere,
    paths_of,
)
from fn.adapters.optim.local_shards import as_dtensor, as_local
from fn.adapters.optim.param_groups import restored_numbers, saved_numbers, write_numbers
from fn.adapters.optim.signals import defer_signals, writing
from fn.adapters.optim.training import Training
from fn.collectives.compressed import ErrorFeedbackState
from fn.errors import expected
from fn.inplace.memory import written_into
from fn.schedules import FreezeWhenStable
from fn.transforms.outer import OuterState
from fn.transforms.owned import OwnedState

Tree = Any


SAVED_BY = "saved by"
"""The key of (rank, world size), int64: whose errors and shards these are."""

ORDER, CARRIED = "element order.", "carried."
"""How keys of version 0.2.0 begin: of the order in memory of a parameter's dimensions, in which its errors were saved,
and of what 8-bit errors had rounded off when the number of ranks changed."""


def flat_state(training: Training) -> dict[str, Tensor]:
    """Return the steps, every group's numbers and state, and a schedule's memory, by path.

    A mean that is on its way is waited for. What other ranks own is left out: its owner has it under the same path.
    """
    training.settle()
    counts = {"steps": training.steps, SAVED_BY: place_of(training)}
    flat = {name: torch.tensor(count, dtype=torch.int64, device="cpu") for name, count in counts.items()}
    for i, (group, hypers) in enumerate(zip(training.groups, training.hypers, strict=True)):
        flat.update({f"groups.{i}.{name}": x for name, x in saved_numbers(group, hypers).items()})
    elsewhere = owned_elsewhere(training.states)
    flat.update({path: x for path, x in by_path(training.states).items() if path not in elsewhere})
    # They are compared with what is loaded, which some loaders write into the tensors that they were given.
    plans = {path for path, mark in by_path(kinds(training.states)).items() if mark == PLAN}
    flat.update({path: flat[path].clone() for path in paths_of(training.states, "shard") | plans})
    schedule = training.schedule
    if isinstance(schedule, FreezeWhenStable):
        flat["schedule.norms"] = torch.tensor(schedule.norms, dtype=torch.float64, device="cpu")
        frozen_at = -1 if schedule.frozen_at is None else schedule.frozen_at
        flat["schedule.frozen_at"] = torch.tensor(frozen_at, dtype=torch.int64, device="cpu")
    return flat


OF_RANK = re.compile(r"rank (\d{1,9}) of (\d{1,9})\.(state\..*)", re.ASCII)
"""The path of what is one rank's own. `torch.distributed.checkpoint` writes once what several ranks call alike."""


def of_rank(training: Training) -> dict[str, Tensor]:
    """Return `flat_state` with a rank in the paths of what is its own, in place of `SAVED_BY`."""
    training.check_whole("state_dict")
    (rank, size), flat = place_of(training), flat_state(training)
    del flat[SAVED_BY]
    flat.update({path: as_dtensor(flat[path], like) for path, like in training.divided.items() if path in flat})
    of_this_rank = {path for path, mark in by_path(kinds(training.states)).items() if mark in OF_EACH_RANK}
    return {f"rank {rank} of {size}.{path}" if path in of_this_rank else path: x for path, x in flat.items()}


def restore_of_rank(training: Training, saved: Mapping[str, Any]) -> None:
    """Load what `of_rank` returned, here or on another rank, or of all ranks' what is this rank's own.

    Raises: as `restore_flat`; ValueError if it holds what belongs to other numbers of ranks.
    """
    check_keys(saved, "fn.Optimizer")
    saved = {path: as_local(x) for path, x in saved.items()}
    matches = {path: OF_RANK.fullmatch(path) for path in saved}
    places = {(int(m[1]), int(m[2])) for m in matches.values() if m}
    if len({size for _, size in places}) > 1:
        ranks = ", ".join(f"rank {rank} of {size}" for rank, size in sorted(places))
        raise ValueError(expected("state_dict", "the errors of one rank, or of one world", f"those of {ranks}"))
    if SAVED_BY in saved:
        raise ValueError(f"state_dict: {SAVED_BY!r} is unexpected; paths say whose errors and shards they hold")
    here = place_of(training)
    place = here if here in places else min(places, default=here)
    of_place = {m[3]: saved[path] for path, m in matches.items() if m and (int(m[1]), int(m[2])) == place}
    same = {path: x for path, x in saved.items() if not matches[path]}
    check_late_means(training, {*same, *of_place}, set(of_place), "state_dict")
    restore_flat(training, {SAVED_BY: torch.tensor(place, dtype=torch.int64, device="cpu"), **same, **of_place})


def place_of(training: Training, axes: Sequence[str] | None = None) -> tuple[int, int]:
    """Return this rank's number among those of some axes, and how many these are.

    Args: axes: None: those of the optimizer. Ranks of an axis that tensors are divided over count where they have
        residual errors of their own.
    """
    rank, size = 0, 1
    if axes is None:
        divided = tree.leaves([state.errors for state in tree.instances(training.states, OwnedState)])
        axes = training.all_axes if divided else training.axes
    for axis in axes:
        bound = training.binding.axes[axis]
        rank, size = rank * bound.size + int(bound.rank), size * bound.size
    return rank, size


def restore_flat(training: Training, saved: Mapping[str, Any]) -> None:
    """Copy a `flat_state` into an optimizer's buffers. What another rank saved continues with errors of zero.

    Raises: ValueError that names the first path that is missing, unexpected or of another shape or dtype, or for what
        another rank saved if it holds shards, or errors on the way back within a node; nothing is copied then.
    """
    if {"state", "param_groups"} <= saved.keys():
        wanted, got = "what fn.Optimizer.state_dict returned", "that of an optimizer of torch"
        cure = "start anew, with a warm-up in which the moments build up again"
        raise ValueError(expected("state_dict", wanted, got, cure))
    live = flat_state(training)
    saved = {**saved, **roles.added(training.states, saved, "state.")}
    saved = _own_part(training, live, saved)
    saved, texts = _without_foreign_errors(training, live, saved)
    check_fits(live, saved)
    _check_states(training, live, saved)
    numbers = [_numbers_of(training, i, saved) for i in range(len(training.groups))]
    carried = [x.double() for path, x in saved.items() if path.startswith(CARRIED)]
    if carried:
        norm = float(torch.stack([x.norm().cpu() for x in carried]).norm())
        texts.append(f"state_dict: gradients of norm {norm:.3g} that 8-bit errors had rounded off are not carried on")
    if unsaved := _unsaved_numbers(training, live, saved):
        cure = "give what it was saved with, such as None, to go on as before"
        texts.append(f"state_dict: was saved without {unsaved}, with which it goes on; {cure}")
    for text in texts:
        warnings.warn(text, stacklevel=4)
    with defer_signals():
        _write(training, saved, numbers)


def _own_part(training: Training, live: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was saved without what other ranks own now; owners stay as they are here.

    Raises: ValueError for a state dict without a tensor that this rank owns.
    """
    marks = by_path(kinds(training.states))
    own = {path: x for path, x in saved.items() if marks.get(path) != OWNED or path in live}
    missing = next((path for path, mark in marks.items() if mark == OWNED and path in live and path not in own), None)
    if missing is not None and any(marks.get(path) == OWNED for path in saved):
        wanted = f"{missing!r}, which this rank owns"
        cure = "save with fn.adapters.checkpoint, whose save and gather have the tensors of all ranks"
        raise ValueError(expected("state_dict", wanted, "the tensors of another rank", cure))
    return own | {path: live[path] for path, mark in marks.items() if mark == PLAN and path in own}


def _unsaved_numbers(training: Training, live: Mapping[str, Tensor], saved: Mapping[str, Any]) -> str:
    """Return the hyper-parameters that a saved group had not, or as None: `max_step` has a default since 0.3."""
    new = dict[str, None]()  # in the order in which they come, each once
    for i, hypers in enumerate(training.hypers):
        prefix = f"groups.{i}."
        if sum(path.startswith(prefix) for path in saved) > 1:  # else only its learning rate was saved
            missing = [name for name in hypers if prefix + name in live and prefix + name not in saved]
            new.update({f"{name}={hypers[name]:g}": None for name in missing})
    return ", ".join(new)


def check_keys(saved: object, saver: str) -> None:
    """Refuse what is no flat state with a TypeError: no mapping, or one with a key that is no string, which it names.

    Args: saver: the class whose `state_dict` returns what is wanted.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(expected("state_dict", f"what {saver}.state_dict returned", type(saved).__name__))
    for key in saved:
        if not isinstance(key, str):
            got = f"{key!r}, of type {type(key).__name__}"
            cure = "load what state_dict() returned"
            raise TypeError(expected("state_dict", "keys to be strings, such as 'steps'", got, cure))


def _numbers_of(training: Training, index: int, saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries that a flat state brings into a param group.

    Raises: ValueError that names the group if its transform cannot be made of them.
    """
    prefix, group = f"groups.{index}.", training.groups[index]
    of_group = {path.removeprefix(prefix): x for path, x in saved.items() if path.startswith(prefix)}
    entries = restored_numbers(group, of_group)
    try:
        training.check_group(index, {**group, **entries})
    except Exception as error:
        text = f"state_dict: expected numbers of param group {index} that its transform takes, but got {error}"
        raise ValueError(text) from error
    return entries


def check_late_means(training: Training, saved: Collection[str], own: Collection[str], argument: str) -> None:
    """Refuse a state of `fn.outer` that was saved with another `in_flight` or `eager`.

    Eager steps leave in the same tensors what is not yet in the anchor, where others leave whole means. Their anchors
    are each rank's own, by which they are told apart.

    Args: saved: the paths of what was saved. own: those of what was one rank's own. argument: that it was given as.
    Raises: ValueError that names both settings.
    """
    live, marks = by_path(training.states), by_path(kinds(training.states))
    own_here = {path for path, mark in marks.items() if mark in OF_EACH_RANK}
    for state in tree.instances(training.states, OuterState):
        prefix = next(path for path, x in live.items() if x is state.alone).removesuffix("alone")
        here, there = _late_means(prefix, live, own_here), _late_means(prefix, saved, own)
        if f"{prefix}alone" in saved and here != there:
            wanted = f"one that was saved with {here}, as this optimizer has"
            raise ValueError(expected(argument, wanted, f"one with {there}", "make the optimizer as the saved one was"))


def _late_means(prefix: str, paths: Collection[str], own: Collection[str]) -> str:
    """Return how means come late in a state of `fn.outer`, by its paths and those of each rank's own."""
    more = f"{prefix}more."
    lanes = 1 + len({path.removeprefix(more).partition(".")[0] for path in paths if path.startswith(more)})
    if not any(path.startswith(f"{prefix}anchor") for path in own):
        return f"in_flight={lanes}"
    return "eager=True" if lanes > 1 else "anchors of each rank's own"


def check_fits(live: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Compare a flat state with one to be loaded.

    Raises: ValueError that names the first path that is missing, unexpected, or of another shape or dtype.
    """
    optional = {path for path in {*live, *saved} if is_optional(path)}
    for path in sorted((set(live) ^ set(saved)) - optional):
        hint = about_servers(path, live, saved)
        if path.startswith("schedule."):
            what = "opt.state_dict() has it" if path in live else "leave it out"
            hint = f"; only fn.freeze_when_stable has it, so the schedules differ; if that is meant, {what}"
        if path.startswith("groups."):
            hint = SPLIT
        raise ValueError(f"state_dict: {path!r} is {'missing' if path in live else 'unexpected'}{hint}")
    for path, theirs in saved.items():
        check_tensor(path, theirs)
        if path.startswith("groups.") and f"{path.rpartition('.')[0]}.lr" not in live:
            raise ValueError(f"state_dict: {path!r} is unexpected{SPLIT}")
    for path, mine in live.items():
        theirs = saved.get(path, mine)
        fits = theirs.ndim == 1 if path == "schedule.norms" else theirs.shape == mine.shape
        if not fits or (theirs.dtype != mine.dtype and not path.startswith("groups.")):
            raise ValueError(
                f"state_dict: {path!r} is {theirs.dtype} {tuple(theirs.shape)}, but this has {mine.dtype} "
                f"{tuple(mine.shape)}; errors belong to the world size they were made for"
            )


def _check_states(training: Training, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse the shards of another rank, and counts of skipped steps below 0, with a ValueError that names the path."""
    for path in paths_of(training.states, "shard"):
        mine, theirs = live[path].tolist(), saved[path].tolist()
        if theirs != mine:
            raise ValueError(
                f"state_dict: {path!r} says shard {theirs[0]} of {theirs[1]}, but this rank has shard {mine[0]} of "
                f"{mine[1]}; shards belong to the ranks and the order of axes they were made for"
            )
    for path in paths_of(training.states, "skips"):
        if saved[path] < 0:
            raise ValueError(_negative(path, saved[path]))


def check_tensor(path: str, x: Any) -> None:
    """Refuse what cannot be copied into a state, numbers of a group that are no numbers, and counts below 0."""
    if not isinstance(x, Tensor):
        raise ValueError(f"state_dict: {path!r} is {type(x).__name__}, not a tensor")
    if x.layout != torch.strided or x.is_nested or x.is_meta:
        kind = "nested" if x.is_nested else "on the meta device" if x.is_meta else f"of layout {x.layout}"
        raise ValueError(f"state_dict: expected {path!r} to be a dense tensor with numbers, but got one that is {kind}")
    if path.startswith("groups.") and (x.ndim or x.is_complex() or x.isnan()):
        form = f"{x.dtype} {tuple(x.shape)}" if x.ndim or x.is_complex() else "nan"
        raise ValueError(f"state_dict: expected {path!r} to be a real number, a 0-d tensor, but got {form}")
    if path in ("steps", "skipped") and not x.ndim and x < 0:
        raise ValueError(_negative(path, x))


def _negative(path: str, x: Tensor) -> str:
    return f"state_dict: expected {path!r} to be at least 0, but got {x.item()}"


def is_optional(path: str) -> bool:
    """Tell whether a path may be missing: numbers of a group but its learning rate, and what version 0.2.0 saved."""
    return path.startswith((CARRIED, ORDER)) or (path.startswith("groups.") and not path.endswith(".lr"))


SPLIT = "; it was saved with other param groups: those of ddp.optimizer and bucketed belong to their `elements`"
"""What to say of a path that belongs to a param group."""


def about_servers(path: str, live: Collection[str], saved: Collection[str]) -> str:
    """Return what to say of a path of one of two states whose other has no errors of servers beside those of workers.

    Empty if that is not so.
    """
    before, errors, _ = path.partition(".server.")
    lacks = live if path in saved else saved
    halves = [any(p.startswith(f"{before}.{half}.") for p in lacks) for half in ("worker", "server")]
    if not errors or halves != [True, False]:
        return ""
    return f"; saved with servers={path in saved}, but this has servers={path in live}: make it as the saved one was"


def _without_foreign_errors(
    training: Training, live: Mapping[str, Tensor], saved: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return what was saved, with zeros for errors if another rank saved it, and what there is to say about that.

    Likewise for errors in the order of memory, as version 0.2.0 saved them: pieces of servers lie on all ranks then.
    """
    theirs, mine = saved[SAVED_BY], live[SAVED_BY]
    in_memory_order = any(path.startswith(ORDER) for path in saved)
    if torch.equal(theirs, mine) and not in_memory_order:
        return saved, []
    marks = by_path(kinds(training.states))
    who = "rank {} of {}".format(*theirs.tolist()), "rank {} of {}".format(*mine.tolist())
    how = "save with fn.adapters.checkpoint, or on every rank a state_dict of its own"
    if in_memory_order:
        who = f"{who[0]}, with elements in the order of memory", f"{who[1]}, with elements in the order of shapes"
        how = "load a folder that fn.adapters.checkpoint saved"
    if SHARD in marks.values():
        raise ValueError(f"state_dict: is of {who[0]} and holds its shards only, but this is {who[1]}; {how}")
    if any(_between_nodes(errors.server) for errors in tree.instances(training.states, ErrorFeedbackState)):
        raise ValueError(
            f"state_dict: is of {who[0]}, but this is {who[1]}, and the ranks of different nodes stay together only "
            f"while their errors of the hop within a node, which has codes on the way back, are equal; {how}, or make "
            f"the optimizer without them, feedback=(fn.off(), fn.classic())"
        )
    zeros = {path: torch.zeros_like(live[path]) for path, mark in marks.items() if mark == ERROR}
    text = (
        f"state_dict: is of {who[0]}, but this is {who[1]}: its own errors, what compression had not delivered yet, "
        f"are lost and start from zero; to keep them {how}"
    )
    return {**saved, **zeros, SAVED_BY: mine}, [text] if zeros else []


def _between_nodes(servers: Tree) -> bool:
    """Tell whether servers of several axes have errors at another hop than the last: (one per hop) for each vector."""
    by_hop = [s for s in servers if isinstance(s, tuple) and not hasattr(s, "_fields")]
    return any(bool(tree.leaves(s[:-1])) for s in by_hop)


def _write(training: Training, saved: Mapping[str, Any], numbers: list[dict[str, Any]]) -> None:
    """Write what was found to fit: numbers into the param groups."""
    state = {path: x for path, x in by_path(training.states).items() if path in saved}
    write_state = written_into([*state.values()], [saved[path] for path in state])
    with writing(training), torch.no_grad():
        write_state()
        for group, entries in zip(training.groups, numbers, strict=True):
            write_numbers(group, entries)
    training.torn = False
    training.steps = int(saved["steps"])
    training.unseen_local_steps, training.seen_dropped = 0, training.dropped
    if isinstance(training.schedule, FreezeWhenStable):
        training.schedule.norms = saved["schedule.norms"].tolist()
        frozen_at = int(saved["schedule.frozen_at"])
        training.schedule.frozen_at = None if frozen_at < 0 else frozen_at
