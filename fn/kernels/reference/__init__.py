"""The specification: what every kernel means, in plain torch. Every other row of the table is held against it.

`codes` has the kernels on what travels. They are row-wise: a row is one rank's, or one message's, and no kernel looks
from one row at another. That is what lets a batch of simulated ranks be folded into the rows.

`steps` and `lists` have those on lists of tensors, which take an optimizer's step in place: they write into params and
moments. The pure updates of `transforms` say the same thing without writing; adapters, which own their buffers, run
these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fn.kernels.reference import codes, lists, steps
from fn.kernels.schemas import SCHEMAS

__all__ = ["REFERENCES", "codes", "lists", "steps"]

_BY_NAME = vars(codes) | vars(steps) | vars(lists)

REFERENCES: dict[str, Callable[..., Any]] = {name: _BY_NAME[name] for name in SCHEMAS}
"""What every kernel means, by name."""
