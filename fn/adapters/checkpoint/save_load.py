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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fn import roles, tree
from fn.adapters.checkpoint import extra as extras
from fn.adapters.checkpoint import resharding as portable
from fn.adapters.checkpoint import storage as files
from fn.adapters.checkpoint.gathering import gather
from fn.adapters.checkpoint.metadata import Reader
from fn.adapters.checkpoint.owner import Claim
from fn.adapters.checkpoint.replicated import check_replicated
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.signals import begin_writing, defer_signals
from fn.adapters.optim.state_dict import (
    ORDER,
    SAVED_BY,
    SPLIT,
    about_servers,
    flat_state,
    is_optional,
    place_of,
    restore_flat,
)
from fn.adapters.optim.state_kinds import by_path, check_paths
from fn.collectives.agreement import differences
from fn.collectives.transports.failure_detection import raising_peer_lost, remember
from fn.collectives.transports.tcp_setup import timeout_of
from fn.errors import expected
from fn.transforms.moving import Rows

__all__ = ["gather", "load", "save", "save_async"]

Tree = Any
Group = dist.ProcessGroup | None

logger = logging.getLogger("fn")
_pending: set[Future[Path]] = set()
_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fn-checkpoint")


def save(folder: str | Path, optimizer: Optimizer, extra: Tree = None, *, keep: int = 2, group: Group = None) -> Path:
    """Save a checkpoint; every rank must call it at the same step, with a folder that all of them see.

    A process that is killed meanwhile leaves the checkpoint before this one, or this one, complete.

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
    return _write(Path(folder), portable.to_save(optimizer.training, extra), keep, group, optimizer.training.transports)


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
    if portable.world()[1] > 1 and group is None:
        cure = 'pass dist.new_group(backend="gloo", timeout=...)'
        raise ValueError(expected("group", "a process group of its own", "None", cure))
    _check_save(optimizer, extra, keep)
    own, all_ranks = group, dist.group.WORLD
    if own is not None and all_ranks is not None and timeout_of(own) > timeout_of(all_ranks):
        text = f"group: waits {timeout_of(own)} for a rank, the default group {timeout_of(all_ranks)}"
        warnings.warn(f"{text}; a process does not end while a save waits: new_group(..., timeout=...)", stacklevel=2)
    wires = {} if group is None else {"checkpoint": remember(group)}
    folder = Path(folder).absolute()  # the process may be in another folder when it is written
    future = _writer.submit(_write, folder, portable.to_save(optimizer.training, extra), keep, group, wires)
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
    rank, size = portable.world()
    with raising_peer_lost(optimizer.training.transports, where="checkpoint.load"):
        found, reader, old = _verified(Path(folder), name, rank, size)
    beside = (extras.SAME, extras.EACH)
    forms = {k: form for k, form in reader.forms.items() if extra is not None or not k.startswith(beside)}
    own = portable.own_rows(optimizer.training)
    added = roles.added(optimizer.training.states, forms, "state.")
    _check_keys(optimizer, extra, {**extras.joined(forms), **added})
    if old == size or place_of(optimizer.training)[1] == size:  # else no axis adds up what all ranks have read
        each = {k: dtype for k, (_, dtype) in forms.items() if k.startswith(extras.EACH)}
        own |= {k for k, dtype in each.items() if old == size or dtype.is_floating_point}
    filled = portable.to_fill(own, forms)
    wires = optimizer.training.transports
    with warnings.catch_warnings(), raising_peer_lost(wires, where="checkpoint.load"), _files("read", found):
        warnings.simplefilter("ignore")  # that a process is alone is no surprise here
        state_dict_loader.load(filled, storage_reader=reader)
    read: dict[str, Any] = {k: portable.local_rows(v) if k in own else v for k, v in filled.items()} | added
    of_state = any(k.startswith("state.") for k in own)
    in_memory_order = of_state and any(k.startswith(ORDER) for k in read)  # as version 0.2.0 saved channels_last
    state = {k: v.rows[0] if isinstance(v, Rows) else v for k, v in read.items()} if old == size else {}
    if old != size or in_memory_order:
        kind = " with elements in the order of memory" if in_memory_order else ""
        logger.info("checkpoint of %d ranks%s is loaded on %d; errors keep their mean", old, kind, size)
        beside_state = {k: v for k, v in state.items() if k.startswith(beside)}
        given = {k: v for k, v in read.items() if k not in beside_state}
        given = given if old == size else extras.of_another_world(given, old, size)
        state = {**portable.moved(optimizer.training, given), **beside_state}
    state = extras.joined(state)
    _restore(optimizer, state)
    return None if extra is None else _extra(extra, state)


def _check_arguments(optimizer: object, extra: Tree) -> None:
    portable.check_optimizer(optimizer)
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
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and portable.world()[0] == 0:
        text = (
            "torchrun keeps its key-value store over a restart, in which ranks may find the addresses of the last "
            "start and wait for them; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
        warnings.warn(text, stacklevel=3)


def _write(folder: Path, snapshot: portable.Snapshot, keep: int, group: Group, wires: Mapping[str, str]) -> Path:
    rank, size = portable.world()
    with raising_peer_lost(wires, where="checkpoint.save"):

        def gather_values(mine: Any) -> list[Any]:
            return _all(lambda: mine, size, group)

        for difference in differences({"steps": snapshot.steps}, gather_values):
            here, first = difference.values[difference.rank], difference.values[0]
            raise difference.error(
                f"the optimizer has taken {here} steps on rank {difference.rank} and {first} on rank 0; call "
                f"checkpoint.save on all ranks after the same step; nothing was saved"
            )
        check_replicated(snapshot.tensors, snapshot.device, gather_values)
        state = extras.apart(snapshot.tensors, snapshot.as_row, lambda act: _all(act, size, group))
    with warnings.catch_warnings(), raising_peer_lost(wires, where="checkpoint.save"), Claim(folder) as claim:
        warnings.simplefilter("ignore")

        def begin() -> files.Names:
            claim.take()
            return files.begin(folder, snapshot.steps, size)

        def finish() -> None:
            claim.check()
            files.finish(folder, names, keep)

        names: files.Names = _all(begin if rank == 0 else _nothing, size, group)[0]
        _all(lambda: files.check_seen(folder, names, rank), size, group)
        writing = folder / names.writing
        with _files("write", writing):
            state_dict_saver.save(state, storage_writer=FileSystemWriter(writing), process_group=group)
        _all(lambda: files.seal(folder, names, rank, size), size, group)
        _all(finish if rank == 0 else _nothing, size, group)
    logger.info("checkpoint of step %d is in %s", snapshot.steps, folder / names.done)
    return folder / names.done


def _nothing() -> None:
    pass


def _verified(folder: Path, name: str | None, rank: int, size: int) -> tuple[Path, Reader, int]:
    """Return a checkpoint, what reads its tensors, and its world size.

    Each rank looks at a part of the files, and all hear of damage.
    """

    def look() -> tuple[Path, int, set[str]]:
        if name is not None and not files.is_name(name):
            wanted = f"the name of a checkpoint in {folder}, without a path"
            raise ValueError(expected("name", wanted, f"{name!r}"))
        found = files.newest(folder) if name is None else folder / name
        return found, *files.verify(found, rank, size)

    each = _all(look, size)
    found, old, _ = each[rank]
    names = {name for _, _, some in each for name in some}
    read: list[Reader] = []
    _all(lambda: read.append(Reader(found, names)), size)
    return found, read[0], old


@contextmanager
def _files(act: str, folder: Path) -> Iterator[None]:
    """Raise an OSError where torch has an exception that is no `Exception`, and whose message is a traceback.

    Raises: CheckpointDamaged for what could be read, but is not what the metadata say; the KeyboardInterrupt of this
        rank, which torch catches, too.
    """
    try:
        yield
    except CheckpointException as error:
        own, _ = error.failures.get(portable.world()[0], (None, None))
        if own is not None and not isinstance(own, Exception):
            raise own from error
        rank, (problem, _) = min(error.failures.items())
        if act == "read" and isinstance(problem, Exception) and not isinstance(problem, OSError):
            said = f"does not describe what the files hold: {type(problem).__name__}: {problem}"
            raise files.damaged(folder / files.METADATA, said) from error
        text = f"checkpoint: rank {rank} could not {act} {folder}: {type(problem).__name__}: {problem}"
        raise OSError(text) from error


def _all(act: Callable[[], Any], size: int, group: Group = None) -> list[Any]:
    """Do something on every rank and return what each found; raise on all ranks what one of them raised.

    A disk that is full on one rank must not leave the others waiting.
    """
    mine: tuple[Any, Exception | None] = None, None
    try:
        mine = act(), None
    except Exception as error:
        mine = None, error
    both = [mine]
    if size > 1:
        both = [(None, None)] * size
        dist.all_gather_object(both, mine, group=group)
    for _, problem in both:
        if problem is not None:
            raise problem
    return [found for found, _ in both]


def _check_keys(optimizer: Optimizer, extra: Tree, forms: dict[str, Any]) -> None:
    wanted = set(portable.everything(optimizer.training, extra))
    optional = {k for k in wanted | set(forms) if is_optional(k) or (extra is None and k.startswith("extra."))}
    for key in sorted((wanted ^ set(forms)) - optional):
        what = "missing" if key in wanted else "of no use to this optimizer"
        split = SPLIT if key.startswith(("groups.", "params.")) else ""
        raise ValueError(f"checkpoint: {key!r} is {what}{about_servers(key, wanted, forms)}{split}")


def _restore(optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    params = {k: v for k, v in state.items() if k.startswith("params.")}
    live = {k: v for k, v in portable.everything(optimizer.training).items() if k in params}
    for key, p in live.items():
        if p.shape != params[key].shape or p.dtype != params[key].dtype:
            saved, here = (f"{x.dtype} {tuple(x.shape)}" for x in (params[key], p))
            raise ValueError(f"checkpoint: {key!r} is {saved}, but here {here}{SPLIT}")
    kept = {k: v for k, v in state.items() if not k.startswith(("params.", "extra."))}
    with defer_signals(), torch.no_grad():
        begin_writing()  # an interrupted load would leave the state of one checkpoint with the params of another
        restore_flat(optimizer.training, {**kept, SAVED_BY: flat_state(optimizer.training)[SAVED_BY]})
        with optimizer.training.writing():
            for key, p in live.items():
                p.copy_(params[key])


def _extra(extra: Tree, state: dict[str, Tensor]) -> Tree:
    return tree.unflatten(tree.flatten(extra)[1], [state[f"extra.{path}"] for path in tree.paths(extra)])
