"""Types of errors between ranks: each says which rank, what, and what to do.

A step that raises one of these has moved neither parameters nor state, so you can repeat it, save, or stop. If the
exchange of a round raises, the local step before it counts, and the exchange is left out.
They can be pickled, which needs a default for every argument but the message.
"""

from __future__ import annotations


def expected(argument: str, wanted: str, got: str, cure: str = "") -> str:
    """Return the text of an error, such as "x: expected 4 columns, but got 3; leave out the others"."""
    text = f"{argument}: expected {wanted}, but got {got}"
    return f"{text}; {cure}" if cure else text


SAME_CALL = "make the same calls in the same order on all ranks; what decides on one must be alike on all of them"
"""The cure for ranks that are in different calls."""


class PeerLost(RuntimeError):
    """A rank ended or stopped answering in the middle of an exchange.

    rank: the rank that raises this, on `axis`; None if not known.
    axis: where the exchange took place; None if not known.
    lost: the ranks of the axis that did not answer a roll call afterwards; empty if that could not be found out.
    """

    def __init__(self, message: str, *, rank: int | None = None, axis: str | None = None, lost: tuple[int, ...] = ()):
        super().__init__(message)
        self.rank = rank
        self.axis = axis
        self.lost = lost


class RanksDisagree(ValueError):
    """Ranks have different settings, parameters or schedules, or are in different calls. Raised on all of them.

    rank: the first rank that differs from rank 0. field: the first field, or leaf, that differs; "call" where the ranks
    are in different calls.
    """

    def __init__(self, message: str, *, rank: int = -1, field: str = ""):
        super().__init__(message)
        self.rank = rank
        self.field = field


class RefusedByAll(ValueError):
    """An error that all ranks raise alike, so that none of them waits for another one."""


class RanksDrifted(RanksDisagree):
    """Parameters or state that all ranks should hold alike differ in bits. Raised on all of them.

    step: the step before which it was found. since: the last step before which all were alike; None if none was.
    """

    def __init__(self, message: str, *, rank: int = -1, field: str = "", step: int = -1, since: int | None = None):
        super().__init__(message, rank=rank, field=field)
        self.step = step
        self.since = since


class CheckpointDamaged(ValueError):
    """A file of a checkpoint is missing or is not what was saved; nothing was loaded. file: its name."""

    def __init__(self, message: str, *, file: str = ""):
        super().__init__(message)
        self.file = file
