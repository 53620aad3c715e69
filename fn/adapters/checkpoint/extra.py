"""What a checkpoint keeps beside the optimizer: once where it is the same on all ranks, for each rank where it differs.

A model's running statistics differ between ranks whose batches do, and so do states of random generators.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fn.collectives.agreement import Difference, differences
from fn.transforms.moving import Rows, mean_of_rows

SAME, EACH = "extra.", "extra of each rank."
"""How the keys of leaves begin, of which there is one, or a row (W, ...) of each rank's."""

X = TypeVar("X")


def apart(
    state: Mapping[str, Tensor],
    as_row: Callable[[Tensor], Tensor],
    gather: Callable[[Callable[[], Any]], list[Any]],
) -> dict[str, Tensor]:
    """Return what to save, with a row of this rank's for each leaf of `extra` that is not the same on all ranks.

    Args: as_row: a tensor -> its row. gather: a function -> what it returns on each rank.
    Raises: `RanksDisagree`, on every rank, if a leaf's shape or dtype differs, or not all ranks have it.
    """
    mine: dict[str, list[str]] = {}
    gather(lambda: mine.update({key: [_form(x), _digest(x)] for key, x in state.items() if key.startswith(SAME)}))
    differing = differences(mine, lambda value: gather(lambda: value))
    for key, values in differing:
        leaf = key.removeprefix(SAME)
        difference = Difference(leaf, [x if x == "missing" else x[0] for x in values])
        if len(set(difference.values)) > 1:
            cure = "numbers may differ, but give all ranks the same leaves"
            raise difference.error(f"leaf {leaf!r} of extra {difference.where}; {cure}; nothing was saved")
    own = {key for key, _ in differing}
    return {EACH + k.removeprefix(SAME) if k in own else k: as_row(x) if k in own else x for k, x in state.items()}


def joined(saved: Mapping[str, X]) -> dict[str, X]:
    """Return what was saved under the keys of its leaves."""
    return {SAME + key.removeprefix(EACH) if key.startswith(EACH) else key: x for key, x in saved.items()}


def of_another_world(read: Mapping[str, Any], old: int, size: int) -> dict[str, Any]:
    """Return what all of `size` ranks are given of the rows (old, ...) that each rank has read in full.

    Floating-point numbers become their mean over the ranks that saved, as parameters of each rank's own do, so that a
    model's state dict agrees with what the optimizer loads. Others, such as a random generator's state, have no mean:
    all are given rank 0's, with a warning.
    """
    rows = {key: x for key, x in read.items() if key.startswith(EACH) and isinstance(x, Tensor)}
    firsts = sorted(key.removeprefix(EACH) for key, x in rows.items() if not x.is_floating_point())
    if firsts:
        warnings.warn(
            f"extra: {', '.join(map(repr, firsts[:3]))}{f' and {len(firsts) - 3} more' if len(firsts) > 3 else ''} "
            f"differed between the {old} ranks that saved; on {size} ranks all load what rank 0 had",
            stacklevel=3,
        )

    def given(x: Tensor) -> Tensor:
        return mean_of_rows(Rows(x, 0, old), lambda total: total) if x.is_floating_point() else x[0]

    return {**read, **{key: given(x) for key, x in rows.items()}}


def _form(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _digest(x: Tensor) -> str:
    numbers = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()
