"""What the ranks say to each other in a step: `Phase`, or `Round` where parts of the params take turns in exchanges.

Both are host values, which a schedule returns. `NewParams` is what the update of a round returns in place of updates.
"""

from __future__ import annotations

import enum
import numbers
from typing import Any, NamedTuple

from fn.errors import expected

Tree = Any


class Phase(enum.Enum):
    """What the ranks send to each other in a step. A host value, never a tensor condition."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"

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
