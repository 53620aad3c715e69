"""A checkpoint out of a log, for a new world: `Follower.checkpoint`.

Parameters and what ranks agree on are a follower's own. What is each rank's, it never heard: moments of tensors that
have owners, of shards and of local steps come from an older checkpoint, or begin as `init` makes them, with ages zero.
Residual errors begin at zero in either case: what an old checkpoint has of them was delivered since.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fn import roles, tree
from fn.adapters.agreed_params import agreed_pairs
from fn.adapters.checkpoint import storage as files
from fn.adapters.checkpoint.compare import EXTRA
from fn.adapters.checkpoint.rows import EACH, params_of
from fn.adapters.optim.core import Core
from fn.adapters.optim.state_dict import flat_state, marks_of
from fn.collectives.following import echoing
from fn.errors import expected
from fn.roles import OF_EACH_RANK, OWN, OWNED

Tensors = dict[str, Tensor]

STATE = "state."
OF_INIT = ("errors", "warmup_errors", "copies", "place")
"""Roles of what is made for the parameters and the ranks that are there now, whatever an older checkpoint has."""


def write(core: Core, folder: Path, load_from: Path | None) -> Path:
    """Write a checkpoint of a follower's optimizer, and return its folder. See `Follower.checkpoint`."""
    if len(core.axes) > 1:
        cure = "go on from the run's own checkpoint"
        raise ValueError(expected("follower", "a run over one axis", f"one over {', '.join(core.axes)}", cure))
    if core.flights:
        cure = "go to a step behind which it has landed"
        raise ValueError(expected("follower", "no mean on its way", f"one, behind step {core.steps - 1}", cure))
    (axis,) = core.axes
    world, old = core.binding.axes[axis].size, Tensors()
    if load_from is not None:
        world, old = _read(load_from)
    marks, of_ranks = marks_of(core), _as_init_makes(core, axis, world)
    made = _paths_of(core, OF_INIT)
    found = {key: x for key, x in flat_state(core).items() if key not in marks}
    found |= {key: x for key, x in old.items() if key.startswith("schedule.")}  # what a schedule remembers
    for key, x in _agreed_params(core).items():
        is_local = OWN in marks.values()
        found[EACH + key if is_local else key] = torch.stack([x] * world) if is_local else x
    live, has_own = tree.by_path(core.states, STATE), False
    for path, mark in marks.items():
        if mark in OF_EACH_RANK:
            fresh, path_there = torch.stack([rank[path] for rank in of_ranks]), EACH + path
        elif mark == OWNED:
            # Whole on one rank, and without elements on the others.
            fresh, path_there = max((rank[path] for rank in of_ranks), key=Tensor.numel), path
        else:
            found[path] = live[path]
            continue
        there = fresh if path in made or load_from is None else old.get(path_there)
        if there is None or there.shape != fresh.shape:
            got = "none" if there is None else f"{[*there.shape]}"
            raise ValueError(expected("load_from", f"{path_there!r} {[*fresh.shape]}, as in this run", got))
        found[path_there] = there
        has_own |= path not in made
    has_errors = bool(_paths_of(core, OF_INIT[:2]))
    _warn(core, has_own, has_errors, int(old["steps"]) if old else None)
    copies: Tensors = {key: torch.empty_like(x, device="cpu").copy_(x.detach()) for key, x in found.items()}
    names = files.begin(folder, core.steps, world)
    writing = folder / names.writing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(copies, storage_writer=FileSystemWriter(writing), no_dist=True)
    for rank in range(world):  # the first has all files, and the others lists without any
        files.seal(folder, names, rank, world)
    files.finish(folder, names, keep=2)
    return folder / names.done


def _read(folder: Path) -> tuple[int, Tensors]:
    """Return how many ranks saved the newest checkpoint of a folder, and its tensors; not those of `extra`."""
    path = files.newest(folder)
    world, verified = files.verify(path, 0, 1)
    reader = files.Reader(path, verified)
    wanted = {key: form for key, form in reader.forms.items() if not key.removeprefix(EACH).startswith(EXTRA)}
    tensors = {key: torch.zeros(shape, dtype=dtype, device="cpu") for key, (shape, dtype) in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process is alone is no surprise here
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    return world, tensors


def _as_init_makes(core: Core, axis: str, world: int) -> list[Tensors]:
    """Return what each of so many ranks begins with, by path, from the parameters that all agree on."""
    agreed = {own.data_ptr(): x for own, x in agreed_pairs(core)}
    ranks = []
    for rank in range(world):
        binding = echoing({axis: world})
        here = binding.axes[axis]._replace(rank=torch.tensor(rank, dtype=torch.int64, device="cpu"))
        with type(binding)({axis: here}), torch.no_grad():
            starts = [tree.map(partial(_or_agreed, agreed), unit.params) for unit in core.units]
            states = tuple(unit.transform.init(x) for unit, x in zip(core.units, starts, strict=True))
        ranks.append({path: x.cpu() for path, x in tree.by_path(states, STATE).items()})
    return ranks


def _or_agreed(agreed: dict[int, Tensor], p: Tensor) -> Tensor:
    return agreed.get(p.data_ptr(), p).detach()


def _agreed_params(core: Core) -> Tensors:
    agreed = {own.data_ptr(): x for own, x in agreed_pairs(core)}
    return {key: _or_agreed(agreed, p) for key, p in params_of(core).items()}


def _paths_of(core: Core, of: tuple[str, ...]) -> set[str]:
    chosen = {id(leaf) for role in of for leaf in tree.leaves(roles.find(core.states, role))}
    return {path for path, leaf in tree.by_path(core.states, STATE).items() if id(leaf) in chosen}


def _warn(core: Core, has_own: bool, has_errors: bool, step: int | None) -> None:
    """Say how old each rank's own state is, if there is some. step: that it is of; None: it is as `init` makes it."""
    age = "begins as init makes it, with ages zero" if step is None else f"is {core.steps - step} steps old"
    said = [f"what is a rank's own, moments say, {age}"] * has_own + ["residual errors begin at zero"] * has_errors
    if said:
        text = f"checkpoint: of step {core.steps} are parameters and what ranks agree on"
        warnings.warn("; ".join([text, *said]), stacklevel=4)
