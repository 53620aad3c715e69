"""An optimizer's state as a flat {path: tensor}, which `torch.load(weights_only=True)` accepts.

The path of a tensor of one rank alone, such as residual errors and shards, names the rank. Loading checks everything
first, and then writes.
"""

from __future__ import annotations

import numbers
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim import groups
from fn.adapters.optim.core import TORN, Core, follow_members
from fn.adapters.optim.resting import counted, places_of
from fn.adapters.optim.shards import as_dtensor, division_of, has_dtensors, is_dtensor, pieces
from fn.adapters.optim.units import Unit
from fn.collectives.compressed import ErrorFeedbackState
from fn.errors import expected
from fn.inplace.memory import copy_plan
from fn.roles import ERROR, OF_EACH_RANK, OWN, OWNED, PLAN, SAME, SHARD
from fn.schedules import Remembering

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FORMAT, VERSION = "format", 5
"""The key of the number of this format, int64; fn 0.3 and before saved none."""

OF_RANK = re.compile(r"rank (\d{1,9}) of (\d{1,9})\.(state\..*)", re.ASCII)
"""The path of what is one rank's own. `torch.distributed.checkpoint` writes once what several ranks call alike."""

SPLIT = "; it was saved with other param groups: those of ddp.optimizer and bucketed belong to their `elements`"
"""The hint in messages about paths that belong to a param group."""

KEEP_ALL = "save with fn.adapters.checkpoint, or on every rank a state_dict of its own"


ASK_FOR_LAYOUT = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
)
"""Modules of torch that read "state" and "param_groups" out of any optimizer."""


def refuse_layout() -> None:
    """Refuse, where the caller's caller is one of `ASK_FOR_LAYOUT`, what it cannot read, with a NotImplementedError."""
    asking = sys._getframe(2)
    if asking.f_globals.get("__name__") in ASK_FOR_LAYOUT:
        while (outer := asking.f_back) is not None and outer.f_globals.get("__name__") in ASK_FOR_LAYOUT:
            asking = outer
        wanted = "an optimizer whose state_dict has 'state' and 'param_groups'"
        cure = (
            "save and load with fn.adapters.checkpoint, on any number of ranks, or each rank's opt.state_dict(); take "
            "get_model_state_dict for the model alone; or make the optimizer by the class that "
            "fn.adapters.torch_optimizer(make) returns; this one is as it was"
        )
        got = "an fn.Optimizer, whose state_dict is a flat {path: tensor}"
        raise NotImplementedError(expected(asking.f_code.co_name, wanted, got, cure))


class Elsewhere(defaultdict[Tensor, Any]):
    """The `state` of an optimizer whose moments are in its `states`: always empty.

    Of one whose `state` is empty torch's functions for state dicts take a step, to fill it. They ask here before that.
    """

    def __bool__(self) -> bool:
        refuse_layout()
        return len(self) > 0


def flat_state(core: Core) -> dict[str, Tensor]:
    """Return the steps, every group's numbers and names, the state, and a schedule's memory, by path.

    A mean that is on its way is waited for. What other ranks own is left out: its owner has it under the same path.

    Raises: ValueError for param groups that were edited by hand, whose parameters have no state.
    """
    follow_members(core)
    flat = {FORMAT: _int64(VERSION), "steps": _int64(core.steps)}
    for g, (group, _) in enumerate(_of_groups(core)):
        flat |= {f"groups.{g}.{name}": x for name, x in numbers_of(group).items()}
        # As bytes (n,), a line for each name: a flat state has tensors only.
        if names := group.get("param_names"):
            flat[f"groups.{g}.names"] = torch.tensor([*"\n".join(names).encode()], dtype=torch.uint8, device="cpu")
    # What is compared in a load is copied, for some loaders write into the tensors that they are given.
    compared, elsewhere = _with_role(core, "place"), owned_elsewhere(core)
    for path, x in tree.by_path(core.states, "state.").items():
        if path not in elsewhere:
            flat[path] = x.clone() if path in compared else x
    if isinstance(core.schedule, Remembering):
        for name, x in core.schedule.memory().items():
            flat[f"schedule.{name}"] = _int64(x) if isinstance(x, int) else _float64(x)
    return flat


def of_rank(core: Core) -> dict[str, Tensor]:
    """Return `flat_state` with this rank in the paths of what is its own, and DTensors of what is divided like one."""
    if core.refused == TORN:
        core.check_free("state_dict")
    flat, divided_like = flat_state(core), divided(core)
    flat |= {path: as_dtensor(flat[path], like) for path, like in divided_like.items() if path in flat}
    # All ranks of an island have pieces of its DTensors, which have one name, but residual errors each its own.
    (rank, size), (island, count) = place_of(core), place_of(core, core.axes)
    names = {path: f"rank {rank} of {size}.{path}" for path, mark in marks_of(core).items() if mark in OF_EACH_RANK}
    names |= {path: f"rank {island} of {count}.{path}" for path in divided_like if path in names}
    return {names.get(path, path): x for path, x in flat.items()}


def restore_of_rank(core: Core, saved: Mapping[str, Any]) -> None:
    """Load what `of_rank` returned, here or on another rank, or of all ranks' what is this rank's own.

    Raises: as `restore`; ValueError if it holds what belongs to other numbers of ranks.
    """
    if core.refused != TORN:
        core.check_free("load_state_dict")
    check_keys(saved, "fn.Optimizer")
    here, island, alike = place_of(core), place_of(core, core.axes), dict[str, Any]()
    of_ranks: dict[tuple[int, int], dict[str, Any]] = {}
    for path, x in saved.items():
        if match := OF_RANK.fullmatch(path):
            who = int(match[1]), int(match[2])
            who = here if who == island and is_dtensor(x) else who
            of_ranks.setdefault(who, {})[match[3]] = x
        else:
            alike[path] = x
    if len({size for _, size in of_ranks}) > 1:
        ranks = ", ".join(f"rank {rank} of {size}" for rank, size in sorted(of_ranks))
        raise ValueError(expected("state_dict", "the errors of one rank, or of one world", f"those of {ranks}"))
    by = here if here in of_ranks else min(of_ranks, default=here)
    flat = alike | of_ranks.get(by, {})
    restore(core, {path: pieces([x])[0] for path, x in flat.items()}, by)


def restore(
    core: Core, saved: Mapping[str, Any], by: tuple[int, int], params: Mapping[str, Tensor] | None = None
) -> None:
    """Copy a `flat_state` into an optimizer's buffers. What another rank saved continues with errors of zero.

    Args: by: the rank that saved, and of how many. params: parameters that are written together with it, by path.
    Raises: ValueError that names the first path that is missing, unexpected or of another shape or dtype, or for what
        another rank saved if it holds shards, or errors on the way back within a node; nothing is copied then.
    """
    check_format(saved)
    live, marks, here = {**(params or {}), **flat_state(core)}, marks_of(core), place_of(core)
    saved = {**{path: torch.zeros_like(live[path]) for path in lately_added(core) & live.keys()}, **saved}
    mine = {path: x for path, x in saved.items() if marks.get(path) != OWNED or path in live}
    mine |= {path: live[path] for path in mine if marks.get(path) == PLAN}  # owners are those of these ranks
    for path in (path for path in live if marks.get(path) == OWNED and path not in mine):
        cure = "save with fn.adapters.checkpoint, whose save and gather have the tensors of all ranks"
        raise ValueError(expected("state_dict", f"{path!r}, which this rank owns", "none", cure))
    who = f"state_dict: is of rank {by[0]} of {by[1]}, but this is rank {here[0]} of {here[1]}"
    lost = {path: torch.zeros_like(live[path]) for path, mark in marks.items() if mark == ERROR and by != here}
    mine |= lost
    of_other = by != here and OWN in marks.values()
    if by != here:
        check_foreign(core, who)
    check_fits(live, mine)
    check_shards(core, live, mine)
    # Before the first write, too: it tries these numbers on the transforms, which may refuse them.
    entries = [entries_of(core, g, mine) for g in range(len(core.param_groups))]
    what = ["its own errors, what compression had not delivered yet, are lost and start from zero"] if lost else []
    what += [f"what is each rank's own within a round, its moments say, is that of rank {by[0]}"] if of_other else []
    if what:
        warnings.warn(f"{who}: {'; '.join(what)}; to keep them {KEEP_ALL}", stacklevel=4)
    of_states = tree.by_path(core.states, "state.").items()
    buffers = {**(params or {}), **{path: x for path, x in of_states if path in mine}}
    # The last thing that may raise; behind it nothing is refused any more, only written.
    write_all = copy_plan([*buffers.values()], [mine[path] for path in buffers])
    with core.writing(), torch.no_grad():
        write_all()
        for (group, _), new in zip(_of_groups(core), entries, strict=True):
            if "lr" in new and isinstance(group["lr"], Tensor):
                # A tensor in the group stays the same object: schedulers and compiled steps may hold it.
                new["lr"] = group["lr"].fill_(new["lr"])
            group.update(new)
        core.steps = int(mine["steps"])
        if isinstance(core.schedule, Remembering):
            core.schedule.recall({name: mine[f"schedule.{name}"].tolist() for name in core.schedule.memory()})
    core.refused = ""
    core.staged.clear()
    core.updates.clear()
    for unit in core.units:  # the params of the same checkpoint are loaded before or behind this
        unit.versions = []


def marks_of(core: Core) -> dict[str, str]:
    """Return the kind of each leaf of the states, as `fn.roles.kinds` says, by path."""
    return tree.by_path(roles.kinds(core.states), "state.")


def place_of(core: Core, axes: Sequence[str] | None = None) -> tuple[int, int]:
    """Return this rank's number among those of some axes, and how many these are.

    Args: axes: None: those of the optimizer. Ranks of an axis that tensors are divided over count where they have
        residual errors of their own.
    """
    binding = core.binding
    if axes is None:
        shards = list[str]()
        if any(tree.leaves(x) for x in roles.find([unit.state for unit in core.units], "errors")):
            divisions = [division_of(group["params"]) for group in core.param_groups]
            for division in filter(None, divisions):  # also where the transform was not told, as `diloco` is not
                binding = division.bound(binding)
                shards += division.groups
        axes = [*dict.fromkeys([*core.axes, *shards])]
    rank, size = 0, 1
    for axis in axes:
        bound = binding.axes[axis]
        # Row-major over the axes: the first one changes slowest.
        rank, size = rank * bound.size + int(bound.rank), size * bound.size
    return rank, size


def owned_elsewhere(core: Core) -> set[str]:
    """Return the paths of tensors that other ranks own: empty ones, and the age beside an error in empty codes.

    Also what a tensor sat out that is empty here.
    """
    errors = {id(x) for x in roles.find(core.states, "errors")}  # of these a rank has a tuple with one for each tensor
    nodes = [node for node in tree.named_tuples(core.states) if roles.roles_of(node).place and not roles.is_shard(node)]
    owned = [getattr(node, name) for node in nodes for name in roles.rank_local(node)]
    entries = [tree.leaves(entry) for x in owned for entry in (x if id(x) in errors else tree.leaves(x))]
    without = {id(x) for entry in entries if not all(x.numel() for x in entry) for x in entry}
    pairs = [pair for _, mus, counts in counted(owned) for pair in zip(mus, counts, strict=True)]
    without |= {id(count) for mu, count in pairs if id(mu) in without}
    return {path for path, x in tree.by_path(core.states, "state.").items() if id(x) in without}


def divided(core: Core) -> dict[str, DTensor]:
    """Return {path: the DTensor that it is divided like} of those leaves of the state, such as momenta, that are."""
    found: dict[str, DTensor] = {}
    marks = marks_of(core)
    for u, unit in enumerate(core.units):
        params = unit.members
        if not has_dtensors(params):
            continue
        paths = tree.by_path(unit.state, f"state.{u}.")
        for path, place in zip(paths, places_of(core, unit), strict=True):
            p = None if place is None else params[place]
            if is_dtensor(p) and p.ndim and marks[path] in (SAME, OWN):
                found[path] = p
    return found


def lately_added(core: Core) -> set[str]:
    """Return the paths that a state of this format may lack, for it was saved before they were: no tensor rested."""
    return _with_role(core, "rested")


def check_format(saved: Mapping[str, Any], argument: str = "state_dict") -> None:
    """Refuse a state in another format than this version's with a ValueError that says so."""
    if {"state", "param_groups"} <= saved.keys():
        cure = (
            "load what fn.adapters.checkpoint saved, or start anew, with a warm-up in which the moments build up "
            "again, or take them over by from_adamw"
        )
        wanted, got = "what fn.Optimizer.state_dict returned", "that of an optimizer of torch"
        raise ValueError(expected(argument, wanted, got, cure))
    found = saved.get(FORMAT)
    if (found.tolist() if isinstance(found, Tensor) else found) != VERSION:
        got = "none, as fn 0.3 and before saved it" if found is None else f"{found}"
        cure = "go on with the version that saved it, or start anew from the model's parameters"
        raise ValueError(expected(argument, f"the format {VERSION}", got, cure))


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


def check_foreign(core: Core, who: str) -> None:
    """Refuse what another rank saved where it cannot go on without errors, or is a shard, with a ValueError."""
    if SHARD in marks_of(core).values():
        raise ValueError(f"{who}, and it holds shards of that rank only; {KEEP_ALL}")
    # Errors of servers of several axes are tuples with one for each hop.
    every = tree.instances(core.states, ErrorFeedbackState)
    hops = [x for errors in every for x in errors.server if type(x) is tuple]
    if any(tree.leaves(hop[:-1]) for hop in hops):
        raise ValueError(
            f"{who}, and the ranks of different nodes stay together only while their errors of the hop within a node, "
            f"which has codes on the way back, are equal; {KEEP_ALL}, or make the optimizer without them, "
            f"feedback=(fn.off(), fn.classic())"
        )


def check_fits(live: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Compare a flat state with one to be loaded.

    Raises: ValueError that names the first path that is missing, unexpected, or of another shape or dtype, or names of
        parameters in another order.
    """
    check_paths(live.keys(), saved.keys(), "state_dict")
    for path, x in saved.items():
        check_tensor(path, x)
    for path, mine in live.items():
        x = saved.get(path, mine)
        if path.startswith("groups."):
            if path.endswith(".names"):
                check_names(path, mine, x)
            continue
        fits = x.ndim == mine.ndim if path.startswith("schedule.") else x.shape == mine.shape
        if not fits or x.dtype != mine.dtype:
            cure = "; errors belong to the number of ranks, the codec and the feedback that they were made for"
            hint = SPLIT if path.startswith("params.") else cure
            theirs, ours = f"{x.dtype} {tuple(x.shape)}", f"{mine.dtype} {tuple(mine.shape)}"
            raise ValueError(f"state_dict: {path!r} is {theirs}, but this has {ours}{hint}")


def check_paths(live: Set[str], saved: Set[str], argument: str) -> None:
    """Refuse a state with other paths than this one's, with a ValueError that names the first.

    A group's numbers and names may be missing, but for its learning rate.
    """
    for path in sorted(live ^ saved):
        group, _, number = path.rpartition(".")
        if path.startswith("groups.") and number != "lr" and f"{group}.lr" in live:
            continue
        hint = SPLIT if path.startswith(("groups.", "params.")) else ""
        if path.startswith("schedule."):
            what = "opt.state_dict() has it" if path in live else "leave it out"
            hint = f"; the schedules differ, only one has it; if that is meant, {what}"
        if re.search(r"\.ages\.\d+$", path):
            hint = "; moments are bias-corrected in one of the two only: make the optimizer as it was, or start anew"
        raise ValueError(f"{argument}: {path!r} is {'missing' if path in live else 'unexpected'}{hint}")


def check_names(path: str, live: Tensor, saved: Tensor) -> None:
    """Refuse parameters of a group with other names than were saved, or in another order, with a ValueError.

    What is saved of a parameter lies at its number, so it would go to another one.
    """
    here, there = (bytes(x.tolist()).decode(errors="replace").split("\n") for x in (live, saved))
    for i, (own, other) in enumerate(zip_longest(here, there, fillvalue="nothing")):
        if own != other:
            wanted = f"{other} as parameter {i} of group {path.split('.')[1]}, as it was saved"
            cure = "give the parameters by the names, and in the order, in which they were saved"
            raise ValueError(expected("state_dict", wanted, own, cure))


def check_tensor(path: str, x: Any) -> None:
    """Refuse what cannot be copied into a state, and numbers of a group that are no numbers."""
    if not isinstance(x, Tensor):
        raise ValueError(f"state_dict: {path!r} is {type(x).__name__}, not a tensor")
    if x.layout != torch.strided or x.is_nested or x.is_meta:
        kind = "nested" if x.is_nested else "on the meta device" if x.is_meta else f"of layout {x.layout}"
        raise ValueError(f"state_dict: expected {path!r} to be a dense tensor with numbers, but got one that is {kind}")
    if path.startswith("groups.") and not path.endswith(".names") and (x.ndim or x.is_complex() or x.isnan()):
        form = f"{x.dtype} {tuple(x.shape)}" if x.ndim or x.is_complex() else "nan"
        raise ValueError(f"state_dict: expected {path!r} to be a real number, a 0-d tensor, but got {form}")


def check_shards(core: Core, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse the shard of another rank with a ValueError."""
    for path in _with_role(core, "place") - _marked(core, PLAN):
        (mine, count), (theirs, of) = live[path].tolist(), saved[path].tolist()
        if (theirs, of) != (mine, count):
            said = f"says shard {theirs} of {of}, but this rank has shard {mine} of {count}"
            raise ValueError(f"state_dict: {path!r} {said}; shards belong to the ranks and the order of axes they had")


def numbers_of(group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the numbers of a group that a restart takes back, in float64, `betas` as b1 and b2; no flags."""
    betas = {f"b{i}": x for i, x in enumerate(group.get("betas") or (), 1)}
    found = {}
    for name, x in {**group, **betas}.items():
        is_real = not x.ndim and not x.is_complex() if isinstance(x, Tensor) else isinstance(x, numbers.Real)
        if is_real and not isinstance(x, bool) and getattr(x, "dtype", None) != torch.bool:
            found[name] = _float64(float(x))
    return found


def entries_of(core: Core, g: int, saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries that a flat state changes in a param group; whole numbers stay whole.

    Raises: ValueError that names the group if its transform cannot be made of them.
    """
    group, unit = _of_groups(core)[g]
    now, prefix = numbers_of(group), f"groups.{g}."
    theirs = {k.removeprefix(prefix): float(x) for k, x in saved.items() if k.startswith(prefix) and x.ndim == 0}
    new: dict[str, Any] = {
        name: int(x) if isinstance(group.get(name), int) and x.is_integer() else x
        for name, x in theirs.items()
        if name not in now or now[name] != x
    }
    if betas := group.get("betas"):
        new["betas"] = tuple(new.pop(f"b{i}", x) for i, x in enumerate(betas, 1))
    try:
        groups.checked_rate(theirs["lr"])
        core.check_group(unit, {**group, **new})
    except Exception as error:
        text = f"state_dict: expected numbers of param group {g} that its transform takes, but got {error}"
        raise ValueError(text) from error
    return new


def _int64(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def _float64(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _marked(core: Core, kind: str) -> set[str]:
    return {path for path, mark in marks_of(core).items() if mark == kind}


def _with_role(core: Core, role: str) -> set[str]:
    chosen = {id(leaf) for leaf in tree.leaves(roles.find(core.states, role))}
    return {path for path, leaf in tree.by_path(core.states, "state.").items() if id(leaf) in chosen}


def _of_groups(core: Core) -> list[tuple[dict[str, Any], Unit]]:
    return [(group, unit) for unit in core.units for group in unit.groups]
