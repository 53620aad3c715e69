"""How an island finds the others: a store and a manager of torchft, from the environment that torchrun makes."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fn.arguments import checked
from fn.collectives.axis import ranks_around
from fn.errors import expected
from fn.schedules import Every, EverySeconds, Schedule

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The variable of the environment in which torchft looks for the lighthouse's address."""

MOST_FAILURES = 100
"""Exchanges that may fail in a row. More are no islands that were lost, and the process ends."""

RETRY = 5.0
"""Seconds after which a lighthouse that does not answer is asked again."""

MEETING = timedelta(seconds=20)
"""How long the islands of a new quorum wait for one of them to open its connections."""

PORT = 29510
"""Where torchft's lighthouse listens, if nothing else is said."""


@checked("lighthouse", "host", "name", "step_seconds", "patience")
def connect(
    schedule: Schedule,
    *,
    lighthouse: str | None = None,
    host: str | None = None,
    name: str | None = None,
    step_seconds: float = 10.0,
    patience: float = 120.0,
    pg: Any = None,
) -> Any:
    """Return the manager with which an island finds the others, for `fn.adapters.torchft.optimizer`.

        manager = fn.adapters.torchft.connect(schedule)
        opt = fn.adapters.torchft.optimizer(model.parameters(), make, manager, schedule=schedule, lr=4e-4)

    `python -m fn island --lighthouse host:port train.py` sets what it needs. Several ranks of an island call it
    together behind `init_process_group`.

    Args:
        schedule: `fn.every(h)` or `fn.every_seconds(t)`. A quorum waits for islands in the middle of a round: an hour,
            or two rounds of `step_seconds` a step if that is longer.
        lighthouse: its host:port; None: what TORCHFT_LIGHTHOUSE says.
        host: under which the other islands reach this machine; None: its address on the way to the lighthouse.
        name: of the island, in logs; None: the machine's.
        patience: seconds that a message between islands may take, before the exchange is dropped.
        pg: torchft's process group that exchanges; None: gloo's.
    Returns: torchft's Manager.
    Raises: ValueError without a lighthouse, or for one of several processes without a process group; TypeError for a
        schedule whose rounds are not known; ConnectionError if there is no way to the lighthouse; what torchft raises
        if none answers.
    """
    if not isinstance(schedule, Every | EverySeconds):
        cure = "make torchft's Manager yourself, with a quorum_timeout that is longer than a round"
        raise TypeError(expected("schedule", "fn.every(h) or fn.every_seconds(t)", type(schedule).__name__, cure))
    address = address_of(lighthouse or os.environ.get(LIGHTHOUSE) or "")
    if not dist.is_initialized() and ranks_around() > 1:
        got = f"one of {ranks_around()} processes without a process group"
        raise ValueError(expected("connect", "the ranks of an island", got, "call init_process_group first"))
    import torchft

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    host = host or address_towards(*address)
    # torchrun's own store stays over a restart. In it a rank would find the manager of the time before.
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None  # type: ignore[attr-defined]
    place = [host, store.port if store is not None else 0]
    if size > 1:
        dist.broadcast_object_list(place, src=0)
    round_seconds = step_seconds * (schedule.h / schedule.fragments if isinstance(schedule, Every) else 1)
    seconds = max(3600.0, 2 * (round_seconds + getattr(schedule, "seconds", 0.0)))
    limit = timedelta(seconds=2 * patience)  # a rank may be as late as an exchange that fails
    manager = torchft.Manager(
        pg=pg or _gloo(timedelta(seconds=patience)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # the optimizer does that, from the same island for all ranks
        timeout=limit,
        quorum_timeout=timedelta(seconds=seconds),
        max_retries=MOST_FAILURES,
        quorum_retries=round(seconds / RETRY),  # of a lighthouse that is started again
        rank=rank,
        world_size=size,
        store_addr=place[0],
        store_port=place[1],
        lighthouse_addr=f"http://{address[0]}:{address[1]}",
        replica_id=name or socket.gethostname(),
        hostname=host,
        checkpoint_transport=_reachable(host, limit),
    )
    if store is not None:
        _stores[manager] = store
    return manager


_stores: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Manager -> the store that it hosts, which ends with the object."""


def address_of(lighthouse: str) -> tuple[str, int]:
    """Return host and port of a lighthouse.

        >>> address_of("10.0.0.5"), address_of("http://paris:4000")
        (('10.0.0.5', 29510), ('paris', 4000))

    Raises: ValueError for what is no address.
    """
    text = lighthouse if "//" in lighthouse else f"//{lighthouse}"
    try:
        host, port = urlsplit(text).hostname, urlsplit(text).port
    except ValueError:
        host, port = None, None
    if not host:
        cure = f"start one with python -m fn lighthouse; {LIGHTHOUSE} may name it as well"
        raise ValueError(expected("lighthouse", "host:port", f"{lighthouse!r}", cure))
    return host, port or PORT


def address_towards(host: str, port: int) -> str:
    """Return this machine's own address on the way to another one, a lighthouse. Nothing is sent.

    Raises: ConnectionError that names the lighthouse if there is no machine of that name, or no way to it.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the second: of what can be no name
        reason = getattr(error, "strerror", None) or error
        cure = (
            f"check the name and the network of this machine: ping {host}; python -m fn lighthouse prints its address"
        )
        got = f"{host}:{port} ({reason})"
        raise ConnectionError(
            expected("lighthouse", "an address that this machine knows a way to", got, cure)
        ) from error


def _gloo(patience: timedelta) -> Any:
    """Return torchft's process group over gloo, which is sooner out of patience where islands meet.

    An island may end between the quorum and that. The others would wait for it as long as for an exchange.
    """
    from torchft import ProcessGroupGloo

    class Gloo(ProcessGroupGloo):  # type: ignore[misc]
        def configure(self, *args: Any, **more: Any) -> None:
            super().configure(*args, **more)
            self.parent._get_backend(torch.device("cpu"))._set_default_timeout(patience)

    return Gloo(timeout=MEETING)


def _reachable(host: str, timeout: timedelta) -> Any:
    """Return torchft's transport of checkpoints under a host that others reach; its own takes the machine's name."""
    from torchft.checkpointing import HTTPTransport

    class Reachable(HTTPTransport):  # type: ignore[misc]
        def address(self) -> str:
            theirs = urlsplit(super().address())
            return str(theirs._replace(netloc=f"{host}:{theirs.port}").geturl())

    return Reachable(timeout, num_chunks=0)
