"""Flags on a device, by which a pure function chooses one of two results, and when the host reads them.

Reading a flag waits for the device. Selecting on the device, `torch.where(flag, new, old)`, takes a pass over both
results and the memory of a third. An adapter does neither. Nearly every flag is true, so it runs the function as if all
were (`assumed`), and reads them in one wait before it writes anything. If one is false, it runs the function again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fn.kernels.tracing import is_concrete

T = TypeVar("T")
Answer = tuple[int, Tensor, torch.Event]


class _Here(threading.local):
    """The flags that this thread takes to be true; None where it takes none so."""

    flags: list[Tensor] | None = None


_here = _Here()


@contextmanager
def temporarily(owner: Any, name: str, value: T) -> Iterator[T]:
    """Let an attribute have a value inside of this context, and behind it what it had before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        setattr(owner, name, before)


def assumed() -> AbstractContextManager[list[Tensor]]:
    """Take flags of a device to be true inside of this context, and collect them for whoever reads them afterwards.

    What was run holds only if all of them are true. Flags of the host are read as everywhere. Results are to be copied
    into memory that is there: some may be views that repeat one number.
    """
    return temporarily(_here, "flags", list[Tensor]())


def unassumed() -> AbstractContextManager[None]:
    """Assume no flag inside of this context: its flags are one rank's own, and the others must hear of them."""
    # A compiler sees no thread's own values.
    return nullcontext() if torch.compiler.is_compiling() else temporarily(_here, "flags", None)


def is_on_host(flag: Tensor) -> bool:
    """Return whether a flag can be read without a wait for a device."""
    return flag.device.type == "cpu"


def are_assumed() -> bool:
    """Tell whether this is inside of `assumed`."""
    return _here.flags is not None


def is_true(flag: Tensor, *, wait: bool = False) -> bool | None:
    """Return whether a 0-d flag is true; None where nobody can tell yet: select by it on the device then.

        >>> import torch
        >>> from fn.kernels.flags import is_true
        >>> is_true(torch.tensor(True)), torch.func.vmap(lambda x: x + (is_true(x > 0) is None))(torch.ones(2))
        (True, tensor([2., 2.]))

    None where it holds no number: in a trace, and one for each of many under `vmap`.

    Args: wait: outside of `assumed`, wait for a flag on a device. Else that is None, too.
    """
    if not is_concrete(flag):
        return None
    if is_on_host(flag) or (wait and _here.flags is None):
        return bool(flag)
    if _here.flags is None:
        return None
    # Whoever opened `assumed` reads it later: to read it here would wait for the device in every link.
    _here.flags.append(flag)
    return True


def all_of(flags: list[Tensor]) -> bool | Tensor:
    """Return whether all flags of a device are true, 0-d; True of none."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all() if flags else True


class Answers:
    """Flags of a device that stay true once they are: the host hears of each later, and does not wait.

    They belong to tensors, and are forgotten when those are written again; but once, by the step that asked.
    """

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()  # tensor -> (its last version of which it holds, the flag, its event)

    def ask(self, owner: Tensor, flag: Callable[[], Tensor]) -> None:
        """Ask whether a flag is true, 0-d on the device of its owner, if nobody traces."""
        if owner.device.type != "cpu" and is_concrete(owner):
            event = torch.Event(owner.device)
            coming = flag().to("cpu", non_blocking=True)  # torch makes it page-locked
            event.record()
            self._of[owner] = owner._version + 1, coming, event

    def known(self, owner: Tensor) -> bool:
        """Return whether a flag is known to be true."""
        found: Answer | None = self._of.get(owner) if is_concrete(owner) else None
        if found is None or owner._version > found[0] or not found[2].query() or not found[1]:
            return False
        self._of[owner] = owner._version, *found[1:]
        return True
