"""What the ranks say to each other in a step: `Phase`, or `Round` where parts of the params take turns in exchanges.

Both are host values, which a schedule returns. `NewParams` is what the update of a round returns in place of updates.
"""

from __future__ import annotations

import enum
import numbers
from typing import Any, Literal, NamedTuple

from fn.errors import expected

Tree = Any


class Phase(enum.Enum):
    """What the ranks send to each other in a step. A host value, never a tensor condition."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"

    def __init__(self, value: Any) -> None:
        self.phase = self
        """The phase itself, as a `Round` has one."""

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        raise ValueError(expected("phase", f"one of {', '.join(map(str, cls))}", f"{value!r}"))


class Round(NamedTuple):
    """What happens after the local step of `fn.outer`, by the numbers of fragments of the params.

    begin: the fragment whose exchange begins. end: the fragment whose exchange ends, and which is taken over; it is the
    same one where nothing happens in between. None: nothing does. A plain `Phase.COMPRESSED` is `Round(0, 0)`.
    """

    begin: int | None = None
    end: int | None = None

    @property
    def phase(self) -> Phase:
        """Return LOCAL where nothing begins or ends, else COMPRESSED."""
        return Phase.LOCAL if self.begin is None and self.end is None else Phase.COMPRESSED

    @property
    def local(self) -> Part:
        """Return the local step of the round."""
        return Part("local", self.phase)

    @property
    def exchange(self) -> list[Part]:
        """Return the parts that follow the local step."""
        found = []
        if self.begin is not None:
            found += [Part("difference", fragment=self.begin), Part("mean", fragment=self.begin)]
        if self.end is not None:
            found += [Part("outer", fragment=self.end)]
        return found


class Part(NamedTuple):
    """A part of a round, for adapters that write the local step before the exchange, or exchange on another thread.

    A round is its local step, then, where something begins, the difference to the anchor and its mean, and, where
    something ends, the outer step. What has no rounds takes its step in "local" and does nothing in the others, so
    nobody looks at the updates that these are given.

    kind: which part. fragment: whose. of: the phase of the round, which says what links without rounds do.
    """

    kind: Literal["local", "difference", "mean", "outer"]
    of: Phase = Phase.COMPRESSED
    fragment: int = 0

    @property
    def phase(self) -> Phase:
        """Return COMPRESSED for the part after which all ranks have something in common again, else LOCAL."""
        return Phase.COMPRESSED if self.kind == "outer" else Phase.LOCAL


class NewParams(NamedTuple):
    """Whole new params, which an update may return in place of updates. params: a tree like the params.

    `apply_updates` rounds them to the params' dtype. What has to be exact, such as params that all ranks hold alike, is
    handed on so: params + (new - params) is off by rounding.
    """

    params: Tree


def check_round(value: Round) -> None:
    """Refuse a round whose fields are no numbers of fragments. Raises: TypeError, or ValueError for one below 0."""
    for name, fragment in value._asdict().items():
        if fragment is None:
            continue
        if not isinstance(fragment, numbers.Integral) or isinstance(fragment, bool):
            raise TypeError(expected(f"phase.{name}", "the number of a fragment, or None", f"{fragment!r}"))
        if fragment < 0:
            raise ValueError(expected(f"phase.{name}", "the number of a fragment, from 0", f"{fragment!r}"))
