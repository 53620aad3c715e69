"""Do the ranks round alike? The rows of the accelerator table that serve each of them, by name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from fn.collectives.axis import AxisNames
from fn.kernels.table import rows

_said: set[str] = set()


def rows_here(device: torch.device | str) -> str:
    """Return the names of the rows that serve a device here, in the order in which they are asked."""
    device_type = torch.device(device).type
    return f"{', '.join(row.name for row in rows(device_type)) or 'the reference'} ({device_type})"


def warn_of_other_kernels(found: Sequence[str], axis: AxisNames) -> None:
    """Warn, once, of ranks whose kernels are not those of rank 0. found: `rows_here` of every rank."""
    others = {rank: rows for rank, rows in enumerate(found) if rows != found[0]}
    first = min(others)
    more = f" and {len(others) - 1} more ranks" if len(others) > 1 else ""
    text = (
        f"kernels: those of rank {first}{more} of axis {axis!r} are {others[first]}, those of rank 0 {found[0]}; they "
        f"round differently, so weights that all ranks should hold alike drift apart, a last bit at a time; install "
        f"the same packages on all ranks (`python -m fn` lists what is there), or, where the devices differ, average "
        f"the params every few hundred steps with fn.pmean"
    )
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=2)
