"""Checkpoints of a training on many ranks: exact on the same number of ranks, and right on another one.

    from fn.adapters import checkpoint
    checkpoint.save("run/1", opt, {"model": model.state_dict()})        # on every rank, at the same step
    extra = checkpoint.load("run/1", opt, {"model": model.state_dict()})

Saved are the optimizer's state, its parameters, and `extra`, rank by rank where they differ. On the same world the
training continues bit for bit, also between 0/1 Adam's synchronisations. On another one the undelivered mean is kept,
(1 / W) sum of the worker errors + the server errors; where errors have 8 bits, to one step of these, a 128th of
a block's largest.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from fn import tree
from fn.adapters.checkpoint import rows
from fn.adapters.checkpoint import storage as files
from fn.adapters.checkpoint.compare import EXTRA, HINTS, compare
from fn.adapters.checkpoint.rows import EACH, everything, params_of, world
from fn.adapters.optim.core import TORN, Core, device_of, follow_members
from fn.adapters.optim.hooks import agree
from fn.adapters.optim.state_dict import (
    OF_RANK,
    check_paths,
    lately_added,
    marks_of,
    of_rank,
    owned_elsewhere,
    place_of,
    restore,
)
from fn.arguments import check_whole, checked
from fn.collectives.agreement import calling
from fn.collectives.transports.failure_detection import raising_peer_lost, remember
from fn.collectives.transports.tcp import tell_all, timeout_of
from fn.errors import expected
from fn.roles import OWNED

__all__ = ["gather", "load", "save", "save_async"]

Tree = Any
Group = dist.ProcessGroup | None

logger = logging.getLogger("fn")
_pending: set[Future[Path]] = set()
_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fn-checkpoint")


@checked("folder", "group", "keep")
def save(folder: str | Path, optimizer: Core, extra: Tree = None, *, keep: int = 2, group: Group = None) -> Path:
    """Save a checkpoint; every rank must call it at the same step, with a folder that all of them see.

    A process that is killed meanwhile leaves the checkpoint before this one, or this one, complete.

        >>> import fn, tempfile
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.TemporaryDirectory()
        >>> opt = fn.Optimizer(model.parameters(), fn.adamw, lr=0.1)
        >>> save(folder.name, opt, {"model": model.state_dict()}).name
        'step-000000000000-0'
        >>> list(load(folder.name, opt, {"model": model.state_dict()})["model"])
        ['weight', 'bias']
        >>> folder.cleanup()

    Args:
        folder: where checkpoints of this training are kept. Give each job a folder of its own.
        optimizer: an `fn.Optimizer`, between two steps.
        extra: a tree of tensors, such as a model's state dict. Leaves whose numbers differ between ranks are saved for
            each of them; shapes and dtypes must be the same.
        keep: how many checkpoints stay, of those that `save` wrote: the ones that were saved last.
        group: over all ranks; None is the default group.
    Returns: the folder of this checkpoint.
    Raises: ValueError if the optimizer's axes are not all ranks, or two leaves of `extra` have one path; TypeError if
        it holds anything but tensors; RuntimeError if a step is half written; `RanksDisagree` if steps, parameters or
        state differ that are saved once for all, or the leaves of `extra` in shape, dtype or name; `PeerLost` if a rank
        ends; OSError, on all ranks, if one of them cannot write, or if they do not see one folder.
    """
    _check_save(optimizer, extra, keep)
    with _calling("checkpoint.save", optimizer):
        wait(list(_pending))  # what `save_async` still writes comes first
        return _write(Path(folder), rows.to_save(optimizer, extra), keep, group, optimizer.wires)


@checked("folder", "group", "keep")
def save_async(
    folder: str | Path, optimizer: Core, extra: Tree = None, *, keep: int = 2, group: Group = None
) -> Future[Path]:
    """Save as `save` does, but only copy now and write on another thread while the training goes on.

    Args: group: a gloo group of its own over all ranks, `dist.new_group(backend="gloo", timeout=...)`, so that its
        messages do not mix with those of the training; None only in a process that is alone. A process does not end
        while a save waits for a rank, so a timeout longer than the default group's is warned of.
    Returns: a future of what `save` returns, as an absolute path; it raises what `save` raises.
    Raises: ValueError if the group is missing.
    """
    if world()[1] > 1 and group is None:
        cure = 'pass dist.new_group(backend="gloo", timeout=...)'
        raise ValueError(expected("group", "a process group of its own", "None", cure))
    _check_save(optimizer, extra, keep)
    all_ranks = dist.group.WORLD
    if group is not None and all_ranks is not None and timeout_of(group) > timeout_of(all_ranks):
        text = f"group: waits {timeout_of(group)} for a rank, the default group {timeout_of(all_ranks)}"
        warnings.warn(f"{text}; a process does not end while a save waits: new_group(..., timeout=...)", stacklevel=2)
    wires = {} if group is None else {"checkpoint": remember(group)}
    folder = Path(folder).absolute()  # the process may be in another folder when it is written
    future = _writer.submit(_write, folder, rows.to_save(optimizer, extra), keep, group, wires)
    _pending.add(future)
    future.add_done_callback(_pending.discard)
    return future


@checked("folder", "name")
def load(folder: str | Path, optimizer: Core, extra: Tree = None, *, name: str | None = None) -> Tree:
    """Load the newest checkpoint of a folder; every rank must call it.

    On another number of ranks, what differed between the ranks that saved becomes their mean, in the parameters and in
    floating-point leaves of `extra` alike; of other leaves all are given rank 0's, with a warning. So it does no harm
    to load a model's state dict out of `extra` afterwards. Load what you trust: digests tell damage, not a forger.

    Args:
        folder: as for `save`. optimizer: built as the one that was saved, over the same parameters.
        extra: a tree like the one that was saved; only its structure is used.
        name: of a checkpoint in the folder, such as "step-000000001200-0". None: the newest.
    Returns: the tree that was saved as `extra`.
    Raises: FileNotFoundError if there is no checkpoint; `CheckpointDamaged` on all ranks if a file of it is not what
        was saved; ValueError if it is of another optimizer, or in the format of an older version. Nothing is loaded
        then.
    """
    _check_arguments(optimizer, extra, is_load=True)
    with _calling("checkpoint.load", optimizer), raising_peer_lost(optimizer.wires, where="checkpoint.load"):
        checkpoint, reader, old = _verified(Path(folder), name)
        rows.own_keys(optimizer)  # raises where there can be no rows
        paths = {key.removeprefix(EACH): key for key in reader.forms}
        unread = owned_elsewhere(optimizer) | {path for path in paths if extra is None and path.startswith(EXTRA)}
        wanted = everything(optimizer, extra).keys() - (lately_added(optimizer) - paths.keys())
        check_paths(wanted, paths.keys() - unread, "checkpoint")
        filled = rows.to_fill({key: reader.forms[key] for path, key in paths.items() if path not in unread}, old)
        with _files("read", checkpoint):
            state_dict_loader.load(filled, storage_reader=reader)
        found = rows.read(filled, old)
        if old == world()[1]:
            state = rows.of_this_rank(optimizer, found)
        else:
            logger.info("checkpoint of %d ranks is loaded on %d; errors keep their mean", old, world()[1])
            state = rows.convert(optimizer, found, old)
    # `restore` writes params and state together: an exception between the two would leave a model of neither step.
    of_optimizer = {key: x for key, x in state.items() if not key.startswith(EXTRA)}
    restore(optimizer, of_optimizer, place_of(optimizer), params_of(optimizer))
    if extra is None:
        return None
    return tree.unflatten(tree.flatten(extra)[1], [state[EXTRA + path] for path in tree.paths(extra)])


@checked("group")
def gather(optimizer: Core, *, group: Group = None) -> dict[str, Tensor] | None:
    """Return a state dict of all ranks on rank 0, None elsewhere; every rank must call it at the same step.

        whole = checkpoint.gather(opt)
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": whole}, "run.pt")

        saved = torch.load("run.pt", map_location="cpu", weights_only=True)     # on every rank
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])

    Each rank finds its own errors and shards in it, so on as many ranks the training continues bit for bit. On another
    number of ranks it is like the state dict of rank 0: errors start from zero, with a warning, and shards are refused;
    `save` moves both. The memory is that of all ranks' errors and shards, on rank 0's CPU.

    Between the synchronisations of 0/1 Adam and DiLoCo each rank has parameters of its own, and rank 0's model has only
    one rank's. They are refused: gather after a step that synchronises all of them, or call `save`. SPARTA and
    NoLoCo have no such step.

    Args: optimizer: between two steps. group: over all ranks; None is the default group.
    Raises: ValueError if the optimizer's axes are not all ranks; `RanksDisagree` if ranks differ in their parameters,
        or in what is called the same on all; `PeerLost` if a rank ends.
    """
    _check_arguments(optimizer, None)
    hints = HINTS
    if any(key.startswith("params.") for key in rows.own_keys(optimizer)):
        cure = "gather behind a step that makes them the same, if the method has one, or call checkpoint.save"
        hints = {**HINTS, "params.": f"{cure}, which keeps each rank's"}
    with _calling("checkpoint.gather", optimizer):
        return _gathered(optimizer, hints, group)


def _gathered(optimizer: Core, hints: Mapping[str, str], group: Group) -> dict[str, Tensor] | None:
    rank, size = world()
    flat = of_rank(optimizer)
    marks = marks_of(optimizer)
    own = [key for key in flat if OF_RANK.fullmatch(key) or marks.get(key) == OWNED]
    same = {key: x for key, x in flat.items() if key not in {*own}}
    whole = {key: _on_cpu(x) for key, x in (same if size > 1 else flat).items()} if rank == 0 else {}
    everyone = dist.group.WORLD if group is None else group
    if size == 1 or everyone is None:
        return whole
    with raising_peer_lost({"world": remember(everyone)}, where="checkpoint.gather"):
        compare({**same, **params_of(optimizer)}, partial(_of_all, group=everyone, call="checkpoint.gather"), hints)
        # As often on all ranks: one that has fewer keys of its own joins in with nothing, or the others would wait.
        # One by one: rank 0 holds each twice while it arrives.
        for i in range(max(_of_all(len(own), everyone, "checkpoint.gather"))):
            of_ranks: list[Any] | None = [None] * size if rank == 0 else None
            dist.gather_object({key: _on_cpu(flat[key]) for key in own[i : i + 1]}, of_ranks, dst=0, group=everyone)
            for of_one in of_ranks or ():
                whole |= of_one
    return whole if rank == 0 else None


def _on_cpu(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu").copy_(x.detach())


@contextmanager
def _calling(call: str, optimizer: Core) -> Iterator[None]:
    """Tell the other ranks what this one is in, where they may be in a call of the optimizer: over its axes."""
    with optimizer.binding, calling(call, agree.axes_of_calls(optimizer), device_of(optimizer)):
        yield


def _check_arguments(optimizer: object, extra: Tree, *, is_load: bool = False) -> None:
    """Refuse anything but an optimizer of whole parameters between two steps; half a step may be loaded over."""
    if not isinstance(optimizer, Core):
        raise TypeError(expected("optimizer", "an fn.Optimizer, after the folder", type(optimizer).__name__))
    follow_members(optimizer)
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        cure = "save opt.state_dict() with torch.distributed.checkpoint, which loads it on any number of ranks"
        wanted, got = "an optimizer of whole parameters", "one of DTensors, which lie in shards"
        raise ValueError(expected("optimizer", wanted, got, cure))
    if not (is_load and optimizer.refused == TORN):
        optimizer.check_free("checkpoint")
    if extra is not None:
        agree.check_paths(extra, "extra", "give it dicts")


def _check_save(optimizer: object, extra: Tree, keep: int) -> None:
    _check_arguments(optimizer, extra)
    for path, leaf in {} if extra is None else tree.by_path(extra).items():
        if not isinstance(leaf, Tensor):
            wanted = f"leaf {path or 'the root'!r} to be a tensor, as in a model's state_dict()"
            cure = "save a scheduler's numbers with torch.save"
            raise TypeError(expected("extra", wanted, type(leaf).__name__, cure))
    check_whole("keep", keep, 1)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world()[0] == 0:
        text = (
            "torchrun keeps its key-value store over a restart, in which ranks may find the addresses of the last "
            "start and wait for them; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
        warnings.warn(text, stacklevel=3)


def _write(folder: Path, snapshot: rows.Snapshot, keep: int, group: Group, wires: Mapping[str, str]) -> Path:
    rank, size = world()
    with raising_peer_lost(wires, where="checkpoint.save"):
        of_all = {key: x for key, x in snapshot.tensors.items() if key not in snapshot.own | snapshot.owned}
        state = snapshot.rows(compare(of_all, partial(_of_all, group=group)))
        # Each of these waits for all ranks. No file is written before all see the folder, and the checkpoint does not
        # become the newest before the files of all ranks are there with their digests.
        names: files.Names = _all(lambda: None if rank else files.begin(folder, snapshot.steps, size), group)[0]
        _all(lambda: files.check_seen(folder, names, rank), group)
        writing = folder / names.writing
        with _files("write", writing):
            state_dict_saver.save(state, storage_writer=FileSystemWriter(writing), process_group=group)
        _all(lambda: files.seal(folder, names, rank, size), group)
        _all(lambda: None if rank else files.finish(folder, names, keep), group)
    logger.info("checkpoint of step %d is in %s", snapshot.steps, folder / names.done)
    return folder / names.done


def _verified(folder: Path, name: str | None) -> tuple[Path, files.Reader, int]:
    """Return a checkpoint, what reads its tensors, and its world size.

    Each rank looks at a part of the files, and all hear of damage.
    """
    rank, size = world()

    def look() -> tuple[Path, int, set[str]]:
        if name is not None and not files.is_name(name):
            wanted = f"the name of a checkpoint in {folder}, without a path"
            raise ValueError(expected("name", wanted, f"{name!r}"))
        checkpoint = files.newest(folder) if name is None else folder / name
        return checkpoint, *files.verify(checkpoint, rank, size)

    looked = _all(look, None, "checkpoint.load")
    checkpoint, old, _ = looked[rank]
    names = {name for _, _, verified in looked for name in verified}
    readers: list[files.Reader] = []
    _all(lambda: readers.append(files.Reader(checkpoint, names)), None, "checkpoint.load")
    return checkpoint, readers[0], old


@contextmanager
def _files(act: str, folder: Path) -> Iterator[None]:
    """Raise an OSError where torch has an exception that is no `Exception`, and whose message is a traceback.

    Raises: CheckpointDamaged for what could be read, but is not what the metadata say; the KeyboardInterrupt of this
        rank, which torch catches, too.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a process is alone is no surprise here
            yield
    except CheckpointException as error:
        here, _ = error.failures.get(world()[0], (None, None))
        if here is not None and not isinstance(here, Exception):
            raise here from error
        rank, (problem, _) = min(error.failures.items())
        if act == "read" and isinstance(problem, Exception) and not isinstance(problem, OSError):
            said = f"does not describe what the files hold: {type(problem).__name__}: {problem}"
            raise files.damaged(folder / files.METADATA, said) from error
        text = f"checkpoint: rank {rank} could not {act} {folder}: {type(problem).__name__}: {problem}"
        raise OSError(text) from error


def _all(act: Callable[[], Any], group: Group = None, call: str = "checkpoint.save") -> list[Any]:
    """Do something on every rank and return what it returned on each; raise on all ranks what one of them raised.

    A disk that is full on one rank must not leave the others waiting. Args: call: what this rank is in.
    """
    mine: tuple[Any, Exception | None] = None, None
    try:
        mine = act(), None
    except Exception as error:
        mine = None, error
    of_ranks = tell_all(mine, group, call) if world()[1] > 1 else [mine]
    for _, problem in of_ranks:
        if problem is not None:
            raise problem
    return [value for value, _ in of_ranks]


def _of_all(value: Any, group: Group, call: str = "checkpoint.save") -> list[Any]:
    return _all(lambda: value, group, call)
