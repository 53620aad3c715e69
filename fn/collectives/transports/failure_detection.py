"""What to do when an exchange fails: let the others know, and find out which ranks are gone.

A loss is noticed by the ranks that were to hear from the one that is gone. Others wait for these, who will not send
any more: so they close their connections, and everybody notices.

A backend says that a connection was closed, or that time ran out, but not whose. So the ranks that are left call the
roll: each writes itself down in the key-value store through which the group met, and looks who else did. This is no
collective: nobody waits for anybody longer than `PATIENCE`. A store that does not answer names a lost rank, too:
rank 0, which hosts it for torch.
"""

from __future__ import annotations

import datetime
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from fn.collectives.transports import tcp
from fn.errors import PeerLost, RanksDisagree, RefusedByAll

PATIENCE = 0.5
"""Seconds that a roll call takes at most."""

TAG = 0x666F
"""The tag of a message that nobody sends."""

_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Group -> roll calls so far. The number is part of the key, so that an answer to an old call does not count."""

_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Group -> what this rank adds to its answers, so that one in an earlier group of the same name does not count."""


def remember(group: dist.ProcessGroup) -> str:
    """Remember a group for roll calls and return the name by which collectives find it."""
    name = str(group.group_name)
    # torch may give the name of a group that was destroyed to a new one, whose processes are others.
    if _groups.get(name) is not group:
        _groups[name] = group
        _write_down(group)
    return name


def is_loss(error: BaseException) -> bool:
    """Return whether an error says that a peer is gone or silent, as gloo, NCCL and the stores word it."""
    if isinstance(error, PeerLost) or not isinstance(error, RuntimeError):
        return False
    # gloo raises a plain RuntimeError for everything; only the text tells a lost peer from a wrong argument.
    closed = "gloo/transport", "Connection closed", "Connection reset", "Broken pipe", "pair closure"
    # The last ones are our own words for the message of another exchange: a rank that is elsewhere sends no other.
    words = (*closed, "Timed out", "timed out", "Wait timeout", "wait timeout", "sent (exchange, bytes)")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


OUT_OF_STEP = (
    "if no rank failed, some had fewer batches: drop the last ones, so that all take as many steps; or they were "
    "in other phases: a schedule may depend on the step only, and a checkpoint is loaded on all ranks; "
)
"""Why ranks that run may not meet in a step."""


def peer_lost(
    error: BaseException, collective: str, axis: str | None, transport: str, *, cause: str = OUT_OF_STEP
) -> PeerLost:
    """Return what to raise for a failed collective: who is gone, where it was noticed, and what to do.

    Args: cause: why ranks may not meet there although none is gone.
    """
    group = _groups.get(transport)
    abort_connections(transport)  # before the roll call: ranks that still wait for this one answer only once they fail
    lost, silent, has_store = find_lost_ranks(group) if group is not None else Roll((), ())
    rank = group.rank() if group is not None else None
    where = f" of axis {axis!r}" if axis is not None else ""
    who = f"rank {', '.join(map(str, lost))}{where} is gone or stopped" if lost else f"a rank{where} is lost"
    if silent and not lost:
        who += f", perhaps rank {', '.join(map(str, silent))}, which runs but does something else"
    store = "" if has_store else "; the key-value store, which rank 0 or its launcher hosts, does not answer either"
    message = (
        f"{who}, noticed in {collective} by rank {'?' if rank is None else rank}{store}; end this "
        f"process and resume from the last checkpoint (torchrun --max-restarts does); {cause}the backend says: {error}"
    )
    return PeerLost(message, rank=rank, axis=axis, lost=lost)


@contextmanager
def raising_peer_lost(
    wires: Mapping[str, str], others: Iterable[str] = (), *, where: str = "a step", left: str = ""
) -> Iterator[None]:
    """Raise `PeerLost` for a loss inside that no collective has named: those of compiled graphs.

    After a loss on one of the axes this rank is not heard of on the others either.

    Args: wires: axis -> transport; the error names the first axis. others: more transports on which it falls silent.
        where: what the message says it was noticed in. left: what the message ends with: how a loss leaves parameters
            and state, which a collective cannot know. "": nothing, for whoever surrounds this may know.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_loss(error) and not isinstance(error, PeerLost):
            raise
        for transport in {*wires.values(), *others}:
            abort_connections(transport)
        axis = next(iter(wires), None)
        known = isinstance(error, PeerLost)
        lost = error if known else peer_lost(error, where, axis, "" if axis is None else wires[axis])
        lost.args = (f"{lost}; {left}" if left else str(lost),)
        # Raised as it is: its traceback shows the collective that failed.
        if known:
            raise
        raise lost from error


@contextmanager
def falling_silent(transports: Iterable[str]) -> Iterator[None]:
    """Close this rank's connections where it fails alone, so that the others raise `PeerLost` and do not wait."""
    try:
        yield
    except (RanksDisagree, RefusedByAll):
        raise  # on all ranks alike
    except BaseException:  # Ctrl-C, too
        for transport in transports:
            abort_connections(transport)
        raise


def abort_connections(transport: str) -> None:
    """Close this rank's connections of a gloo group, ours and its own, so that whoever waits for this rank notices.

    gloo has no call for that. But a receive whose time runs out closes all connections of its group, so this asks each
    peer for a message that nobody sends, and waits a millisecond.
    """
    group = _groups.get(transport)
    if group is None or not tcp.is_gloo(group):
        return
    tcp.abort_connections(group)
    for peer in set(range(group.size())) - {group.rank()}:
        try:
            work = dist.irecv(torch.empty(1, dtype=torch.float32, device="cpu"), group=group, group_src=peer, tag=TAG)
            if work is not None:
                work.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):  # all are closed now; else this one was broken already, and the next is tried
                return


class Roll(NamedTuple):
    """The ranks that did not answer a roll call: lost, which are gone; silent, whose processes run on this host.

    has_store: whether the store answered.
    """

    lost: tuple[int, ...]
    silent: tuple[int, ...]
    has_store: bool = True


def find_lost_ranks(group: dist.ProcessGroup) -> Roll:
    """Return the ranks of a group that do not answer within `PATIENCE`: that are gone, and that are alive on this host.

    A rank may be silent because it still waits in an exchange; on this host its process tells. If the store does not
    answer, the rank that hosts it is gone; of the others nothing is known.
    """
    number = _calls[group] = _calls.get(group, 0) + 1
    store, rolls = _store_of(group), list[Roll]()
    if store is None:
        return Roll((), ())
    # In a thread of its own: a store whose host is stopped, not dead, blocks until its own timeout.
    asking = threading.Thread(target=_ask, args=(group, store, number, rolls), daemon=True)
    asking.start()
    asking.join(2 * PATIENCE)
    return rolls[-1] if rolls else Roll(tuple(_hosts_of(store, group)), (), has_store=False)


def _ask(group: Any, store: Any, number: int, rolls: list[Roll]) -> None:
    """Call the roll. A first, empty roll says that the store is there, but slow perhaps."""
    until, alive = time.monotonic() + PATIENCE, dict[int, bool | None]()
    silent, answer = set(range(group.size())) - {group.rank()}, f"fn/roll call {number}/{group.rank()}"
    try:
        store.set(answer, _process(group))
        store.check([answer])
        rolls.append(Roll((), ()))
        while True:
            # Before the answers are read: in the other order a rank that answers and ends between would count as lost.
            alive = {rank: _is_alive_here(store, rank) for rank in silent}
            silent = {rank for rank in silent if not _has_answered(store, number, rank)}
            if all(alive[rank] is False for rank in silent) or time.monotonic() > until:
                break
            time.sleep(0.02)  # they may answer, or be about to die
    except RuntimeError:  # the store is gone; its host may have answered before
        lost = {rank for rank in silent if alive.get(rank) is False} | (silent & _hosts_of(store, group))
        rolls.append(Roll(tuple(sorted(lost)), (), has_store=False))
        return
    lost = {rank for rank in silent if not alive[rank]}
    rolls.append(Roll(tuple(sorted(lost)), tuple(sorted(silent - lost))))


def _store_of(group: Any) -> Any:
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a torch or a group without one
        return None


def _hosts_of(store: Any, group: Any) -> set[int]:
    """Return the rank of a group that hosts its store: the first of all ranks, as `init_process_group` has it.

    Nobody if that is this rank, or not in the group; if the store is no `TCPStore`, or torchrun's agent hosts it.
    """
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    is_hosted = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    if not is_hosted or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return set()
    world_ranks = dist.get_process_group_ranks(group)
    return {rank for rank, world_rank in enumerate(world_ranks) if world_rank == 0} - {group.rank()}


def _has_answered(store: Any, number: int, rank: int) -> bool:
    """Return whether a rank is in the roll: its process and group of today, for a store may outlive both."""
    answer, process = f"fn/roll call {number}/{rank}", f"fn/process of rank/{rank}"
    if not store.check([answer]):
        return False
    return not store.check([process]) or bool(store.get(answer) == store.get(process))


def _write_down(group: Any) -> None:
    store = _store_of(group)
    with suppress(RuntimeError):
        if store is not None:
            store.set(f"fn/process of rank/{group.rank()}", _process(group))


def _process(group: Any) -> str:
    return f"{this_machine()} {os.getpid()} {_tokens.setdefault(group, secrets.token_hex(8))}"


def this_machine() -> str:
    """Return what names this machine and its process numbers.

    A host's name would not do: containers may share one, and number their processes apart.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: then no process is known to be alive here
        return f"unknown-{os.getpid()}"


def _is_alive_here(store: Any, rank: int) -> bool | None:
    """Return whether the process of a rank is there and runs; None if it is not on this machine."""
    key = f"fn/process of rank/{rank}"
    if not store.check([key]):
        return None
    where, process, *_ = store.get(key).decode().split(" ")
    if where != this_machine():
        return None
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "TtZX"  # stopped, traced, dead
