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

from fn import roles, tree
from fn.adapters.checkpoint import replicated, resharding
from fn.adapters.checkpoint import storage as files
from fn.adapters.checkpoint.owner import Claim
from fn.adapters.optim.consistency import by_path, check_paths, device_among, owned_elsewhere, owned_paths
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.signals import begin_writing, defer_signals, writing
from fn.adapters.optim.state_dict import (
    OF_RANK,
    ORDER,
    SAVED_BY,
    SPLIT,
    about_servers,
    check_late_means,
    flat_state,
    is_optional,
    place_of,
    restore_flat,
)
from fn.collectives.agreement import differences
from fn.collectives.transports.failure_detection import raising_peer_lost, remember
from fn.collectives.transports.tcp import timeout_of
from fn.errors import expected
from fn.transforms.average_params import AverageParamsState
from fn.transforms.outer import OwnAnchorState
from fn.transforms.resharding import Rows

__all__ = ["gather", "load", "save", "save_async"]

Tree = Any
Group = dist.ProcessGroup | None

logger = logging.getLogger("fn")
_pending: set[Future[Path]] = set()
_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fn-checkpoint")


def save(folder: str | Path, optimizer: Optimizer, extra: Tree = None, *, keep: int = 2, group: Group = None) -> Path:
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
        folder: where checkpoints of this training are kept.
        optimizer: between two steps.
        extra: a tree of tensors, such as a model's state dict. Leaves whose numbers differ between ranks are saved for
            each of them; shapes and dtypes must be the same.
        keep: how many checkpoints stay, of those that `save` wrote: the ones that were saved last.
        group: over all ranks; None is the default group.
    Returns: the folder of this checkpoint.
    Raises: ValueError if the optimizer's axes are not all ranks, or two leaves of `extra` have one path; TypeError if
        it holds anything but tensors; RuntimeError inside of a step; `RanksDisagree` if steps, parameters or state
        differ that are saved once for all, or the leaves of `extra` in shape, dtype or name; `PeerLost` if a rank ends;
        OSError, on all ranks, if one of them cannot write, if they do not see one folder, or if another job is saving
        into it.
    """
    _check_save(optimizer, extra, keep)
    wait(list(_pending))  # what `save_async` still writes comes first
    training = optimizer.training
    return _write(Path(folder), resharding.to_save(training, extra), keep, group, training.transports)


def save_async(
    folder: str | Path, optimizer: Optimizer, extra: Tree = None, *, keep: int = 2, group: Group = None
) -> Future[Path]:
    """Save as `save` does, but only copy now and write on another thread while the training goes on.

    Args: group: a gloo group of its own over all ranks, `dist.new_group(backend="gloo", timeout=...)`, so that its
        messages do not mix with those of the training; None only in a process that is alone. A process does not end
        while a save waits for a rank, so a timeout longer than the default group's is warned of.
    Returns: a future of what `save` returns, as an absolute path; it raises what `save` raises.
    Raises: ValueError if the group is missing.
    """
    if resharding.world()[1] > 1 and group is None:
        cure = 'pass dist.new_group(backend="gloo", timeout=...)'
        raise ValueError(expected("group", "a process group of its own", "None", cure))
    _check_save(optimizer, extra, keep)
    all_ranks = dist.group.WORLD
    if group is not None and all_ranks is not None and timeout_of(group) > timeout_of(all_ranks):
        text = f"group: waits {timeout_of(group)} for a rank, the default group {timeout_of(all_ranks)}"
        warnings.warn(f"{text}; a process does not end while a save waits: new_group(..., timeout=...)", stacklevel=2)
    wires = {} if group is None else {"checkpoint": remember(group)}
    folder = Path(folder).absolute()  # the process may be in another folder when it is written
    future = _writer.submit(_write, folder, resharding.to_save(optimizer.training, extra), keep, group, wires)
    _pending.add(future)
    future.add_done_callback(_pending.discard)
    return future


def load(folder: str | Path, optimizer: Optimizer, extra: Tree = None, *, name: str | None = None) -> Tree:
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
        was saved; ValueError if it is of another optimizer. Nothing is loaded then.
    """
    _check_arguments(optimizer, extra)
    training, (rank, size) = optimizer.training, resharding.world()
    with raising_peer_lost(training.transports, where="checkpoint.load"):
        checkpoint, reader, old = _verified(Path(folder), name, rank, size)
    of_extra = (replicated.SAME, replicated.EACH)
    forms = {k: form for k, form in reader.forms.items() if extra is not None or not k.startswith(of_extra)}
    own_keys, elsewhere = resharding.own_rows(training), owned_elsewhere(training.states)
    forms = {key: form for key, form in forms.items() if key not in elsewhere}
    live = by_path(training.states)  # what is one rank's own was saved as rows
    own_there = {key for key, (shape, _) in forms.items() if key in live and len(shape) > live[key].ndim}
    check_late_means(training, forms, own_there, "checkpoint")
    added = roles.added(training.states, forms, "state.")
    _check_keys(optimizer, extra, {**replicated.join_extra(forms), **added})
    if old == size or place_of(training)[1] == size:  # else no axis adds up what all ranks have read
        rows = {k: dtype for k, (_, dtype) in forms.items() if k.startswith(replicated.EACH)}
        own_keys |= {k for k, dtype in rows.items() if old == size or dtype.is_floating_point}
    filled = resharding.to_fill(own_keys, forms)
    wires = training.transports
    with warnings.catch_warnings(), raising_peer_lost(wires, where="checkpoint.load"), _files("read", checkpoint):
        warnings.simplefilter("ignore")  # that a process is alone is no surprise here
        state_dict_loader.load(filled, storage_reader=reader)
    read: dict[str, Any] = {k: resharding.local_rows(v) if k in own_keys else v for k, v in filled.items()} | added
    of_state = any(k.startswith("state.") for k in own_keys)
    in_memory_order = of_state and any(k.startswith(ORDER) for k in read)  # as version 0.2.0 saved channels_last
    state = {k: v.rows[0] if isinstance(v, Rows) else v for k, v in read.items()} if old == size else {}
    if old != size or in_memory_order:
        kind = " with elements in the order of memory" if in_memory_order else ""
        logger.info("checkpoint of %d ranks%s is loaded on %d; errors keep their mean", old, kind, size)
        kept_extra = {k: v for k, v in state.items() if k.startswith(of_extra)}
        moving = {k: v for k, v in read.items() if k not in kept_extra}
        moving = moving if old == size else replicated.mean_extra(moving, old, size)
        state = {**resharding.moved(training, moving), **kept_extra}
    state = replicated.join_extra(state)
    _restore(optimizer, state)
    if extra is None:
        return None
    return tree.unflatten(tree.flatten(extra)[1], [state[f"extra.{path}"] for path in tree.paths(extra)])


def gather(optimizer: Optimizer, *, group: dist.ProcessGroup | None = None) -> dict[str, Tensor] | None:
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
    one rank's. They are refused: gather after a step that synchronises all of them, or call `save`. SPARTA, NoLoCo and
    eager rounds have no such step.

    Args: optimizer: between two steps. group: over all ranks; None is the default group.
    Raises: ValueError if the optimizer's axes are not all ranks; RuntimeError inside of a step; `RanksDisagree` if
        ranks differ in their parameters, or in what is called the same on all; `PeerLost` if a rank ends.
    """
    resharding.check_optimizer(optimizer)
    local_params = any(key.startswith("params.") for key in resharding.own_rows(optimizer.training))
    flat: dict[str, Tensor] = optimizer.state_dict()
    own = {key: x for key, x in flat.items() if OF_RANK.fullmatch(key)}
    owned = {key: flat[key] for key in sorted(owned_paths(optimizer.training.states) & flat.keys())}
    same = {key: x for key, x in flat.items() if key not in own and key not in owned}
    rank, size = resharding.world()
    whole = {key: _on_cpu(x) for key, x in (same if size > 1 else flat).items()} if rank == 0 else {}
    if size == 1:
        return whole
    everyone = dist.group.WORLD if group is None else group
    assert everyone is not None
    with raising_peer_lost({"world": remember(everyone)}, where="checkpoint.gather"):
        params = {k: x for k, x in resharding.everything(optimizer.training).items() if k.startswith("params.")}
        hints = {**replicated.HINTS, "params.": _advice(optimizer)} if local_params else replicated.HINTS
        gather_values = partial(_all_values, size=size, group=everyone)
        device = device_among(optimizer.param_groups)
        replicated.check_replicated({**same, **params}, device, gather_values, hints=hints)
        for key, x in own.items():  # one after the other: rank 0 holds each once more while it arrives
            rows: list[Any] | None = [None] * size if rank == 0 else None
            dist.gather_object((key, _on_cpu(x)), rows, dst=0, group=everyone)
            whole.update(rows or [])
        of_ranks: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object({key: _on_cpu(x) for key, x in owned.items()}, of_ranks, dst=0, group=everyone)
        for tensors in of_ranks or []:
            whole.update(tensors)
    return whole if rank == 0 else None


def _advice(optimizer: Optimizer) -> str:
    """Return what to do about parameters that a method leaves to each rank."""
    states, save = optimizer.training.states, "call checkpoint.save, which keeps each rank's"
    if tree.instances(states, OwnAnchorState):
        return f"no step of this method makes them the same; {save}"
    if tree.instances(states, AverageParamsState):
        return f"gather behind an average of all of them, as fn.des_loc has; fn.sparta has none, so {save}"
    return f"gather after a step that synchronises all of them, or {save}"


def _on_cpu(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu").copy_(x.detach())


def _check_arguments(optimizer: object, extra: Tree) -> None:
    resharding.check_optimizer(optimizer)
    if extra is not None:
        check_paths(extra, "extra", "give it dicts")


def _check_save(optimizer: object, extra: Tree, keep: int) -> None:
    _check_arguments(optimizer, extra)
    for path, leaf in {} if extra is None else by_path(extra, "").items():
        if not isinstance(leaf, Tensor):
            wanted = f"leaf {path or 'the root'!r} to be a tensor, as in a model's state_dict()"
            cure = "save a scheduler's numbers with torch.save"
            raise TypeError(expected("extra", wanted, type(leaf).__name__, cure))
    if keep < 1:
        raise ValueError(expected("keep", "a whole number of at least 1", f"{keep}"))
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and resharding.world()[0] == 0:
        text = (
            "torchrun keeps its key-value store over a restart, in which ranks may find the addresses of the last "
            "start and wait for them; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
        warnings.warn(text, stacklevel=3)


def _write(folder: Path, snapshot: resharding.Snapshot, keep: int, group: Group, wires: Mapping[str, str]) -> Path:
    rank, size = resharding.world()
    do = partial(_all, size=size, group=group)
    with raising_peer_lost(wires, where="checkpoint.save"):
        gather_values = partial(_all_values, size=size, group=group)
        for difference in differences({"steps": snapshot.steps}, gather_values):
            here, first = difference.values[difference.rank], difference.values[0]
            raise difference.error(
                f"the optimizer has taken {here} steps on rank {difference.rank} and {first} on rank 0; call "
                f"checkpoint.save on all ranks after the same step; nothing was saved"
            )
        replicated_ones = {key: x for key, x in snapshot.tensors.items() if key not in snapshot.owned}
        replicated.check_replicated(replicated_ones, snapshot.device, gather_values)
        state = replicated.split_extra(snapshot.tensors, snapshot.as_row, do)
    with warnings.catch_warnings(), raising_peer_lost(wires, where="checkpoint.save"), Claim(folder) as claim:
        warnings.simplefilter("ignore")

        def begin() -> files.Names | None:
            if rank:
                return None
            claim.take()
            return files.begin(folder, snapshot.steps, size)

        def finish() -> None:
            if rank == 0:
                claim.check()
                files.finish(folder, names, keep)

        # Each of these waits for all ranks. No file is written before all see the folder, and the checkpoint does not
        # become the newest before the files of all ranks are there with their digests.
        names: files.Names = do(begin)[0]
        do(lambda: files.check_seen(folder, names, rank))
        writing = folder / names.writing
        with _files("write", writing):
            state_dict_saver.save(state, storage_writer=FileSystemWriter(writing), process_group=group)
        do(lambda: files.seal(folder, names, rank, size))
        do(finish)
    logger.info("checkpoint of step %d is in %s", snapshot.steps, folder / names.done)
    return folder / names.done


def _verified(folder: Path, name: str | None, rank: int, size: int) -> tuple[Path, files.Reader, int]:
    """Return a checkpoint, what reads its tensors, and its world size.

    Each rank looks at a part of the files, and all hear of damage.
    """

    def look() -> tuple[Path, int, set[str]]:
        if name is not None and not files.is_name(name):
            wanted = f"the name of a checkpoint in {folder}, without a path"
            raise ValueError(expected("name", wanted, f"{name!r}"))
        checkpoint = files.newest(folder) if name is None else folder / name
        return checkpoint, *files.verify(checkpoint, rank, size)

    looked = _all(look, size)
    checkpoint, old, _ = looked[rank]
    names = {name for _, _, verified in looked for name in verified}
    readers: list[files.Reader] = []
    _all(lambda: readers.append(files.Reader(checkpoint, names)), size)
    return checkpoint, readers[0], old


@contextmanager
def _files(act: str, folder: Path) -> Iterator[None]:
    """Raise an OSError where torch has an exception that is no `Exception`, and whose message is a traceback.

    Raises: CheckpointDamaged for what could be read, but is not what the metadata say; the KeyboardInterrupt of this
        rank, which torch catches, too.
    """
    try:
        yield
    except CheckpointException as error:
        here, _ = error.failures.get(resharding.world()[0], (None, None))
        if here is not None and not isinstance(here, Exception):
            raise here from error
        rank, (problem, _) = min(error.failures.items())
        if act == "read" and isinstance(problem, Exception) and not isinstance(problem, OSError):
            said = f"does not describe what the files hold: {type(problem).__name__}: {problem}"
            raise files.damaged(folder / files.METADATA, said) from error
        text = f"checkpoint: rank {rank} could not {act} {folder}: {type(problem).__name__}: {problem}"
        raise OSError(text) from error


def _all(act: Callable[[], Any], size: int, group: Group = None) -> list[Any]:
    """Do something on every rank and return what it returned on each; raise on all ranks what one of them raised.

    A disk that is full on one rank must not leave the others waiting.
    """
    mine: tuple[Any, Exception | None] = None, None
    try:
        mine = act(), None
    except Exception as error:
        mine = None, error
    of_ranks = [mine]
    if size > 1:
        of_ranks = [(None, None)] * size
        dist.all_gather_object(of_ranks, mine, group=group)
    for _, problem in of_ranks:
        if problem is not None:
            raise problem
    return [value for value, _ in of_ranks]


def _all_values(value: Any, size: int, group: Group) -> list[Any]:
    return _all(lambda: value, size, group)


def _check_keys(optimizer: Optimizer, extra: Tree, forms: dict[str, Any]) -> None:
    wanted = set(resharding.everything(optimizer.training, extra))
    optional = {k for k in wanted | set(forms) if is_optional(k) or (extra is None and k.startswith("extra."))}
    for key in sorted((wanted ^ set(forms)) - optional):
        what = "missing" if key in wanted else "of no use to this optimizer"
        split = SPLIT if key.startswith(("groups.", "params.")) else ""
        raise ValueError(f"checkpoint: {key!r} is {what}{about_servers(key, wanted, forms)}{split}")


def _restore(optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    params = {k: v for k, v in state.items() if k.startswith("params.")}
    live = {k: v for k, v in resharding.everything(optimizer.training).items() if k in params}
    for key, p in live.items():
        if p.shape != params[key].shape or p.dtype != params[key].dtype:
            saved, here = (f"{x.dtype} {tuple(x.shape)}" for x in (params[key], p))
            raise ValueError(f"checkpoint: {key!r} is {saved}, but here {here}{SPLIT}")
    kept = {k: v for k, v in state.items() if not k.startswith(("params.", "extra."))}
    with defer_signals(), torch.no_grad():
        begin_writing()  # an interrupted load would leave the state of one checkpoint with the params of another
        restore_flat(optimizer.training, {**kept, SAVED_BY: flat_state(optimizer.training)[SAVED_BY]})
        with writing(optimizer.training):
            for key, p in live.items():
                p.copy_(params[key])
