"""One thread at a time on a process group: the messages of two steps would be taken for each other's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fn.errors import expected

_inside: dict[str, tuple[threading.Thread, int]] = {}
"""Transport -> the thread that is inside of steps over it, and how many of them."""

_looking = threading.Lock()


@contextmanager
def in_turn(wires: Mapping[str, str]) -> Iterator[None]:
    """Refuse to begin while another thread is inside of such a context over one of the transports.

    Args: wires: axis -> transport.
    Raises: RuntimeError that names the threads and the axis. Nothing was sent then.
    """
    here = threading.current_thread()
    with _looking:
        for axis, transport in wires.items():
            there, _ = _inside.get(transport, (here, 0))
            if there is not here:
                wanted = f"one step at a time over the process group of axis {axis!r}, so that no messages are mixed up"
                got = f"one in thread {here.name!r} while thread {there.name!r} is inside of another"
                cure = (
                    f"let the threads take turns, in the same order on all ranks, or give each a group of its own: "
                    f"fn.bind({{{axis!r}: torch.distributed.new_group()}})"
                )
                raise RuntimeError(expected("step", wanted, got, cure))
        for transport in {*wires.values()}:
            _inside[transport] = here, _inside.get(transport, (here, 0))[1] + 1
    try:
        yield
    finally:
        with _looking:
            for transport in {*wires.values()}:
                _, count = _inside.pop(transport)
                if count > 1:
                    _inside[transport] = here, count - 1
